// Rotates the two halves of each head against each other, in place; float32 arithmetic.
#include <initializer_list>

#include "lanes.h"

namespace {

using namespace lanes;

template <class T>
LANES_INLINE void rotate_head(T* head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const F32 first = load(head + i), second = load(head + half + i);
        const F32 c = load(cos + i), s = load(sin + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
    if (const int left = (int)(half - i)) {
        const F32 first = load_some(head + i, left), second = load_some(head + half + i, left);
        const F32 c = load_some(cos + i, left), s = load_some(sin + i, left);
        store_some(head + i, first * c - second * s, left);
        store_some(head + half + i, second * c + first * s, left);
    }
}

struct Heads {
    void* data;
    int64_t count, stride;  // heads of a token; elements between tokens
};

template <class T>
void rotate(
    const Heads& q, const Heads& k, const float* cos, const float* sin, int64_t num_tokens, int64_t half,
    int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * (q.count + k.count) * half > 8192)
    for (int64_t token = 0; token < num_tokens; ++token) {
        const float* c = cos + token * half;
        const float* s = sin + token * half;
        for (const Heads* heads : {&q, &k}) {
            T* first = (T*)heads->data + token * heads->stride;
            for (int64_t head = 0; head < heads->count; ++head) rotate_head(first + head * 2 * half, c, s, half);
        }
    }
}

}  // namespace

extern "C" void kvmesh_rotate(
    int is_float32, void* q, int64_t q_heads, int64_t q_stride, void* k, int64_t k_heads, int64_t k_stride,
    const float* cos, const float* sin, int64_t num_tokens, int64_t half, int num_threads) {
    const Heads queries{q, q_heads, q_stride}, keys{k, k_heads, k_stride};
    if (is_float32) rotate<float>(queries, keys, cos, sin, num_tokens, half, num_threads);
    else rotate<Bf16>(queries, keys, cos, sin, num_tokens, half, num_threads);
}
