// silu(gate) * up of rows [gate | up]; float32 arithmetic.
#include "lanes.h"

namespace {

using namespace lanes;

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t num_rows, int64_t width, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > 16384)
    for (int64_t row = 0; row < num_rows; ++row) {
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes)
            store(out + row * width + i, silu(load(gate + i)) * load(up + i));
        if (const int left = (int)(width - i))
            store_some(out + row * width + i, silu(load_some(gate + i, left)) * load_some(up + i, left), left);
    }
}

}  // namespace

extern "C" void kvmesh_silu_mul(
    int is_float32, const void* gate_up, void* out, int64_t num_rows, int64_t width, int num_threads) {
    if (is_float32) silu_mul((const float*)gate_up, (float*)out, num_rows, width, num_threads);
    else silu_mul((const Bf16*)gate_up, (Bf16*)out, num_rows, width, num_threads);
}
