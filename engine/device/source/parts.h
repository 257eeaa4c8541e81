// Results: written out, or first put together from parts that saw different keys.
#pragma once

#include "items.h"
#include "routes.h"
#include "scratch.h"

template <class Number>
inline void write_row(Number* to, const float* out, float total, int value_dim) {
  const float share = 1.0f / total;
  for (int d = 0; d < value_dim; ++d) to[d] = from_float<Number>(out[d] * share);
}

// Slice, part, KV head, row |-> top, total and out, as one run of floats.
class Parts {
 public:
  void open(const Shape& shape, const std::vector<Item>& items) {
    starts_.assign(shape.call.slices, -1);
    left_.assign(shape.call.slices, 0);
    row_floats_ = size_t(shape.call.value_dim) + 2;
    size_t floats = 0;
    for (const Item& item : items) {
      if (item.parts == 1) continue;
      left_[item.slice] += 1;
      if (starts_[item.slice] >= 0) continue;
      starts_[item.slice] = int64_t(floats);
      floats += size_t(item.parts) * shape.call.kv_heads * item.row_end * row_floats_;
    }
    scratch_.need(Scratch::bytes_of<float>(floats));
    floats_ = scratch_.take<float>(floats);
  }

  void put(const Shape& shape, const Item& item, int head, int row, float top, float total,
           const float* out) {
    float* place = at(shape, item, item.part, head, row);
    place[0] = top, place[1] = total;
    std::memcpy(place + 2, out, sizeof(float) * shape.call.value_dim);
  }

  // True for the last of a slice's pieces.
  bool was_last(const Item& item) {
    return __atomic_sub_fetch(&left_[item.slice], 1, __ATOMIC_ACQ_REL) == 0;
  }

  template <class Number>
  void finish(const Shape& shape, const Item& item) {
    for (int head = 0; head < shape.call.kv_heads; ++head)
      for (int row = 0; row < item.row_end; ++row) {
        float* sum = at(shape, item, 0, head, row);
        for (int part = 1; part < item.parts; ++part)
          merge(sum, at(shape, item, part, head, row), shape.call.value_dim);
        write_row(shape.out<Number>(item.slice, head, row), sum + 2, sum[1], shape.call.value_dim);
      }
  }

 private:
  float* at(const Shape& shape, const Item& item, int part, int head, int row) {
    const size_t rows = (size_t(part) * shape.call.kv_heads + head) * item.row_end + row;
    return floats_ + starts_[item.slice] + rows * row_floats_;
  }

  static void merge(float* sum, const float* part, int value_dim) {
    const float best = std::max(sum[0], part[0]);
    const float keep = exp2<false>(all(sum[0] - best))[0];
    const float take = exp2<false>(all(part[0] - best))[0];
    sum[0] = best;
    for (int i = 1; i < value_dim + 2; ++i) sum[i] = sum[i] * keep + part[i] * take;
  }

  std::vector<int64_t> starts_;
  std::vector<int> left_;
  size_t row_floats_ = 0;
  Scratch scratch_;
  float* floats_ = nullptr;
};
