// The keys and values of one tile, found through the block table: a pointer for each unit row.
#pragma once

#include <type_traits>

#include "items.h"
#include "scratch.h"
#include "routes.h"

template <class Number, class Route>
struct TileRows {
  typedef typename Route::Unit Unit;
  static constexpr bool kWidens = std::is_same<Route, FloatRoute>::value &&
                                  !std::is_same<Number, float>::value;
  static constexpr int kSpare = 16;  // scores are made in steps: behind the last key are zeros

  const Unit* keys[kTileKeys + kSpare];
  const Unit* values[kTileKeys];
  int64_t slots[kTileKeys];
  int begin, end;  // the keys that are read
  Unit* none;      // a row of zeros
  Unit* wide_keys;
  Unit* made_values;

  static int widest(const Call& call) { return std::max(call.key_dim, call.value_dim); }

  static size_t bytes(const Call& call) {
    return Scratch::bytes_of<float>(widest(call)) +
           2 * Scratch::bytes_of<Unit>(size_t(kTileKeys) * widest(call));
  }

  TileRows(const Call& call, Scratch& scratch) {
    none = scratch.take<Unit>(widest(call));
    std::memset(none, 0, sizeof(Unit) * widest(call));
    wide_keys = scratch.take<Unit>(size_t(kTileKeys) * widest(call));
    made_values = scratch.take<Unit>(size_t(kTileKeys) * widest(call));
    for (int i = 0; i < kTileKeys + kSpare; ++i) keys[i] = none;
    for (int i = 0; i < kTileKeys; ++i) values[i] = none;
  }

  void find(const Call& call, const Item& item, int64_t position) {
    const int32_t* blocks = call.blocks + call.block_starts[item.slice];
    begin = int(std::max<int64_t>(0, item.key_begin - position));
    end = int(std::min<int64_t>(kTileKeys, item.key_end - position));
    for (int i = begin; i < end; ++i) {
      const int64_t place = position + i, block = place / call.block_size;
      slots[i] = int64_t(blocks[block]) * call.block_size + (place - block * call.block_size);
    }
  }

  void read(const Call& call, int head) {
    for (int i = 0; i < begin; ++i) keys[i] = none;
    for (int i = end; i < kTileKeys; ++i) keys[i] = none;
    for (int i = begin; i < end; ++i)
      keys[i] = row(row_of(call.keys, call, i, head, call.key_dim), call.key_dim, i, wide_keys);
    read_values(call, head, Route{});
  }

  void read_values(const Call& call, int head, FloatRoute) {
    for (int i = 0; i < begin; ++i) values[i] = none;
    for (int i = begin; i < end; ++i)
      values[i] =
          row(row_of(call.values, call, i, head, call.value_dim), call.value_dim, i, made_values);
  }

#if defined(KVRELAY_HAS_PAIRS)
  void read_values(const Call& call, int head, PairRoute) {
    for (int i = begin / 2 * 2; i < end; i += 2) {
      Unit* pairs = made_values + size_t(i / 2) * call.value_dim;
      join_rows(value_or_none(call, head, i), value_or_none(call, head, i + 1), call.value_dim,
                pairs);
      values[i / 2] = pairs;
    }
  }
#endif

  const Number* value_or_none(const Call& call, int head, int i) const {
    if (i < begin || i >= end) return reinterpret_cast<const Number*>(none);
    return row_of(call.values, call, i, head, call.value_dim);
  }

  const Number* row_of(const void* plane, const Call& call, int i, int head, int dim) const {
    return static_cast<const Number*>(plane) + (slots[i] * call.kv_heads + head) * dim;
  }

  const Unit* row(const Number* from, int dim, int i, Unit* wide) const {
    if constexpr (kWidens) {
      widen(from, dim, wide + size_t(i) * dim);
      return wide + size_t(i) * dim;
    } else {
      return reinterpret_cast<const Unit*>(from);
    }
  }
};
