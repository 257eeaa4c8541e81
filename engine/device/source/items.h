// A call's work in pieces, so cut that what a row's result is doesn't depend on the rest of the call.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"
#include "tile.h"

constexpr int kBlockRows = kVectors * kLanes;
constexpr int kSegmentKeys = 256;   // a slice of few rows is cut here, wherever it began
constexpr int kHeadBytes = 1024;    // of a token's keys that one piece reads at once

// Rows are (token, head of the KV head) pairs: token = row / group, head = row % group.
struct Item {
  int slice;
  int head_begin, head_end;  // KV heads
  int row_begin, row_end;
  int64_t key_begin, key_end;  // positions
  int part, parts;             // of the same rows and heads
};

struct Shape {
  const Call& call;
  int group;  // heads of a KV head

  explicit Shape(const Call& call) : call(call), group(call.heads / call.kv_heads) {}

  int64_t tokens(int slice) const { return call.counts[slice]; }
  int rows(int slice) const { return int(tokens(slice)) * group; }
  int64_t last_key(int slice, int row) const { return call.positions[slice] + row / group; }
  int64_t first_key(int slice, int row) const {
    return call.window > 0 ? std::max<int64_t>(0, last_key(slice, row) - call.window + 1) : 0;
  }
  bool has_sink(const Item& item) const { return call.sinks != nullptr && item.part == 0; }
  int head_of(int head, int row) const { return group * head + row % group; }
  float sink(const Item& item, int head, int row, float otherwise) const {
    return has_sink(item) ? call.sinks[head_of(head, row)] * kLog2E : otherwise;
  }
  template <class Number>
  const Number* query(int slice, int head, int row) const {
    return static_cast<const Number*>(call.query) +
           (call.first_rows[slice] + row / group) * call.query_row +
           head_of(head, row) * call.query_head;
  }
  template <class Number>
  Number* out(int slice, int head, int row) const {
    const int64_t token = call.first_rows[slice] + row / group;
    return static_cast<Number*>(call.out) +
           (token * call.heads + head_of(head, row)) * call.value_dim;
  }
  bool is_split(int slice) const { return rows(slice) <= kBlockRows; }
  int element_bytes() const { return call.dtype == kFloat32 ? 4 : 2; }
};

inline void add_split(const Shape& shape, int slice, std::vector<Item>& items) {
  const Call& call = shape.call;
  const int rows = shape.rows(slice);
  const int heads = std::max(1, kHeadBytes / (call.key_dim * shape.element_bytes()));
  const int64_t begin = shape.first_key(slice, 0), end = shape.last_key(slice, rows - 1) + 1;
  const int64_t first = begin / kSegmentKeys, last = (end - 1) / kSegmentKeys;
  for (int64_t part = first; part <= last; ++part)
    for (int head = 0; head < call.kv_heads; head += heads)
      items.push_back({slice, head, std::min(head + heads, call.kv_heads), 0, rows,
                       std::max(begin, part * kSegmentKeys),
                       std::min(end, (part + 1) * kSegmentKeys), int(part - first),
                       int(last - first + 1)});
}

// The longest first: what is left for the end is short.
inline void add_whole(const Shape& shape, int slice, int step, std::vector<Item>& items) {
  const int rows = shape.rows(slice);
  for (int begin = (rows - 1) / step * step; begin >= 0; begin -= step) {
    const int end = std::min(rows, begin + step);
    for (int head = 0; head < shape.call.kv_heads; ++head)
      items.push_back({slice, head, head + 1, begin, end, shape.first_key(slice, begin),
                       shape.last_key(slice, end - 1) + 1, 0, 1});
  }
}

inline void add_items(const Shape& shape, std::vector<Item>& items) {
  int64_t whole_rows = 0;
  for (int s = 0; s < shape.call.slices; ++s)
    if (!shape.is_split(s)) whole_rows += int64_t(shape.rows(s)) * shape.call.kv_heads;
  const int64_t share = whole_rows / (8 * shape.call.threads) / kBlockRows;
  const int step = kBlockRows * int(std::min<int64_t>(4, std::max<int64_t>(1, share)));
  for (int s = 0; s < shape.call.slices; ++s)
    if (!shape.is_split(s)) add_whole(shape, s, step, items);
  for (int s = 0; s < shape.call.slices; ++s)
    if (shape.is_split(s)) add_split(shape, s, items);
}
