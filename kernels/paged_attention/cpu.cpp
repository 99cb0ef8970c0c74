// Causal attention over a paged cache, for bfloat16 and float32, with online softmax in float32.
//
// All query rows of a KV head (queries x heads of the group) stand in lanes: a work item is up to 48 rows of one
// sequence and one KV head. Scores are computed transposed, a key's word broadcast against the rows' words, so
// that keys are read where they lie and the softmax of a row needs no sum across lanes. Keys come in tiles of 64
// counted from the sequence's start: a row's result does not depend on the rows it is computed with.
#include <algorithm>
#include <memory>
#include <vector>

#include "tile.h"

namespace {

using namespace lanes;

constexpr int kMaxVectors = 3;
constexpr int kMaxRows = kMaxVectors * kLanes;
constexpr int kTileTokens = 64;
constexpr int kTokenGroup = 8;  // divides every block size
constexpr int kMaxHeadDim = 256;

struct Attention {
    const void* q;
    const void* kv;
    void* out;       // [T, Hq, hd] contiguous
    float* lse;      // [T, Hq], or null
    const int32_t* block_tables;
    const int32_t* context_lens;
    const int32_t* query_starts;
    int64_t num_sequences, table_width, num_kv_heads, group, head_dim, block_size;
    int64_t q_stride, block_stride;  // elements
    float scale;
};

struct Item {
    int32_t sequence, kv_head, first_row, num_rows;
};

// What one thread works on; reused from item to item.
struct Scratch {
    alignas(64) uint32_t queries[kMaxHeadDim * kMaxRows];       // [word][row]
    alignas(64) float scores[kTileTokens * kMaxRows];           // [token][row], then probabilities as words
    alignas(64) uint32_t values[kTileTokens * kMaxHeadDim];     // [word of tokens][head_dim]
    alignas(64) float attended[kMaxHeadDim * kMaxRows];         // [head_dim][row]
};

// One item while it runs.
template <class T, int VECTORS>
struct Rowset {
    const Attention& a;
    const Item& item;
    Scratch& s;
    I32 positions[VECTORS];
    F32 maxima[VECTORS], totals[VECTORS];

    static constexpr int kRows = VECTORS * kLanes;
    // Enough sums to hide the latency of the products, few enough to stay in registers.
    static constexpr int kDims = VECTORS == 1 ? 16 : 8;

    int64_t context() const { return a.context_lens[item.sequence]; }
    int64_t num_queries() const { return a.query_starts[item.sequence + 1] - a.query_starts[item.sequence]; }
    int64_t position(int64_t row) const { return context() - num_queries() + row / a.group; }
    const T* block(int64_t token, int is_value) const {
        const int64_t index = a.block_tables[item.sequence * a.table_width + token / a.block_size];
        const int64_t row = (item.kv_head * 2 + is_value) * a.block_size + token % a.block_size;
        return (const T*)a.kv + index * a.block_stride + row * a.head_dim;
    }
    // Where a row's query (stride q_stride per token) or result starts.
    int64_t offset(int64_t row, int64_t token_stride) const {
        const int64_t token = a.query_starts[item.sequence] + row / a.group;
        return token * token_stride + (item.kv_head * a.group + row % a.group) * a.head_dim;
    }

    void run() {
        gather_queries();
        const int64_t num_words = a.head_dim * kRows;
        std::fill(s.attended, s.attended + num_words, 0.0f);
        const int64_t last = position(item.first_row + item.num_rows - 1), first = position(item.first_row);
        for (int64_t start = 0; start <= last; start += kTileTokens) {
            const int count = (int)std::min<int64_t>(kTileTokens, last + 1 - start);
            const int padded = (count + kTokenGroup - 1) / kTokenGroup * kTokenGroup;
            score(start, padded);
            weigh(start, padded, start + padded - 1 > first);
            gather_values(start, count, padded);
            accumulate(padded);
        }
        write();
    }

