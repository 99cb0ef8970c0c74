// Sixteen 32-bit lanes, and bfloat16 or float32 data seen as 32-bit words: one word holds two bfloat16 or one
// float32. A kernel written over words serves both types. GCC's vector extension keeps this portable: without
// AVX-512 the compiler splits each operation over smaller registers.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace lanes {

constexpr int kLanes = 16;

typedef float F32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef float F32Unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint32_t U32Unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint16_t U16Unaligned __attribute__((vector_size(32), aligned(2)));

struct Bf16 {
    uint16_t bits;
};

#define LANES_INLINE static inline __attribute__((always_inline))

LANES_INLINE F32 splat(float value) { return value - (F32){}; }
LANES_INLINE U32 splat_word(uint32_t word) { return word - (U32){}; }

LANES_INLINE float to_float(float value) { return value; }
LANES_INLINE float to_float(Bf16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// Rounds to nearest, ties to even. NaN stays NaN (a quiet one).
LANES_INLINE U32 round_to_bf16_bits(F32 value) {
    U32 bits = (U32)value;
    U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (U32)(value == value ? (I32)rounded : (I32)(splat_word(0x7fc0)));
}

LANES_INLINE F32 load(const float* from) { return *(const F32Unaligned*)from; }
LANES_INLINE F32 load(const Bf16* from) {
    U32 wide = __builtin_convertvector(*(const U16Unaligned*)from, U32);
    return (F32)(wide << 16);
}
LANES_INLINE U32 load_words(const void* from) { return *(const U32Unaligned*)from; }

LANES_INLINE void store(float* to, F32 value) { *(F32Unaligned*)to = value; }
LANES_INLINE void store(Bf16* to, F32 value) {
#ifdef __AVX512BF16__
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &narrow, 32);
#else
    *(U16Unaligned*)to = __builtin_convertvector(round_to_bf16_bits(value), U16);
#endif
}

// The first `count` lanes only; the rest of `from` is not read and reads as zero.
template <class T>
LANES_INLINE F32 load_some(const T* from, int count) {
    T padded[kLanes] = {};
    memcpy(padded, from, sizeof(T) * count);
    return load(padded);
}
template <class T>
LANES_INLINE void store_some(T* to, F32 value, int count) {
    T padded[kLanes];
    store(padded, value);
    memcpy(to, padded, sizeof(T) * count);
}

template <class T>
struct Words;
template <>
struct Words<float> {
    static constexpr int kPerWord = 1;
    LANES_INLINE F32 dot(F32 sum, U32 a, U32 b) { return sum + (F32)a * (F32)b; }
    LANES_INLINE U32 pack_positive(const F32* values) { return (U32)values[0]; }
    // 16 columns of kPerWord rows as words; only the first `num_rows` rows are read, the rest is zero.
    LANES_INLINE U32 pack_rows(const float* from, int64_t, int num_rows) {
        return num_rows > 0 ? load_words(from) : U32{};
    }
};
template <>
struct Words<Bf16> {
    static constexpr int kPerWord = 2;
    LANES_INLINE F32 dot(F32 sum, U32 a, U32 b) {
#ifdef __AVX512BF16__
        return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum += (F32)(a << 16) * (F32)(b << 16);
        return sum + (F32)(a & 0xffff0000u) * (F32)(b & 0xffff0000u);
#endif
    }
    // Rounded half up, which is enough where nothing is negative or NaN.
    LANES_INLINE U32 pack_positive(const F32* values) {
        return (((U32)values[0] + 0x8000) >> 16) | (((U32)values[1] + 0x8000) & 0xffff0000u);
    }
    LANES_INLINE U32 pack_rows(const Bf16* from, int64_t stride, int num_rows) {
        const U32 first = num_rows > 0 ? (U32)load(from) >> 16 : U32{};
        return num_rows > 1 ? first | (U32)load(from + stride) : first;
    }
};

LANES_INLINE float sum_of(F32 value) {
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
    return total;
}
LANES_INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }

// e^x within 2 units in the last place (Cephes' polynomial); below -87 it gives 0, so -inf is allowed.
LANES_INLINE F32 exp(F32 x) {
    const F32 clamped = larger(x < 88.0f ? x : splat(88.0f), splat(-87.0f));
    const F32 shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23 rounds to an integer
    const F32 n = shifted - 12582912.0f;
    F32 r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F32 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const F32 power = (F32)((U32)shifted << 23);
    const F32 result = (F32)((U32)p + (U32)power);
    return x < -87.0f ? splat(0.0f) : result;
}
LANES_INLINE F32 silu(F32 x) { return x / (1.0f + exp(-x)); }

}  // namespace lanes
