// What one call of paged attention works on, and where things lie.
#pragma once

#include <algorithm>

#include "tile.h"

namespace attention {

using namespace lanes;

constexpr int kMaxHeadDim = 256;
constexpr int kTokenGroup = 8;  // divides every block size: so many tokens always lie behind each other

struct Call {
    const void* q;
    const void* kv;
    void* out;   // [T, Hq, hd] contiguous
    float* lse;  // [T, Hq], or null
    const int32_t* block_tables;
    const int32_t* context_lens;
    const int32_t* query_starts;
    int64_t num_sequences, table_width, num_kv_heads, group, head_dim, block_size;
    int64_t q_stride, block_stride;  // elements
    float scale;
};

// Some rows of one sequence and one KV head. Row r is query r / group with head r % group of the group.
struct Item {
    int32_t sequence, kv_head, first_row, num_rows;
};

constexpr float kInfinity = __builtin_inff();

// A row as token of the batch and head of its token.
struct Row {
    int64_t token, head;
};

template <class T>
struct Slice {
    const Call& call;
    const Item& item;

    int64_t num_queries() const { return call.query_starts[item.sequence + 1] - call.query_starts[item.sequence]; }

    Row row(int64_t index) const {
        const int64_t query = (item.first_row + index) / call.group;
        const int64_t head = (item.first_row + index) - query * call.group;
        return {call.query_starts[item.sequence] + query, item.kv_head * call.group + head};
    }
    // The last position that a token of the sequence sees.
    int64_t position(const Row& row) const {
        return call.context_lens[item.sequence] + row.token - call.query_starts[item.sequence + 1];
    }
    int64_t first_position() const { return position(row(0)); }
    int64_t last_position() const { return position(row(item.num_rows - 1)); }

    // A token's key, or value; the rest of its group of tokens lies behind it.
    const T* token(int64_t index, int is_value) const {
        const int64_t block = call.block_tables[item.sequence * call.table_width + index / call.block_size];
        const int64_t row = (item.kv_head * 2 + is_value) * call.block_size + index % call.block_size;
        return (const T*)call.kv + block * call.block_stride + row * call.head_dim;
    }

    const T* query(const Row& row) const {
        return (const T*)call.q + row.token * call.q_stride + row.head * call.head_dim;
    }
    T* result(const Row& row) const {
        return (T*)call.out + (row.token * call.num_kv_heads * call.group + row.head) * call.head_dim;
    }
    void tell_lse(const Row& row, float maximum, float total) const {
        if (!call.lse) return;
        call.lse[row.token * call.num_kv_heads * call.group + row.head] =
            total > 0 ? maximum + __builtin_logf(total) : -kInfinity;
    }
};

}  // namespace attention
