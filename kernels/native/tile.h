// The inner loop of every matrix product here: a tile of sums kept in registers.
#pragma once

#include "lanes.h"

namespace lanes {

template <int ROWS, int VECTORS>
using Sums = F32[ROWS][VECTORS];

// Rows as a product reads them: the word of row r at depth d lies at `from + r * row_step + d * word_step` bytes.
struct Rows {
    const char* from;
    size_t row_step, word_step;
};

// Lines to ask for meanwhile, one per step.
struct Ahead {
    const char* from;
    int64_t step;
};

// sums[r][v] += the dot products of ROWS rows with VECTORS x kLanes columns over `depth` words; `columns` holds
// VECTORS x kLanes words per step. The order of summation does not depend on ROWS or VECTORS, so that a row's result
// is the same whatever it is computed together with.
template <class T, int ROWS, int VECTORS>
LANES_INLINE void multiply(
    Rows rows, const uint32_t* columns, int64_t depth, Ahead ahead, Sums<ROWS, VECTORS>& sums) {
    for (int64_t word = 0; word < depth; ++word) {
        U32 column[VECTORS];
        for (int v = 0; v < VECTORS; ++v) column[v] = load_words(columns + (word * VECTORS + v) * kLanes);
        __builtin_prefetch(ahead.from + word * ahead.step, 0, 2);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            uint32_t bits;
            memcpy(&bits, rows.from + row * rows.row_step + word * rows.word_step, 4);
            const U32 broadcast = splat_word(bits);
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = Words<T>::dot(sums[row][v], column[v], broadcast);
        }
    }
}

// Perfect shuffles: zip of the lower, and of the upper, halves of a and b.
#ifdef __AVX512F__
LANES_INLINE U32 zip_low(U32 a, U32 b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
LANES_INLINE U32 zip_high(U32 a, U32 b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
LANES_INLINE U32 zip_low(U32 a, U32 b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
LANES_INLINE U32 zip_high(U32 a, U32 b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#endif

LANES_INLINE void transpose(U32 (&square)[kLanes]) {
    for (int size = 1; size < kLanes; size *= 2) {
        U32 next[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            next[2 * i] = zip_low(square[i], square[i + kLanes / 2]);
            next[2 * i + 1] = zip_high(square[i], square[i + kLanes / 2]);
        }
        for (int i = 0; i < kLanes; ++i) square[i] = next[i];
    }
}

}  // namespace lanes
