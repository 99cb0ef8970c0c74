// Decoding: the tokens of the cache stand in lanes, so that a few rows cost little more than reading the cache.
//
// Sixteen keys are transposed in registers and multiplied with a broadcast word of each row: scores of sixteen
// tokens come out in one vector. Values are read once for all rows.
#pragma once

#include "attention.h"

namespace attention {

constexpr int kFewRows = 8;
constexpr int kStretch = 128;  // tokens between two looks at the maximum
constexpr int kAhead = 48;     // tokens between asking for a key or value and reading it

struct FewRowsScratch {
    alignas(64) uint32_t queries[kFewRows * kMaxHeadDim];  // [row][word]
    alignas(64) float scores[kFewRows * kStretch];         // [row][token], then probabilities as T
    alignas(64) float attended[kFewRows * kMaxHeadDim];    // [row][head_dim]
};

template <class T, int ROWS>
struct FewRows {
    const Slice<T> slice;
    FewRowsScratch& s;
    float maxima[ROWS], shrinks[ROWS];
    F32 totals[ROWS];

    static constexpr int kPerWord = Words<T>::kPerWord;

    void run() {
        for (int row = 0; row < ROWS; ++row) {
            memcpy(s.queries + row * kMaxHeadDim, slice.query(row), slice.call.head_dim * sizeof(T));
            std::fill_n(s.attended + row * kMaxHeadDim, slice.call.head_dim, 0.0f);
            maxima[row] = -kInfinity;
            totals[row] = F32{};
        }
        const int64_t last = slice.last_position();
        for (int64_t start = 0; start <= last; start += kStretch) {
            const int count = (int)std::min<int64_t>(kStretch, last + 1 - start);
            for (int token = 0; token < count; token += kLanes) score(start + token, token, count);
            for (int row = 0; row < ROWS; ++row) weigh(row, start, count);
            accumulate_all(start, count);
        }
        write();
    }

private:
    int64_t num_words() const { return slice.call.head_dim / kPerWord; }

    // Scores of 16 tokens; those of a group that holds no token of the sequence repeat the group before.
    void score(int64_t first, int column, int count) {
        const T* groups[2] = {slice.token(first, 0), nullptr};
        groups[1] = column + kTokenGroup < count ? slice.token(first + kTokenGroup, 0) : groups[0];
        fetch(first + kAhead);
        F32 sums[ROWS][2] = {};
        for (int64_t word = 0; word < num_words(); word += kLanes) {
            const int words = (int)std::min<int64_t>(kLanes, num_words() - word);  // 8 or 16
            U32 square[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                const T* key = groups[i / kTokenGroup] + i % kTokenGroup * slice.call.head_dim + word * kPerWord;
                square[i] = words == kLanes ? load_words(key) : load_half(key);
            }
            transpose(square);
            for (int i = 0; i < kLanes; ++i)
                for (int row = 0; row < ROWS; ++row) {
                    const U32 query = splat_word(s.queries[row * kMaxHeadDim + word + i % words]);
                    sums[row][i % 2] = Words<T>::dot(sums[row][i % 2], square[i], query);
                }
        }
        for (int row = 0; row < ROWS; ++row) store(s.scores + row * kStretch + column, sums[row][0] + sums[row][1]);
    }

    // Blocks lie anywhere, so the processor cannot guess what comes next.
    void fetch(int64_t first) {
        const int64_t bytes = kTokenGroup * slice.call.head_dim * sizeof(T);
        for (int64_t token = first; token < first + kLanes && token <= slice.last_position(); token += kTokenGroup)
            for (int is_value = 0; is_value < 2; ++is_value)
                for (int64_t line = 0; line < bytes; line += 64)
                    __builtin_prefetch((const char*)slice.token(token, is_value) + line, 0, 2);
    }

    void weigh(int row, int64_t start, int count) {
        float* scores = s.scores + row * kStretch;
        const int seen = (int)std::min<int64_t>(count, slice.position(row) + 1 - start);
        F32 maximum = splat(-kInfinity);
        for (int token = 0; token < count; token += kLanes) {
            const I32 shown = kLaneIndex < seen - token;
            const F32 score = shown ? load(scores + token) : splat(-kInfinity);
            store(scores + token, score);
            maximum = larger(maximum, score);
        }
        const float newest = std::max(maxima[row], largest_of(maximum));
        const float anchor = newest == -kInfinity ? 0 : newest;
        const float exponent = slice.call.scale * kLog2E;
        F32 total = {};
        for (int token = 0; token < count; token += kLanes) {
            const F32 p = exp2<Words<T>::kExpDegree>((load(scores + token) - anchor) * exponent);
            total += p;
            store((T*)scores + token, p);
        }
        shrinks[row] = exp2(splat((maxima[row] - anchor) * exponent))[0];
        maxima[row] = newest;
        totals[row] = totals[row] * shrinks[row] + total;
    }

    void accumulate_all(int64_t start, int count) {
        constexpr int kVectors = ROWS <= 6 ? 4 : 2;
        int64_t dim = 0;
        for (; dim + kVectors * kLanes <= slice.call.head_dim; dim += kVectors * kLanes)
            accumulate<kVectors>(dim, start, count);
        for (; dim < slice.call.head_dim; dim += kLanes) accumulate<1>(dim, start, count);
    }

    template <int VECTORS>
    void accumulate(int64_t dim, int64_t start, int count) {
        const int64_t head_dim = slice.call.head_dim;
        Sums<ROWS, VECTORS> sums;
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] = load(s.attended + row * kMaxHeadDim + dim + v * kLanes) * shrinks[row];
        for (int group = 0; group < count; group += kTokenGroup) {
            const T* values = slice.token(start + group, 1) + dim;
            const int end = std::min(count, group + kTokenGroup);
            int token = group;
            for (; token + kPerWord <= end; token += kPerWord, values += kPerWord * head_dim)
                add_word<VECTORS>(values, token, kPerWord, sums);
            if (token < end) add_word<VECTORS>(values, token, end - token, sums);
        }
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v)
                store(s.attended + row * kMaxHeadDim + dim + v * kLanes, sums[row][v]);
    }

    // The values of one word of tokens, of which the first `tokens` exist.
    template <int VECTORS>
    LANES_INLINE_MEMBER void add_word(const T* values, int token, int tokens, Sums<ROWS, VECTORS>& sums) {
        U32 words[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            words[v] = Words<T>::pack_rows(values + v * kLanes, slice.call.head_dim, tokens);
        for (int row = 0; row < ROWS; ++row) {
            uint32_t bits;
            memcpy(&bits, (const T*)(s.scores + row * kStretch) + token, 4);
            const U32 probability = splat_word(bits);
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = Words<T>::dot(sums[row][v], words[v], probability);
        }
    }

    void write() {
        for (int row = 0; row < ROWS; ++row) {
            const float total = sum_of(totals[row]);
            const float inverse = total > 0 ? 1 / total : 0;
            T* out = slice.result(row);
            for (int64_t dim = 0; dim < slice.call.head_dim; dim += kLanes)
                store(out + dim, load(s.attended + row * kMaxHeadDim + dim) * inverse);
            slice.tell_lse(row, maxima[row] * slice.call.scale, total);
        }
    }
};

}  // namespace attention
