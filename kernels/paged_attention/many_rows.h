// Prompt chunks: the rows of an item stand in lanes.
//
// Scores are computed transposed, a word of a key broadcast against that word of all rows, so that keys are read
// where they lie, and the softmax of a row needs no sum across lanes. Keys come in tiles of 64 counted from the
// sequence's start: a row's result does not depend on the rows it is computed with.
#pragma once

#include "attention.h"

namespace attention {

constexpr int kMaxVectors = kRegisters >= 32 ? 3 : 1;
constexpr int kMaxRows = kMaxVectors * kLanes;
constexpr int kTileTokens = 64;

// What one thread works in; reused from item to item.
struct ManyRowsScratch {
    alignas(64) uint32_t queries[kMaxHeadDim * kMaxRows];    // [word][row]
    alignas(64) float scores[kTileTokens * kMaxRows];        // [token][row], then probabilities [word][row]
    alignas(64) uint32_t values[kTileTokens * kMaxHeadDim];  // [word of tokens][head_dim]
    alignas(64) float attended[kMaxHeadDim * kMaxRows];      // [head_dim][row]
};

template <class T, int VECTORS>
struct ManyRows {
    const Slice<T> slice;
    ManyRowsScratch& s;
    Row rows[VECTORS * kLanes];
    I32 positions[VECTORS];
    F32 maxima[VECTORS], totals[VECTORS], shrinks[VECTORS];

    static constexpr int kRows = VECTORS * kLanes;
    static constexpr int kPerWord = Words<T>::kPerWord;
    // Enough sums to hide the latency of the products, few enough to stay in registers.
    static constexpr int kDims = VECTORS == 1 && kRegisters >= 32 ? 16 : 8;

    void run() {
        gather_queries();
        std::fill(s.attended, s.attended + slice.call.head_dim * kRows, 0.0f);
        const int64_t last = slice.last_position(), first = slice.first_position();
        for (int64_t start = 0; start <= last; start += kTileTokens) {
            const int count = (int)std::min<int64_t>(kTileTokens, last + 1 - start);
            const int padded = (count + kTokenGroup - 1) / kTokenGroup * kTokenGroup;
            score(start, padded);
            for (int v = 0; v < VECTORS; ++v) {
                if (start + padded - 1 > first) hide_later(v, start, padded);
                weigh(v, padded);
            }
            gather_values(start, count, padded);
            accumulate(padded, start + kTileTokens);
        }
        write();
    }

private:
    int64_t num_words() const { return slice.call.head_dim / kPerWord; }
    // Bytes to ask for at each word, so that all words together ask for a group of tokens.
    int64_t group_step() const { return kTokenGroup * slice.call.head_dim * (int64_t)sizeof(T) / num_words(); }

    LANES_APART void gather_queries() {
        for (int v = 0; v < VECTORS; ++v) {
            const int first = v * kLanes, count = std::min(kLanes, slice.item.num_rows - first);
            maxima[v] = splat(-kInfinity);
            totals[v] = F32{};
            for (int lane = 0; lane < kLanes; ++lane) {
                rows[first + lane] = slice.row(first + lane);
                positions[v][lane] = lane < count ? (int32_t)slice.position(rows[first + lane]) : -1;
            }
            for (int64_t word = 0; word < num_words(); word += kLanes) {
                const int words = (int)std::min<int64_t>(kLanes, num_words() - word);
                U32 square[kLanes] = {};
                for (int lane = 0; lane < count; ++lane)
                    square[lane] = load_words_upto(slice.query(rows[first + lane]) + word * kPerWord, words);
                transpose(square);
                for (int i = 0; i < words; ++i) store_words(s.queries + (word + i) * kRows + first, square[i]);
            }
        }
    }

    LANES_APART void score(int64_t start, int padded) {
        const size_t key_bytes = slice.call.head_dim * sizeof(T);
        for (int token = 0; token < padded; token += kTokenGroup) {
            Sums<kTokenGroup, VECTORS> sums = {};
            const Rows keys{(const char*)slice.token(start + token, 0), key_bytes, 4};
            const Ahead values{keys.from + slice.call.block_size * key_bytes, group_step()};
            multiply<T, kTokenGroup, VECTORS>(keys, s.queries, num_words(), values, sums);
            for (int i = 0; i < kTokenGroup; ++i)
                for (int v = 0; v < VECTORS; ++v) store(s.scores + (token + i) * kRows + v * kLanes, sums[i][v]);
        }
    }

