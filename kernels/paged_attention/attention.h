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

template <class T>
struct Slice {
    const Call& call;
    const Item& item;

    int64_t num_queries() const { return call.query_starts[item.sequence + 1] - call.query_starts[item.sequence]; }

    // The last position that a row of the item sees.
    int64_t position(int64_t row) const {
        return call.context_lens[item.sequence] - num_queries() + (item.first_row + row) / call.group;
    }
    int64_t last_position() const { return position(item.num_rows - 1); }

    // A token's key, or value; the rest of its group of tokens lies behind it.
    const T* token(int64_t index, int is_value) const {
        const int64_t block = call.block_tables[item.sequence * call.table_width + index / call.block_size];
        const int64_t row = (item.kv_head * 2 + is_value) * call.block_size + index % call.block_size;
        return (const T*)call.kv + block * call.block_stride + row * call.head_dim;
    }

    const T* query(int64_t row) const { return (const T*)call.q + offset(row, call.q_stride, call.head_dim); }
    T* result(int64_t row) const {
        return (T*)call.out + offset(row, call.num_kv_heads * call.group * call.head_dim, call.head_dim);
    }
    void tell_lse(int64_t row, float maximum, float total) const {
        if (!call.lse) return;
        float* lse = call.lse + offset(row, call.num_kv_heads * call.group, 1);
        *lse = total > 0 ? maximum + __builtin_logf(total) : -kInfinity;
    }

private:
    int64_t offset(int64_t row, int64_t token_stride, int64_t head_stride) const {
        const int64_t index = item.first_row + row;
        const int64_t token = call.query_starts[item.sequence] + index / call.group;
        return token * token_stride + (item.kv_head * call.group + index % call.group) * head_stride;
    }
};

}  // namespace attention
