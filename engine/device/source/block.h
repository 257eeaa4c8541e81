// A block of lanes: up to kBlockRows rows of one KV head, and what they have gathered so far.
#pragma once

#include "softmax.h"
#include "tile_rows.h"
#include "transpose.h"

template <class Number, class Route>
struct Block {
  typedef typename Route::Unit Unit;
  static constexpr int kRows = kBlockRows;
  int head, row_begin, rows, count, value_dim;  // KV head; `count` vectors hold the rows
  int64_t first_key, last_key;       // that any of its rows sees
  int64_t all_from, all_to;          // that all of them see
  Unit* query;                       // [units][lanes]
  Running run;

  int lanes() const { return count * kLanes; }

  static size_t bytes(int key_dim, int value_dim) {
    return Scratch::bytes_of<Unit>(size_t(key_dim) / Route::kNumbers * kBlockRows) +
           Scratch::bytes_of<float>(size_t(value_dim) * kBlockRows) +
           5 * Scratch::bytes_of<float>(kBlockRows);
  }

  void open(const Shape& shape, const Item& item, int kv_head, int begin, Scratch& scratch,
            float* buffer) {
    head = kv_head, row_begin = begin;
    rows = std::min(kBlockRows, item.row_end - begin);
    count = (rows + kLanes - 1) / kLanes;
    value_dim = shape.call.value_dim;
    query = scratch.take<Unit>(size_t(shape.call.key_dim) / Route::kNumbers * lanes());
    run.first = scratch.take<int32_t>(lanes()), run.last = scratch.take<int32_t>(lanes());
    run.top = scratch.take<float>(lanes()), run.total = scratch.take<float>(lanes());
    run.shrink = scratch.take<float>(lanes());
    run.out = scratch.take<float>(size_t(value_dim) * lanes());
    std::memset(run.out, 0, sizeof(float) * value_dim * lanes());
    see(shape, item);
    pack(shape, item, reinterpret_cast<Unit*>(buffer));
  }

  // Lanes behind the last row see what it sees.
  void see(const Shape& shape, const Item& item) {
    for (int lane = 0; lane < lanes(); ++lane) {
      const int row = row_begin + std::min(lane, rows - 1);
      run.first[lane] = int32_t(shape.first_key(item.slice, row));
      run.last[lane] = int32_t(shape.last_key(item.slice, row));
      run.top[lane] = shape.sink(item, head, row, kLeast);
      run.total[lane] = shape.has_sink(item);
    }
    first_key = run.first[0], all_from = run.first[lanes() - 1];
    all_to = run.last[0], last_key = run.last[lanes() - 1];
  }

  void pack(const Shape& shape, const Item& item, Unit* buffer) {
    const int units = shape.call.key_dim / Route::kNumbers;
    for (int lane = 0; lane < lanes(); lane += kLanes) {
      const int held = std::min(kLanes, rows - lane);
      std::memset(buffer + held * units, 0, sizeof(Unit) * (kLanes - held) * units);
      for (int i = 0; i < held; ++i) {
        const Number* from = shape.query<Number>(item.slice, head, row_begin + lane + i);
        if constexpr (Route::kNumbers == 2)
          std::memcpy(buffer + i * units, from, sizeof(Unit) * units);
        else
          widen(from, units, buffer + i * units);
      }
      to_lanes(buffer, units, query + lane, lanes());
    }
  }

  // The first and the last key of the tile at `position` that some row sees, as [begin, end).
  int begin(int64_t position) const {
    const int key = int(std::max<int64_t>(0, first_key - position));
    return key / Route::kNumbers * Route::kNumbers;
  }
  int end(int64_t position, int keys) const {
    return int(std::min<int64_t>(keys, last_key + 1 - position));
  }

  template <int kCount>
  void attend(const TileRows<Number, Route>& tile, int64_t position, int begin, int end,
              const Call& call, float* scores, Unit* weights) {
    const Curve curve(call.scaling, call.softcap);
    const int place = head - tile.first_head, units = call.key_dim / Route::kNumbers;
    score<Route, kCount>(tile.keys, place * units, begin, end, query, units, scores);
    if (call.softcap > 0) cap<kCount>(scores, begin, end, curve);
    const bool open = position + begin >= all_from && position + end - 1 <= all_to;
    (open ? soften<Route, kCount, false> : soften<Route, kCount, true>)(
        scores, begin, end, int32_t(position), curve, run, weights);
    weigh<Route, kCount>(tile.values, place * value_dim, value_dim, begin / Route::kNumbers,
                         (end + Route::kNumbers - 1) / Route::kNumbers, weights, run.shrink,
                         run.out);
  }

  void attend(const TileRows<Number, Route>& tile, int64_t position, const Call& call,
              float* scores, Unit* weights) {
    const int begin = this->begin(position), end = this->end(position, tile.end);
    if (begin >= end) return;
    switch (count) {
      case 1: return attend<1>(tile, position, begin, end, call, scores, weights);
      case 2: return attend<2>(tile, position, begin, end, call, scores, weights);
#if !defined(__AVX2__) || defined(__AVX512F__)
      case 3: return attend<3>(tile, position, begin, end, call, scores, weights);
      case 4: return attend<4>(tile, position, begin, end, call, scores, weights);
#endif
    }
  }

  static size_t buffer_floats(int) {
    return size_t(kTileKeys + TileRows<Number, Route>::kSpare) * kBlockRows;
  }

  static void attend_tile(std::vector<Block>& blocks, TileRows<Number, Route>& tile,
                          int64_t position, const Call& call, float* scores, Unit* weights) {
    tile.read_keys(call), tile.read_values(call);
    for (Block& block : blocks) block.attend(tile, position, call, scores, weights);
  }

  // take(row, top, total, out): each row's results.
  template <class Take>
  void each_row(float* buffer, Take take) const {
    for (int lane = 0; lane < rows; ++lane) {
      const int place = lane % kLanes;
      if (place == 0) from_lanes(run.out + lane, lanes(), value_dim, buffer);
      take(row_begin + lane, run.top[lane], run.total[lane], buffer + place * value_dim);
    }
  }
};