    LANES_APART void hide_later(int v, int64_t start, int padded) {
        for (int token = 0; token < padded; ++token) {
            float* score = s.scores + token * kRows + v * kLanes;
            const I32 seen = positions[v] >= (int32_t)(start + token);
            store(score, seen ? load(score) : splat(-kInfinity));
        }
    }

    // Turns the scores of a tile into probabilities relative to the new maxima, packed as words of tokens.
    LANES_APART void weigh(int v, int padded) {
        float* column = s.scores + v * kLanes;
        F32 maximum[2] = {maxima[v], maxima[v]};
        for (int token = 0; token < padded; token += 2)
            for (int i = 0; i < 2; ++i) maximum[i] = larger(maximum[i], load(column + (token + i) * kRows));
        const F32 newest = larger(maximum[0], maximum[1]);
        const F32 anchor = newest == -kInfinity ? F32{} : newest;
        const float exponent = slice.call.scale * kLog2E;
        const F32 offset = anchor * exponent;
        F32 total[2] = {};
        for (int token = 0; token < padded; token += 2) {
            F32 p[2];
            for (int i = 0; i < 2; ++i) {
                p[i] = exp2<Words<T>::kExpDegree>(load(column + (token + i) * kRows) * exponent - offset);
                total[i] += p[i];
            }
            for (int i = 0; i < 2; i += kPerWord)
                store_words((uint32_t*)column + (token + i) / kPerWord * kRows, Words<T>::pack_positive(p + i));
        }
        shrinks[v] = exp2((maxima[v] - anchor) * exponent);
        maxima[v] = newest;
        totals[v] = totals[v] * shrinks[v] + (total[0] + total[1]);
    }

    // Tokens past `count` count as zero: their memory may never have been written.
    LANES_APART void gather_values(int64_t start, int count, int padded) {
        const int64_t head_dim = slice.call.head_dim;
        for (int group = 0; group < padded; group += kTokenGroup) {
            const T* values = slice.token(start + group, 1);
            for (int token = group; token < group + kTokenGroup; token += kPerWord, values += kPerWord * head_dim) {
                uint32_t* words = s.values + token / kPerWord * head_dim;
                for (int64_t dim = 0; dim < head_dim; dim += kLanes)
                    store_words(words + dim, token + kPerWord <= count
                        ? Words<T>::pack_rows(values + dim, head_dim, kPerWord)
                        : Words<T>::pack_rows(values + dim, head_dim, count - token));
            }
        }
    }

    // Meanwhile asks for the keys from token `next` on.
    LANES_APART void accumulate(int padded, int64_t next) {
        const int64_t head_dim = slice.call.head_dim, last = slice.last_position();
        const int64_t step = kTokenGroup * head_dim * (int64_t)sizeof(T) * kPerWord / padded;
        for (int64_t dim = 0; dim < head_dim; dim += kDims) {
            Sums<kDims, VECTORS> sums;
            float* attended = s.attended + dim * kRows;
            for (int i = 0; i < kDims; ++i)
                for (int v = 0; v < VECTORS; ++v)
                    sums[i][v] = load(attended + (i * VECTORS + v) * kLanes) * shrinks[v];
            const Rows values{(const char*)(s.values + dim), 4, (size_t)head_dim * 4};
            const Ahead keys{(const char*)slice.token(std::min(next + dim / kDims * kTokenGroup, last), 0), step};
            multiply<T, kDims, VECTORS>(values, (const uint32_t*)s.scores, padded / kPerWord, keys, sums);
            for (int i = 0; i < kDims; ++i)
                for (int v = 0; v < VECTORS; ++v) store(attended + (i * VECTORS + v) * kLanes, sums[i][v]);
        }
    }

    LANES_APART void write() {
        for (int v = 0; v < VECTORS; ++v) {
            const F32 inverse = totals[v] > 0.0f ? 1.0f / totals[v] : F32{};
            const int first = v * kLanes, count = std::min(kLanes, slice.item.num_rows - first);
            for (int64_t dim = 0; dim < slice.call.head_dim; dim += kLanes) {
                U32 square[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    square[i] = (U32)(load(s.attended + (dim + i) * kRows + first) * inverse);
                transpose(square);
                for (int lane = 0; lane < count; ++lane)
                    store(slice.result(rows[first + lane]) + dim, (F32)square[lane]);
            }
            for (int lane = 0; lane < count; ++lane)
                slice.tell_lse(rows[first + lane], maxima[v][lane] * slice.call.scale, totals[v][lane]);
        }
    }
};

}  // namespace attention
