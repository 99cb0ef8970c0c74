// Lanes of 32 bits, sixteen with AVX-512 and else eight, and bfloat16 or float32 data seen as 32-bit words: one
// word holds two bfloat16 or one float32. A kernel written over words serves both types. GCC's vector extension
// keeps this portable: where registers are narrower the compiler splits each operation.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace lanes {

#ifdef __AVX512F__
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));
typedef float F32Unaligned __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t U32Unaligned __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t U16Unaligned __attribute__((vector_size(kLanes * 2), aligned(2)));

struct Bf16 {
    uint16_t bits;
};

#define LANES_INLINE_MEMBER inline __attribute__((always_inline))
#define LANES_INLINE static LANES_INLINE_MEMBER
// A loop of its own keeps the registers to itself: inlined into a larger function its sums would be spilled.
#define LANES_APART __attribute__((noinline))

#ifdef __AVX512F__
static const I32 kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const I32 kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

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
// A whole vector of words, or eight with zeros above them.
LANES_INLINE U32 load_words_upto(const void* from, int count) {
    if (count == kLanes) return load_words(from);
    U32 words = {};
    memcpy(&words, from, 32);
    return words;
}
LANES_INLINE void store_words(void* to, U32 words) { *(U32Unaligned*)to = words; }

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
    static constexpr int kExpDegree = 6;
    LANES_INLINE F32 dot(F32 sum, U32 a, U32 b) { return sum + (F32)a * (F32)b; }
    LANES_INLINE U32 pack_positive(const F32* values) { return (U32)values[0]; }
    // Columns of kPerWord rows as words; only the first `num_rows` rows are read, the rest is zero.
    LANES_INLINE U32 pack_rows(const float* from, int64_t, int num_rows) {
        return num_rows > 0 ? load_words(from) : U32{};
    }
};
template <>
struct Words<Bf16> {
    static constexpr int kPerWord = 2;
    static constexpr int kExpDegree = 4;  // more than a bfloat16 holds
    LANES_INLINE F32 dot(F32 sum, U32 a, U32 b) {
#ifdef __AVX512BF16__
        return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
        sum += (F32)(a << 16) * (F32)(b << 16);
        return sum + (F32)(a & 0xffff0000u) * (F32)(b & 0xffff0000u);
#endif
    }
    // Words of two values that are neither negative nor NaN.
    LANES_INLINE U32 pack_positive(const F32* values) {
#ifdef __AVX512BF16__
        typedef uint16_t Halves __attribute__((vector_size(64)));
        const Halves order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
        return (U32)_mm512_permutexvar_epi16((__m512i)order, (__m512i)narrow);
#else
        return (((U32)values[0] + 0x8000) >> 16) | (((U32)values[1] + 0x8000) & 0xffff0000u);
#endif
    }
    LANES_INLINE U32 pack_rows(const Bf16* from, int64_t stride, int num_rows) {
        const U32 first = num_rows > 0 ? (U32)load(from) >> 16 : U32{};
        return num_rows > 1 ? first | (U32)load(from + stride) : first;
    }
};

LANES_INLINE F32 larger(F32 a, F32 b) {
#ifdef __AVX512F__
    return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

LANES_INLINE float sum_of(F32 value) {
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
    return total;
}
LANES_INLINE float largest_of(F32 value) {
    float largest = value[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = value[lane] > largest ? value[lane] : largest;
    return largest;
}

// 2^x for x <= 127; exactly 0 far below, so -inf is allowed. Polynomials fitted for the smallest relative error
// on [-1/2, 1/2]: 3e-6 with degree 4, 1e-7 with degree 6.
template <int DEGREE = 6>
LANES_INLINE F32 exp2(F32 x) {
    static_assert(DEGREE == 4 || DEGREE == 6);
    static constexpr float kFour[] = {0.99999926144f, 0.69312181476f, 0.24024744863f, 0.055917860209f, 0.0095701004828f};
    static constexpr float kSix[] = {1.0000000006f,   0.6931472057f,    0.24022646891f,  0.05550328777f,
                                     0.0096184889617f, 0.001339993121f, 0.00015345810781f};
    const float* terms = DEGREE == 4 ? kFour : kSix;
    const F32 bounded = larger(x, splat(-160.0f));
#ifdef __AVX512F__
    const F32 n = (F32)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const F32 n = (bounded + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: the sum rounds to an integer
#endif
    const F32 r = bounded - n;
    F32 p = splat(terms[DEGREE]);
    for (int i = DEGREE - 1; i >= 0; --i) p = p * r + terms[i];
#ifdef __AVX512F__
    return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const F32 result = (F32)((U32)p + (U32)(__builtin_convertvector(n, I32) << 23));
    return x < -126.0f ? F32{} : result;
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

LANES_INLINE F32 silu(F32 x) {
    const F32 exponent = x * -kLog2E;
    return x / (1.0f + exp2(exponent < 126.0f ? exponent : splat(126.0f)));
}

}  // namespace lanes
