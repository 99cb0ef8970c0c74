// Decoding: the tokens of the cache stand in lanes, so that a few rows cost little more than reading the cache.
//
// Keys are transposed in registers and multiplied with a broadcast word of each row: the scores of a token for
// each lane come out in one vector. Values are read once for all rows. Blocks lie anywhere in memory, where the
// processor cannot guess what comes next: so while the keys of a stretch are read its values are asked for, and
// while its values are read the keys of the next stretch, which may be the next item's.
#pragma once

#include "attention.h"

namespace attention {

constexpr int kFewRows = 8;
constexpr int kStretch = 128;  // tokens between two looks at the maximum

struct FewRowsScratch {
    alignas(64) uint32_t queries[kFewRows * kMaxHeadDim];  // [row][word]
    alignas(64) float scores[kFewRows * kStretch];         // [row][token], then probabilities as T
    alignas(64) float attended[kFewRows * kMaxHeadDim];    // [row][head_dim]
};

// Where the keys of some tokens lie; their values lie a fixed distance behind them.
template <class T>
struct Stretch {
    const T* groups[kStretch / kTokenGroup];
    int64_t first = 0;
    int count = 0;  // tokens

    void locate(const Slice<T>& slice, int64_t start) {
        first = start;
        count = (int)std::max<int64_t>(0, std::min<int64_t>(kStretch, slice.last_position() + 1 - start));
        for (int token = 0; token < count; token += kTokenGroup)
            groups[token / kTokenGroup] = slice.token(start + token, 0);
    }
    int num_groups() const { return (count + kTokenGroup - 1) / kTokenGroup; }
};

LANES_INLINE void fetch(const void* from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char*)from + line, 0, 2);
}

template <class T, int ROWS>
struct FewRows {
    const Slice<T> slice;
    const Slice<T>* following;  // the item that this thread computes next, or null
    FewRowsScratch& s;
    float maxima[ROWS], shrinks[ROWS];
    F32 totals[ROWS];

    static constexpr int kPerWord = Words<T>::kPerWord;

    void run() {
        for (int row = 0; row < ROWS; ++row) {
            memcpy(s.queries + row * kMaxHeadDim, slice.query(slice.row(row)), slice.call.head_dim * sizeof(T));
            std::fill_n(s.attended + row * kMaxHeadDim, slice.call.head_dim, 0.0f);
            maxima[row] = -kInfinity;
            totals[row] = F32{};
        }
        Stretch<T> now, next;
        for (now.locate(slice, 0); now.count > 0; now = next) {
            for (int token = 0; token < now.count; token += kLanes) score(now, token);
            for (int row = 0; row < ROWS; ++row) weigh(row, now);
            next.locate(slice, now.first + kStretch);
            if (next.count > 0 || !following) {
                accumulate_all(now, next);
            } else {
                Stretch<T> other;
                other.locate(*following, 0);
                accumulate_all(now, other);
            }
        }
        write();
    }

private:
    int64_t num_words() const { return slice.call.head_dim / kPerWord; }

    // Scores of a vector of tokens; those of a group that holds no token of the sequence repeat the group before.
    void score(const Stretch<T>& now, int column) {
        const T* groups[2] = {now.groups[column / kTokenGroup], nullptr};
        groups[1] = column + kTokenGroup < now.count ? now.groups[column / kTokenGroup + 1] : groups[0];
        const int64_t head_dim = slice.call.head_dim, to_values = slice.call.block_size * head_dim;
        F32 sums[ROWS][2] = {};
        for (int64_t word = 0; word < num_words(); word += kLanes) {
            const int words = (int)std::min<int64_t>(kLanes, num_words() - word);  // 8 or kLanes
            U32 square[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                const T* key = groups[i / kTokenGroup] + i % kTokenGroup * head_dim + word * kPerWord;
                square[i] = load_words_upto(key, words);
                __builtin_prefetch(key + to_values, 0, 2);
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

    void weigh(int row, const Stretch<T>& now) {
        float* scores = s.scores + row * kStretch;
        const int seen = (int)std::min<int64_t>(now.count, slice.position(slice.row(row)) + 1 - now.first);
        F32 maximum = splat(-kInfinity);
        for (int token = 0; token < now.count; token += kLanes) {
            const I32 shown = kLaneIndex < seen - token;
            const F32 score = shown ? load(scores + token) : splat(-kInfinity);
            store(scores + token, score);
            maximum = larger(maximum, score);
        }
        const float newest = std::max(maxima[row], largest_of(maximum));
        const float anchor = newest == -kInfinity ? 0 : newest;
        const float exponent = slice.call.scale * kLog2E;
        F32 total = {};
        for (int token = 0; token < now.count; token += kLanes) {
            const F32 p = exp2<Words<T>::kExpDegree>((load(scores + token) - anchor) * exponent);
            total += p;
            store((T*)scores + token, p);
        }
        shrinks[row] = exp2(splat((maxima[row] - anchor) * exponent))[0];
        maxima[row] = newest;
        totals[row] = totals[row] * shrinks[row] + total;
    }

    void accumulate_all(const Stretch<T>& now, const Stretch<T>& next) {
        constexpr int kFitting = kRegisters * 3 / 4 / ROWS;
        constexpr int kVectors = kFitting >= 4 ? 4 : kFitting >= 2 ? 2 : 1;
        int64_t dim = 0;
        for (; dim + kVectors * kLanes <= slice.call.head_dim; dim += kVectors * kLanes)
            accumulate<kVectors>(dim, now, next);
        for (; dim < slice.call.head_dim; dim += kLanes) accumulate<1>(dim, now, next);
    }

    template <int VECTORS>
    void accumulate(int64_t dim, const Stretch<T>& now, const Stretch<T>& next) {
        const int64_t head_dim = slice.call.head_dim, to_values = slice.call.block_size * head_dim;
        Sums<ROWS, VECTORS> sums;
        for (int row = 0; row < ROWS; ++row)
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] = load(s.attended + row * kMaxHeadDim + dim + v * kLanes) * shrinks[row];
        for (int group = 0; group < now.num_groups(); ++group) {
            if (dim == 0)
                for (int other = next.num_groups() * group / now.num_groups();
                     other < next.num_groups() * (group + 1) / now.num_groups(); ++other)
                    fetch(next.groups[other], kTokenGroup * head_dim * sizeof(T));
            const T* values = now.groups[group] + to_values + dim;
            const int end = std::min(now.count, (group + 1) * kTokenGroup);
            int token = group * kTokenGroup;
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
            T* out = slice.result(slice.row(row));
            for (int64_t dim = 0; dim < slice.call.head_dim; dim += kLanes)
                store(out + dim, load(s.attended + row * kMaxHeadDim + dim) * inverse);
            slice.tell_lse(slice.row(row), maxima[row] * slice.call.scale, total);
        }
    }
};

}  // namespace attention