    void gather_queries() {
        const int64_t num_words = a.head_dim / Words<T>::kPerWord;
        for (int v = 0; v < VECTORS; ++v) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const int row = v * kLanes + lane;
                positions[v][lane] = row < item.num_rows ? (int32_t)position(item.first_row + row) : -1;
            }
            maxima[v] = splat(-__builtin_inff());
            totals[v] = F32{};
            for (int64_t word = 0; word < num_words; word += kLanes) {
                const int count = (int)std::min<int64_t>(kLanes, num_words - word);
                U32 square[kLanes] = {};
                for (int lane = 0; lane < kLanes && v * kLanes + lane < item.num_rows; ++lane) {
                    const T* q = (const T*)a.q + offset(item.first_row + v * kLanes + lane, a.q_stride);
                    memcpy(&square[lane], q + word * Words<T>::kPerWord, count * 4);
                }
                transpose(square);
                for (int i = 0; i < count; ++i)
                    memcpy(s.queries + (word + i) * kRows + v * kLanes, &square[i], sizeof(U32));
            }
        }
    }

    void score(int64_t start, int padded) {
        const int64_t num_words = a.head_dim / Words<T>::kPerWord;
        const size_t row_bytes = a.head_dim * sizeof(T);
        for (int token = 0; token < padded; token += kTokenGroup) {
            Sums<kTokenGroup, VECTORS> sums = {};
            const Rows keys{(const char*)block(start + token, 0), row_bytes, 4};
            multiply<T, kTokenGroup, VECTORS>(keys, s.queries, num_words, Ahead{keys.from, 0}, sums);
            for (int i = 0; i < kTokenGroup; ++i)
                for (int v = 0; v < VECTORS; ++v) store(s.scores + (token + i) * kRows + v * kLanes, sums[i][v]);
        }
    }

    // Turns the scores of a tile into probabilities relative to the new maxima, packed as words of tokens, and
    // scales what was summed before.
    void weigh(int64_t start, int padded, bool masked) {
        for (int v = 0; v < VECTORS; ++v) {
            float* column = s.scores + v * kLanes;
            F32 maximum = maxima[v];
            for (int token = 0; token < padded; ++token) {
                F32 score = load(column + token * kRows) * a.scale;
                if (masked) score = positions[v] >= (int32_t)(start + token) ? score : splat(-__builtin_inff());
                store(column + token * kRows, score);
                maximum = larger(maximum, score);
            }
            const F32 anchor = maximum == -__builtin_inff() ? F32{} : maximum;
            const F32 shrink = exp(maxima[v] - anchor);
            maxima[v] = maximum;
            totals[v] *= shrink;
            for (int token = 0; token < padded; token += Words<T>::kPerWord) {
                F32 p[Words<T>::kPerWord];
                for (int i = 0; i < Words<T>::kPerWord; ++i) {
                    p[i] = exp(load(column + (token + i) * kRows) - anchor);
                    totals[v] += p[i];
                }
                const U32 word = Words<T>::pack_positive(p);
                memcpy(column + token / Words<T>::kPerWord * kRows, &word, sizeof(word));
            }
            for (int64_t dim = 0; dim < a.head_dim; ++dim) {
                float* attended = s.attended + dim * kRows + v * kLanes;
                store(attended, load(attended) * shrink);
            }
        }
    }

    // Tokens past `count` count as zero: their memory may never have been written.
    void gather_values(int64_t start, int count, int padded) {
        for (int token = 0; token < padded; token += Words<T>::kPerWord) {
            const T* values = block(start + token, 1);
            uint32_t* words = s.values + token / Words<T>::kPerWord * a.head_dim;
            for (int64_t dim = 0; dim < a.head_dim; dim += kLanes) {
                const U32 packed = Words<T>::pack_rows(values + dim, a.head_dim, count - token);
                memcpy(words + dim, &packed, sizeof(packed));
            }
        }
    }

    void accumulate(int padded) {
        const int64_t depth = padded / Words<T>::kPerWord;
        for (int64_t dim = 0; dim < a.head_dim; dim += kDims) {
            Sums<kDims, VECTORS> sums;
            float* attended = s.attended + dim * kRows;
            for (int i = 0; i < kDims; ++i)
                for (int v = 0; v < VECTORS; ++v) sums[i][v] = load(attended + (i * VECTORS + v) * kLanes);
            const Rows values{(const char*)(s.values + dim), 4, (size_t)a.head_dim * 4};
            multiply<T, kDims, VECTORS>(values, (const uint32_t*)s.scores, depth, Ahead{values.from, 0}, sums);
            for (int i = 0; i < kDims; ++i)
                for (int v = 0; v < VECTORS; ++v) store(attended + (i * VECTORS + v) * kLanes, sums[i][v]);
        }
    }

    void write() {
        const int64_t token_stride = a.num_kv_heads * a.group * a.head_dim;
        for (int v = 0; v < VECTORS; ++v) {
            const F32 inverse = totals[v] > 0.0f ? 1.0f / totals[v] : F32{};
            const int count = std::min(kLanes, item.num_rows - v * kLanes);
            for (int64_t dim = 0; dim < a.head_dim; dim += kLanes) {
                U32 square[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    square[i] = (U32)(load(s.attended + (dim + i) * kRows + v * kLanes) * inverse);
                transpose(square);
                for (int lane = 0; lane < count; ++lane) {
                    T* out = (T*)a.out + offset(item.first_row + v * kLanes + lane, token_stride);
                    store(out + dim, (F32)square[lane]);
                }
            }
            for (int lane = 0; a.lse && lane < count; ++lane)
                a.lse[offset(item.first_row + v * kLanes + lane, token_stride) / a.head_dim] =
                    totals[v][lane] > 0.0f ? maxima[v][lane] + __builtin_logf(totals[v][lane]) : -__builtin_inff();
        }
    }
};

