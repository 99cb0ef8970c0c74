// x [M, K] times a packed weight [N, K], for bfloat16 and float32, summed in float32.
//
// Packed weight: panels of 32 columns; a panel holds, for each word of K (two bfloat16 or one float32), the 32
// words of its columns. So one pass over K reads a panel as one stream, and each loaded vector is used by every
// row of a tile. Columns and K are padded with zeros. In a gated weight a panel holds 16 columns of gate and the
// same 16 of up, so that silu(gate) * up happens in registers.
#include <algorithm>

#include "tile.h"

namespace {

using namespace lanes;

constexpr int kColumns = 32;
constexpr int kVectors = kColumns / kLanes;
constexpr int kMaxRows = kRegisters * 3 / 4 / kVectors;  // three quarters of the registers hold sums
constexpr int kDepthWords = 1024;       // of K at a time: half a panel of this depth fits the first-level cache
constexpr size_t kBlockBytes = 512 << 10;  // of x at a time: it stays in the second-level cache

struct Product {
    const void* x;
    const uint32_t* weight;
    const float* bias;     // padded to whole panels, or null
    const void* residual;  // [M, N] contiguous, or null
    void* out;             // [M, N] contiguous
    int64_t num_rows, num_columns, num_words, x_stride;  // x_stride in elements
};

template <int ROWS>
LANES_INLINE void add_bias(const Product& p, int64_t panel, Sums<ROWS, kVectors>& sums) {
    for (int v = 0; v < kVectors; ++v) {
        const F32 bias = load(p.bias + panel * kColumns + v * kLanes);
        for (int r = 0; r < ROWS; ++r) sums[r][v] += bias;
    }
}

template <class T, class Out, int ROWS>
LANES_INLINE void write(const Product& p, int64_t row, int64_t panel, Sums<ROWS, kVectors>& sums) {
    const int64_t first = row * p.num_columns + panel * kColumns;
    const int count = (int)std::min<int64_t>(kColumns, p.num_columns - panel * kColumns);
    Out* out = (Out*)p.out + first;
    const T* residual = (const T*)p.residual + first;
    for (int r = 0; r < ROWS; ++r, out += p.num_columns, residual += p.num_columns) {
        if (count == kColumns) {
            for (int v = 0; v < kVectors; ++v) {
                if (p.residual) sums[r][v] += load(residual + v * kLanes);
                store(out + v * kLanes, sums[r][v]);
            }
        } else {
            for (int v = 0; v * kLanes < count; ++v) {
                const int lanes = std::min(count - v * kLanes, kLanes);
                if (p.residual) sums[r][v] += load_some(residual + v * kLanes, lanes);
                store_some(out + v * kLanes, sums[r][v], lanes);
            }
        }
    }
}

template <class T, int ROWS>
LANES_INLINE void write_gated(const Product& p, int64_t row, int64_t panel, Sums<ROWS, kVectors>& sums) {
    const int count = (int)std::min<int64_t>(kColumns / 2, p.num_columns - panel * kColumns / 2);
    T* out = (T*)p.out + row * p.num_columns + panel * kColumns / 2;
    for (int r = 0; r < ROWS; ++r, out += p.num_columns)
        for (int v = 0; v < kVectors / 2; ++v) {
            const F32 gated = silu(sums[r][v]) * sums[r][v + kVectors / 2];
            const int lanes = std::min(count - v * kLanes, kLanes);
            if (lanes == kLanes) store(out + v * kLanes, gated);
            else if (lanes > 0) store_some(out + v * kLanes, gated, lanes);
        }
}

struct Depth {
    int64_t first, count, total;  // words of K: this pass over the rows, and all
};

template <class T, class Out, bool GATED, int ROWS>
void tile(const Product& p, int64_t row, int64_t panel, Depth depth, Ahead ahead, float* partial) {
    Sums<ROWS, kVectors> sums;
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < kVectors; ++v)
            sums[r][v] = depth.first ? load(partial + (r * kVectors + v) * kLanes) : F32{};
    const size_t stride_bytes = p.x_stride * sizeof(T);
    const Rows x{(const char*)p.x + row * stride_bytes + depth.first * 4, stride_bytes, 4};
    const uint32_t* weight = p.weight + (panel * depth.total + depth.first) * kColumns;
    multiply<T, ROWS, kVectors>(x, weight, depth.count, ahead, sums);
    if (depth.first + depth.count < depth.total) {
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < kVectors; ++v) store(partial + (r * kVectors + v) * kLanes, sums[r][v]);
        return;
    }
    if (p.bias) add_bias<ROWS>(p, panel, sums);
    if constexpr (GATED) write_gated<T, ROWS>(p, row, panel, sums);
    else write<T, Out, ROWS>(p, row, panel, sums);
}

