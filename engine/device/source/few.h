// Attention of few rows, one token's heads as a rule: the lanes hold a key's numbers, then keys, then
// a value's numbers, so that none of them is idle. Running softmax as in softmax.h.
#pragma once

#include "softmax.h"
#include "tile_rows.h"

constexpr int kFewRows = 8;

template <class Number, class Route>
struct Few {
  typedef typename Route::Unit Unit;
  typedef typename Route::Vector Vector;
  static constexpr int kRows = kFewRows;
  static constexpr int kUnits = kTileKeys / Route::kNumbers;  // of a row's weights
  int head, rows, units, value_dim;
  Unit* query;                              // [rows][units]
  int32_t first[kFewRows], last[kFewRows];  // the positions that a row sees
  float top[kFewRows], total[kFewRows], shrink[kFewRows];
  float* out;  // [rows][value_dim]

  static size_t bytes(int key_dim, int value_dim) {
    return Scratch::bytes_of<Unit>(size_t(key_dim) * kFewRows) +
           Scratch::bytes_of<float>(size_t(value_dim) * kFewRows);
  }

  void open(const Shape& shape, const Item& item, int kv_head, int, Scratch& scratch, float*) {
    const Call& call = shape.call;
    head = kv_head, rows = item.row_end, units = call.key_dim / Route::kNumbers;
    value_dim = call.value_dim;
    query = scratch.take<Unit>(size_t(units) * kFewRows);
    out = scratch.take<float>(size_t(value_dim) * kFewRows);
    std::memset(out, 0, sizeof(float) * value_dim * rows);
    for (int row = 0; row < rows; ++row) {
      first[row] = int32_t(shape.first_key(item.slice, row));
      last[row] = int32_t(shape.last_key(item.slice, row));
      top[row] = shape.sink(item, head, row, kLeast), total[row] = shape.has_sink(item);
      read_query(shape.query<Number>(item.slice, head, row), query + row * units);
    }
  }

  void read_query(const Number* from, Unit* to) const {
    if constexpr (Route::kNumbers == 2)
      std::memcpy(to, from, sizeof(Unit) * units);
    else
      widen(from, units, to);
  }

  // Those of kLanes keys from `key` on.
  void score_keys(const Unit* const* keys, int at, int key, float* scores) const {
    for (int row = 0; row < rows; ++row) {
      Floats sums[kLanes] = {};
      int u = 0;
      for (; u + kLanes <= units; u += kLanes) {
        const Vector asked = load<Vector>(query + row * units + u);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          sums[i] = Route::add(sums[i], asked, load<Vector>(keys[key + i] + at + u));
      }
      if (u < units) {
        const Vector asked = load_some<Vector>(query + row * units + u, units - u);
        for (int i = 0; i < kLanes; ++i)
          sums[i] = Route::add(sums[i], asked,
                               load_some<Vector>(keys[key + i] + at + u, units - u));
      }
      store(scores + row * kTileKeys + key, sums_of(sums));
    }
  }

  // A row's scores to weights; those of keys that it doesn't see are 0.
  void soften_row(int row, int64_t position, int begin, int end, const Curve& curve, float* mine,
                  Unit* weights) {
    const Ints from = all(int32_t(first[row] - position)), to = all(int32_t(last[row] - position));
    Ints lane = all(begin);
    for (int i = 0; i < kLanes; ++i) lane[i] += i;
    Floats best = all(top[row]);
    for (int key = begin; key < end; key += kLanes, lane += kLanes) {
      Floats score = load<Floats>(mine + key);
      if (curve.softcap > 0) score = curve.capped(score);
      score = (lane >= from) & (lane <= to) ? score * curve.factor : all(2 * kLeast);
      store(mine + key, score);
      best = larger(best, score);
    }
    const float most = largest_of(best);
    Floats sum = {};
    for (int key = begin; key < end; key += kLanes) {
      const Floats score = load<Floats>(mine + key);
      const Floats power = exp2<Route::kRough>(score - most);
      const Floats weight = score > kLeast ? power : Floats{};
      Route::put(weight, weights + key / Route::kNumbers);
      sum += weight;
    }
    shrink[row] = exp2<Route::kRough>(all(top[row] - most))[0];
    total[row] = total[row] * shrink[row] + sum_of(sum);
    top[row] = most;
  }