// The later rows of a prompt see the most keys; they come first, so that the threads end together.
std::vector<Item> work_items(const Attention& a) {
    std::vector<Item> items;
    for (int64_t sequence = 0; sequence < a.num_sequences; ++sequence) {
        const int64_t num_rows = (a.query_starts[sequence + 1] - a.query_starts[sequence]) * a.group;
        for (int64_t end = num_rows; end > 0;) {
            const int64_t first = (end - 1) / kMaxRows * kMaxRows;
            for (int64_t head = 0; head < a.num_kv_heads; ++head)
                items.push_back({(int32_t)sequence, (int32_t)head, (int32_t)first, (int32_t)(end - first)});
            end = first;
        }
    }
    return items;
}

template <class T, int VECTORS>
void run_item(const Attention& a, const Item& item, Scratch& scratch) {
    Rowset<T, VECTORS>{a, item, scratch, {}, {}, {}}.run();
}

template <class T>
void attend(const Attention& a, int num_threads) {
    const std::vector<Item> items = work_items(a);
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local std::unique_ptr<Scratch> scratch(new Scratch);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); ++i) {
            const int vectors = (items[i].num_rows + kLanes - 1) / kLanes;
            if (vectors == 1) run_item<T, 1>(a, items[i], *scratch);
            else if (vectors == 2) run_item<T, 2>(a, items[i], *scratch);
            else run_item<T, 3>(a, items[i], *scratch);
        }
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

extern "C" {

void kvmesh_attend(
    int is_float32, const void* q, int64_t q_stride, const void* kv, int64_t block_stride, void* out, float* lse,
    const int32_t* block_tables, int64_t table_width, const int32_t* context_lens, const int32_t* query_starts,
    int64_t num_sequences, int64_t num_kv_heads, int64_t group, int64_t head_dim, int64_t block_size, float scale,
    int num_threads) {
    const Attention a{q, kv, out, lse, block_tables, context_lens, query_starts, num_sequences, table_width,
                      num_kv_heads, group, head_dim, block_size, q_stride, block_stride, scale};
    if (is_float32) attend<float>(a, num_threads);
    else attend<Bf16>(a, num_threads);
}

void kvmesh_write_kv(
    int is_float32, const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* kv,
    int64_t block_stride, const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
    int64_t block_size, int num_threads) {
    const NewTokens n{k, v, slots, num_tokens, num_heads, head_dim, block_size, k_stride, v_stride, block_stride};
    if (is_float32) write_kv((float*)kv, n, num_threads);
    else write_kv((Bf16*)kv, n, num_threads);
}
}
