// What one layer's call reads and writes. Its layout is mirrored in engine/attention/native/kernel.py.
#pragma once

#include <cstdint>

#include "team.h"

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Strides count elements. Slice |-> its first row, how many they are, the first one's position; and
// where its table starts in `blocks`, which holds its positions from 0 on, negative where none of its
// rows sees one.
struct Call {
  void* keys;    // [slots, kv_heads, key_dim]
  void* values;  // [slots, kv_heads, value_dim]
  void* out;     // [rows, heads, value_dim]
  const void* query;
  const void* fresh_keys;
  const void* fresh_values;
  int64_t query_row, query_head;
  int64_t key_row, key_head;
  int64_t value_row, value_head;
  const float* sinks;    // [heads], or none
  const int64_t* slots;  // [rows]
  const int64_t* first_rows;
  const int64_t* counts;
  const int64_t* positions;
  const int64_t* block_starts;
  const int32_t* blocks;
  Fork fork;
  int32_t threads;
  int32_t rows, slices, heads, kv_heads, key_dim, value_dim;
  int32_t block_size;
  int32_t window;  // 0: all earlier tokens are seen
  int32_t dtype;
  float scaling;
  float softcap;  // 0: none
};
