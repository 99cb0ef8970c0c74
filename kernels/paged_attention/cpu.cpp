// Causal attention over a paged cache, for bfloat16 and float32, with online softmax in float32.
//
// Work is cut into items of one sequence and one KV head; all query heads of the group share what is read of the
// cache. Items of a few rows and items of many rows are computed in different ways.
#include <atomic>
#include <memory>
#include <vector>

#include "few_rows.h"
#include "many_rows.h"

namespace attention {
namespace {

struct Scratch {
    ManyRowsScratch many;
    FewRowsScratch few;
};

struct Work {
    std::vector<Item> many, few;
};

// The later rows of a prompt see the most keys; they come first, so that the threads end together. All rows of a
// sequence are computed in the same way, so that a row's result does not depend on where the items are cut.
Work cut(const Call& call) {
    Work work;
    for (int64_t sequence = 0; sequence < call.num_sequences; ++sequence) {
        const int64_t num_rows = (call.query_starts[sequence + 1] - call.query_starts[sequence]) * call.group;
        std::vector<Item>& items = num_rows > kFewRows ? work.many : work.few;
        for (int64_t end = num_rows; end > 0;) {
            const int64_t first = (end - 1) / kMaxRows * kMaxRows;
            for (int64_t head = 0; head < call.num_kv_heads; ++head)
                items.push_back({(int32_t)sequence, (int32_t)head, (int32_t)first, (int32_t)(end - first)});
            end = first;
        }
    }
    return work;
}

template <class T, int VECTORS = kMaxVectors>
void run_many(const Slice<T>& slice, ManyRowsScratch& scratch) {
    if constexpr (VECTORS > 1)
        if (slice.item.num_rows <= (VECTORS - 1) * kLanes) return run_many<T, VECTORS - 1>(slice, scratch);
    ManyRows<T, VECTORS>{slice, scratch, {}, {}, {}, {}, {}}.run();
}

template <class T, int ROWS = kFewRows>
void run_few(const Slice<T>& slice, const Slice<T>* following, FewRowsScratch& scratch) {
    if (slice.item.num_rows == ROWS) FewRows<T, ROWS>{slice, following, scratch, {}, {}, {}}.run();
    else if constexpr (ROWS > 1) run_few<T, ROWS - 1>(slice, following, scratch);
}

// A thread claims an item before it computes the one it has, so that it knows what to ask the memory for.
template <class T>
void claim_few(const Call& call, const std::vector<Item>& items, std::atomic<size_t>& claimed, FewRowsScratch& scratch) {
    size_t now = claimed++;
    while (now < items.size()) {
        const size_t next = claimed++;
        const Slice<T> following{call, items[std::min(next, items.size() - 1)]};
        run_few<T>(Slice<T>{call, items[now]}, next < items.size() ? &following : nullptr, scratch);
        now = next;
    }
}

template <class T>
void attend(const Call& call, int num_threads) {
    const Work work = cut(call);
    std::atomic<size_t> claimed{0};
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local std::unique_ptr<Scratch> scratch(new Scratch);
#pragma omp for schedule(dynamic, 1) nowait
        for (size_t i = 0; i < work.many.size(); ++i) run_many<T>(Slice<T>{call, work.many[i]}, scratch->many);
        claim_few<T>(call, work.few, claimed, scratch->few);
    }
}

struct NewTokens {
    const void *k, *v;
    const int64_t* slots;
    int64_t num_tokens, num_heads, head_dim, block_size, k_stride, v_stride, block_stride;
};

template <class T>
void write_kv(T* kv, const NewTokens& n, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (n.num_tokens * n.num_heads * n.head_dim > 16384)
    for (int64_t token = 0; token < n.num_tokens; ++token) {
        const int64_t block = n.slots[token] / n.block_size, offset = n.slots[token] % n.block_size;
        for (int64_t head = 0; head < n.num_heads; ++head) {
            T* keys = kv + block * n.block_stride + (head * 2 * n.block_size + offset) * n.head_dim;
            const size_t bytes = n.head_dim * sizeof(T);
            memcpy(keys, (const T*)n.k + token * n.k_stride + head * n.head_dim, bytes);
            memcpy(keys + n.block_size * n.head_dim, (const T*)n.v + token * n.v_stride + head * n.head_dim, bytes);
        }
    }
}

}  // namespace
}  // namespace attention

extern "C" {

void kvmesh_attend(
    int is_float32, const void* q, int64_t q_stride, const void* kv, int64_t block_stride, void* out, float* lse,
    const int32_t* block_tables, int64_t table_width, const int32_t* context_lens, const int32_t* query_starts,
    int64_t num_sequences, int64_t num_kv_heads, int64_t group, int64_t head_dim, int64_t block_size, float scale,
    int num_threads) {
    const attention::Call call{q, kv, out, lse, block_tables, context_lens, query_starts, num_sequences, table_width,
                               num_kv_heads, group, head_dim, block_size, q_stride, block_stride, scale};
    if (is_float32) attention::attend<float>(call, num_threads);
    else attention::attend<lanes::Bf16>(call, num_threads);
}

void kvmesh_write_kv(
    int is_float32, const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* kv,
    int64_t block_stride, const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
    int64_t block_size, int num_threads) {
    const attention::NewTokens n{k, v, slots, num_tokens, num_heads, head_dim, block_size, k_stride, v_stride, block_stride};
    if (is_float32) attention::write_kv((float*)kv, n, num_threads);
    else attention::write_kv((lanes::Bf16*)kv, n, num_threads);
}
}