  template <int kRows, int kWidth>
  void weigh_part(const Unit* const* values, const Unit* weights, int begin, int end, int from, int at,
                  int dim) {
    Floats sums[kRows][kWidth];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWidth; ++v)
        sums[r][v] = load<Floats>(out + (from + r) * value_dim + dim + v * kLanes) * shrink[from + r];
    for (int u = begin; u < end; ++u) {
      Vector value[kWidth];
      for (int v = 0; v < kWidth; ++v) value[v] = load<Vector>(values[u] + at + dim + v * kLanes);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWidth; ++v)
          sums[r][v] = Route::add(sums[r][v], value[v], weights[(from + r) * kUnits + u]);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWidth; ++v)
        store(out + (from + r) * value_dim + dim + v * kLanes, sums[r][v]);
  }

  template <int kRows>
  void weigh_rows(const Unit* const* values, const Unit* weights, int begin, int end, int from, int at) {
    int dim = 0;
    for (; dim + 4 * kLanes <= value_dim; dim += 4 * kLanes)
      weigh_part<kRows, 4>(values, weights, begin, end, from, at, dim);
    for (; dim + kLanes <= value_dim; dim += kLanes)
      weigh_part<kRows, 1>(values, weights, begin, end, from, at, dim);
    for (; dim < value_dim; ++dim) weigh_tail<kRows>(values, weights, begin, end, from, at, dim);
  }

  template <int kRows>
  void weigh_tail(const Unit* const* values, const Unit* weights, int begin, int end, int from, int at,
                  int dim) {
    for (int r = from; r < from + kRows; ++r) {
      Floats sum = all(out[r * value_dim + dim] * shrink[r]);
      for (int u = begin; u < end; ++u)
        sum = Route::add(sum, Vector{} + values[u][at + dim], weights[r * kUnits + u]);
      out[r * value_dim + dim] = sum[0];
    }
  }

  void weigh(const Unit* const* values, const Unit* weights, int begin, int end, int at) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) weigh_rows<4>(values, weights, begin, end, row, at);
    switch (rows - row) {
      case 3: return weigh_rows<3>(values, weights, begin, end, row, at);
      case 2: return weigh_rows<2>(values, weights, begin, end, row, at);
      case 1: return weigh_rows<1>(values, weights, begin, end, row, at);
    }
  }

  // All heads of some keys, then of the next ones.
  static void attend_tile(std::vector<Few>& heads, TileRows<Number, Route>& tile, int64_t position,
                          const Call& call, float* scores, Unit* weights) {
    const Curve curve(call.scaling, call.softcap);
    const int begin = tile.begin / kLanes * kLanes, end = tile.end, per_head = kFewRows * kTileKeys;
    tile.read_keys(call);
    for (int key = begin; key < end; key += kLanes)
      for (size_t h = 0; h < heads.size(); ++h)
        heads[h].score_keys(tile.keys, int(h) * heads[h].units, key, scores + h * per_head);
    for (size_t h = 0; h < heads.size(); ++h)
      for (int row = 0; row < heads[h].rows; ++row)
        heads[h].soften_row(row, position, begin, end, curve,
                            scores + h * per_head + row * kTileKeys,
                            weights + (h * kFewRows + row) * kUnits);
    tile.read_values(call);
    const int from = tile.begin / Route::kNumbers;
    const int to = (end + Route::kNumbers - 1) / Route::kNumbers;
    for (size_t h = 0; h < heads.size(); ++h)
      heads[h].weigh(tile.values, weights + h * kFewRows * kUnits, from, to,
                     int(h) * heads[h].value_dim);
  }

  static size_t buffer_floats(int heads) { return size_t(heads) * kFewRows * kTileKeys; }

  template <class Take>
  void each_row(float*, Take take) const {
    for (int row = 0; row < rows; ++row) take(row, top[row], total[row], out + row * value_dim);
  }
};