template <class T, class Out, bool GATED, int ROWS = kMaxRows>
LANES_INLINE void tile_of(
    int rows, const Product& p, int64_t row, int64_t panel, Depth depth, Ahead ahead, float* partial) {
    if (rows == ROWS) tile<T, Out, GATED, ROWS>(p, row, panel, depth, ahead, partial);
    else if constexpr (ROWS > 1)
        tile_of<T, Out, GATED, ROWS - 1>(rows, p, row, panel, depth, ahead, partial);
}

// Rows [first, first + num_rows) of one panel, in tiles of as equal height as possible. The tiles share the work
// of asking for the panel behind this one, so that it arrives while this one is computed.
template <class T, class Out, bool GATED>
void panel_rows(const Product& p, int64_t first, int64_t num_rows, int64_t panel, float* partial) {
    const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
    const int64_t step = (kColumns * 4 + num_tiles - 1) / num_tiles;
    for (Depth depth{0, 0, p.num_words}; depth.first < p.num_words; depth.first += kDepthWords) {
        depth.count = std::min<int64_t>(kDepthWords, p.num_words - depth.first);
        const char* next = (const char*)(p.weight + (panel * p.num_words + depth.first + depth.count) * kColumns);
        for (int64_t index = 0; index < num_tiles; ++index) {
            const int64_t row = num_rows * index / num_tiles, end = num_rows * (index + 1) / num_tiles;
            const Ahead ahead{next + step * depth.count * index, step};
            tile_of<T, Out, GATED>(
                (int)(end - row), p, first + row, panel, depth, ahead, partial + row * kColumns);
        }
    }
}

template <class T, class Out, bool GATED>
void product(const Product& p, int num_threads) {
    const int64_t columns_per_panel = GATED ? kColumns / 2 : kColumns;
    const int64_t num_panels = (p.num_columns + columns_per_panel - 1) / columns_per_panel;
    const int64_t fitting = kBlockBytes / (p.num_words * 4) / kMaxRows * kMaxRows;
    const int64_t block_rows = std::min(p.num_rows, std::max<int64_t>(fitting, kMaxRows * 4));
#pragma omp parallel num_threads(num_threads)
    {
        float* partial = p.num_words > kDepthWords ? new float[block_rows * kColumns] : nullptr;
        for (int64_t row = 0; row < p.num_rows; row += block_rows) {
            const int64_t num_rows = std::min(block_rows, p.num_rows - row);
#pragma omp for schedule(static) nowait
            for (int64_t panel = 0; panel < num_panels; ++panel)
                panel_rows<T, Out, GATED>(p, row, num_rows, panel, partial);
        }
        delete[] partial;
    }
}

}  // namespace

extern "C" {

// Rows of a weight that is not gated, as words [num_indices, num_words]. Returns how many indices are out of range;
// their rows are left alone.
int64_t kvmesh_linear_rows(
    const uint32_t* weight, int64_t num_columns, int64_t num_words, const int64_t* indices, int64_t num_indices,
    uint32_t* out, int num_threads) {
    int64_t num_wrong = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : num_wrong) if (num_indices * num_words > 8192)
    for (int64_t i = 0; i < num_indices; ++i) {
        if (indices[i] < 0 || indices[i] >= num_columns) {
            ++num_wrong;
            continue;
        }
        const uint32_t* from = weight + indices[i] / kColumns * num_words * kColumns + indices[i] % kColumns;
        for (int64_t word = 0; word < num_words; ++word) out[i * num_words + word] = from[word * kColumns];
    }
    return num_wrong;
}

// kind: 0 bfloat16, 1 float32, 2 bfloat16 with float32 result; gated: x -> silu(gate) * up, num_columns = ff.
void kvmesh_linear(
    int kind, int gated, const void* x, int64_t x_stride, const uint32_t* weight, const float* bias,
    const void* residual, void* out, int64_t num_rows, int64_t num_columns, int64_t num_words, int num_threads) {
    const Product p{x, weight, bias, residual, out, num_rows, num_columns, num_words, x_stride};
    if (gated) (kind == 1 ? product<float, float, true> : product<Bf16, Bf16, true>)(p, num_threads);
    else if (kind == 0) product<Bf16, Bf16, false>(p, num_threads);
    else if (kind == 1) product<float, float, false>(p, num_threads);
    else product<Bf16, float, false>(p, num_threads);
}
}
