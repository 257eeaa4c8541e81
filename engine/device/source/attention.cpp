// Attention over paged keys and values: new ones are put into their slots, then every row attends.

#include "block.h"
#include "few.h"
#include "parts.h"
#include "team.h"

namespace {

void put_row(const Call& call, int64_t row, int element_bytes, char* plane, const void* fresh,
             int64_t row_stride, int64_t head_stride, int dim) {
  const size_t bytes = size_t(dim) * element_bytes;
  char* to = plane + call.slots[row] * call.kv_heads * bytes;
  const char* from = static_cast<const char*>(fresh) + row * row_stride * element_bytes;
  for (int head = 0; head < call.kv_heads; ++head)
    std::memcpy(to + head * bytes, from + head * head_stride * element_bytes, bytes);
}

void put_fresh(const Shape& shape) {
  const Call& call = shape.call;
  constexpr int kRows = 64;  // at a time
  const int64_t rows = call.rows;
  share(call.fork, call.threads, int((rows + kRows - 1) / kRows), [&](int piece) {
    const int64_t end = std::min<int64_t>(rows, (piece + 1) * kRows);
    for (int64_t row = int64_t(piece) * kRows; row < end; ++row) {
      put_row(call, row, shape.element_bytes(), static_cast<char*>(call.keys), call.fresh_keys,
              call.key_row, call.key_head, call.key_dim);
      put_row(call, row, shape.element_bytes(), static_cast<char*>(call.values), call.fresh_values,
              call.value_row, call.value_head, call.value_dim);
    }
  });
}

// `Rows` is Block or Few.
template <class Number, class Route, class Rows>
void attend_item(const Shape& shape, const Item& item, Parts& parts) {
  typedef typename Route::Unit Unit;
  typedef TileRows<Number, Route> Tile;
  thread_local Scratch scratch;
  thread_local std::vector<Rows> all_rows;
  const Call& call = shape.call;
  const int per_head = (item.row_end - item.row_begin + Rows::kRows - 1) / Rows::kRows;
  const int heads = item.head_end - item.head_begin;
  const size_t score_floats = Rows::buffer_floats(heads);
  scratch.need(per_head * heads * Rows::bytes(call.key_dim, call.value_dim) + Tile::bytes(call, heads) +
               2 * Scratch::bytes_of<float>(score_floats) +
               Scratch::bytes_of<float>(kLanes * std::max(call.key_dim, call.value_dim)));
  float* buffer = scratch.take<float>(kLanes * std::max(call.key_dim, call.value_dim));
  all_rows.resize(per_head * heads);
  for (int i = 0; i < per_head * heads; ++i)
    all_rows[i].open(shape, item, item.head_begin + i / per_head,
                     item.row_begin + i % per_head * Rows::kRows, scratch, buffer);
  Tile tile(call, item, scratch);
  float* scores = scratch.take<float>(score_floats);
  Unit* weights = scratch.take<Unit>(score_floats);
  if constexpr (std::is_same<Unit, float>::value) weights = scores;
  for (int64_t at = item.key_begin / kTileKeys * kTileKeys; at < item.key_end; at += kTileKeys) {
    tile.find(call, item, at);
    Rows::attend_tile(all_rows, tile, at, call, scores, weights);
  }
  for (const Rows& rows : all_rows)
    rows.each_row(buffer, [&](int row, float top, float total, const float* out) {
      if (item.parts > 1)
        parts.put(shape, item, rows.head, row, top, total, out);
      else
        write_row(shape.out<Number>(item.slice, rows.head, row), out, total, call.value_dim);
    });
  if (item.parts > 1 && parts.was_last(item)) parts.finish<Number>(shape, item);
}

template <class Number, class Route>
void attend(const Call& call) {
  thread_local std::vector<Item> items;
  thread_local Parts parts;
  const Shape shape(call);
  put_fresh(shape);
  items.clear();
  add_items(shape, items);
  parts.open(shape, items);
  const std::vector<Item>& todo = items;
  Parts& gathered = parts;
  share(call.fork, call.threads, int(items.size()), [&shape, &todo, &gathered](int i) {
    if (shape.rows(todo[i].slice) <= kFewRows)
      attend_item<Number, Route, Few<Number, Route>>(shape, todo[i], gathered);
    else
      attend_item<Number, Route, Block<Number, Route>>(shape, todo[i], gathered);
  });
}

}  // namespace

extern "C" {

int kvrelay_call_bytes() { return sizeof(Call); }

// Bit |-> the dtype of that number is served.
int kvrelay_dtypes() {
#if defined(KVRELAY_HAS_FLOAT16)
  return 1 << kFloat32 | 1 << kBFloat16 | 1 << kFloat16;
#else
  return 1 << kFloat32 | 1 << kBFloat16;
#endif
}

void kvrelay_attend(const Call* call) {
  switch (call->dtype) {
    case kFloat32: return attend<float, FloatRoute>(*call);
#if defined(KVRELAY_HAS_PAIRS)
    case kBFloat16: return attend<BFloat16, PairRoute>(*call);
#else
    case kBFloat16: return attend<BFloat16, FloatRoute>(*call);
#endif
#if defined(KVRELAY_HAS_FLOAT16)
    case kFloat16: return attend<Float16, FloatRoute>(*call);
#endif
  }
}
}
