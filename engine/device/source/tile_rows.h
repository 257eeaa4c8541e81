// The keys and values of one tile, found through the block table: a pointer for each unit row.
#pragma once

#include <type_traits>

#include "items.h"
#include "routes.h"
#include "scratch.h"

// A row holds all of an item's KV heads, one behind the other: memory is read in its own order, which
// is what the processor's prefetchers follow.
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
  int first_head, key_numbers, value_numbers;
  Unit* none;  // a row of zeros
  Unit* touched;
  Unit* wide_keys;
  Unit* made_values;

  static size_t widest(const Call& call, int heads) {
    return size_t(std::max(call.key_dim, call.value_dim)) * heads;
  }

  static size_t bytes(const Call& call, int heads) {
    return Scratch::bytes_of<Unit>(widest(call, heads)) + Scratch::bytes_of<Unit>(kLanes) +
           2 * Scratch::bytes_of<Unit>(kTileKeys * widest(call, heads));
  }

  TileRows(const Call& call, const Item& item, Scratch& scratch) {
    const int heads = item.head_end - item.head_begin;
    first_head = item.head_begin;
    key_numbers = heads * call.key_dim, value_numbers = heads * call.value_dim;
    none = scratch.take<Unit>(widest(call, heads)), touched = scratch.take<Unit>(kLanes);
    std::memset(none, 0, sizeof(Unit) * widest(call, heads));
    wide_keys = scratch.take<Unit>(kTileKeys * widest(call, heads));
    made_values = scratch.take<Unit>(kTileKeys * widest(call, heads));
    for (int i = 0; i < kTileKeys + kSpare; ++i) keys[i] = none;
    for (int i = 0; i < kTileKeys; ++i) values[i] = none;
  }

  // Keys [begin, end) of the tile at `position` are the item's.
  void find(const Call& call, const Item& item, int64_t position) {
    begin = int(std::max<int64_t>(0, item.key_begin - position));
    end = int(std::min<int64_t>(kTileKeys, item.key_end - position));
    const int64_t size = call.block_size, first = position + begin;
    const int32_t* block = call.blocks + call.block_starts[item.slice] + first / size;
    int64_t place = first % size;
    for (int i = begin; i < end; ++i) {
      slots[i] = int64_t(*block) * size + place;
      if (++place == size) ++block, place = 0;
    }
  }

  const Number* row_of(const void* plane, const Call& call, int64_t slot, int dim) const {
    return static_cast<const Number*>(plane) + (slot * call.kv_heads + first_head) * dim;
  }

  void read_keys(const Call& call) {
    touch(call.keys, call, call.key_dim, key_numbers);
    touch(call.values, call, call.value_dim, value_numbers);
    for (int i = 0; i < begin; ++i) keys[i] = none;
    for (int i = end; i < kTileKeys; ++i) keys[i] = none;
    for (int i = begin; i < end; ++i)
      keys[i] = row(row_of(call.keys, call, slots[i], call.key_dim), key_numbers, i, wide_keys);
  }

  void read_values(const Call& call) { read_values(call, Route{}); }

  void read_values(const Call& call, FloatRoute) {
    for (int i = 0; i < begin; ++i) values[i] = none;
    for (int i = begin; i < end; ++i)
      values[i] =
          row(row_of(call.values, call, slots[i], call.value_dim), value_numbers, i, made_values);
  }

#if defined(KVRELAY_HAS_PAIRS)
  void read_values(const Call& call, PairRoute) {
    for (int i = begin / 2 * 2; i < end; i += 2) {
      Unit* pairs = made_values + size_t(i / 2) * value_numbers;
      join_rows(value_or_none(call, i), value_or_none(call, i + 1), value_numbers, pairs);
      values[i / 2] = pairs;
    }
  }
#endif

  const Number* value_or_none(const Call& call, int i) const {
    if (i < begin || i >= end) return reinterpret_cast<const Number*>(none);
    return row_of(call.values, call, slots[i], call.value_dim);
  }

  // Reads of each line in order: the processor's prefetchers then bring a plane in at the rate of a
  // copy, which they don't when heads are read apart from each other.
  void touch(const void* plane, const Call& call, int dim, int numbers) const {
    constexpr int kStep = sizeof(Ints) / sizeof(Number), kLine = 64 / sizeof(Number);
    Ints seen = {};
    for (int i = begin; i < end; ++i) {
      const Number* row = row_of(plane, call, slots[i], dim);
      for (int n = 0; n + kStep <= numbers; n += kLine) seen ^= load<Ints>(row + n);
    }
    store(touched, seen);  // else nothing need be read
  }

  const Unit* row(const Number* from, int numbers, int i, Unit* wide) const {
    if constexpr (kWidens) {
      widen(from, numbers, wide + size_t(i) * numbers);
      return wide + size_t(i) * numbers;
    } else {
      return reinterpret_cast<const Unit*>(from);
    }
  }
};
