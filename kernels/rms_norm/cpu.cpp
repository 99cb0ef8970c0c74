// RMS norm of rows; float32 arithmetic.
#include "lanes.h"

namespace {

using namespace lanes;

struct Norm {
    const void* x;
    const void* weight;
    void* out;
    int64_t num_rows, inner_rows, width;  // row i starts at (i / inner_rows) * stride + (i % inner_rows) * width
    int64_t stride;
    float eps;
};

template <class T>
LANES_INLINE F32 load_upto(const T* from, int64_t count) {
    return count >= kLanes ? load(from) : load_some(from, (int)count);
}
template <class T>
LANES_INLINE void store_upto(T* to, F32 value, int64_t count) {
    if (count >= kLanes) store(to, value);
    else store_some(to, value, (int)count);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
    F32 squares = {};
    for (int64_t i = 0; i < width; i += kLanes) {
        const F32 value = load_upto(x + i, width - i);
        squares += value * value;
    }
    const float factor = 1.0f / __builtin_sqrtf(sum_of(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += kLanes)
        store_upto(out + i, load_upto(x + i, width - i) * factor * load_upto(weight + i, width - i), width - i);
}

template <class T>
void norm(const Norm& n, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n.num_rows * n.width > 16384)
    for (int64_t row = 0; row < n.num_rows; ++row) {
        const T* x = (const T*)n.x + row / n.inner_rows * n.stride + row % n.inner_rows * n.width;
        norm_row(x, (const T*)n.weight, (T*)n.out + row * n.width, n.width, n.eps);
    }
}

}  // namespace

extern "C" void kvmesh_rms_norm(
    int is_float32, const void* x, const void* weight, void* out, int64_t num_rows, int64_t inner_rows,
    int64_t width, int64_t stride, float eps, int num_threads) {
    const Norm n{x, weight, out, num_rows, inner_rows, width, stride, eps};
    if (is_float32) norm<float>(n, num_threads);
    else norm<Bf16>(n, num_threads);
}
