// The three steps of a tile of keys against a block of lanes: scores, their softmax, the weighing.
#pragma once

#include "routes.h"

constexpr int kTileKeys = 64;
constexpr float kLeast = -1e30f;  // below every score, and finite: differences stay numbers
constexpr float kLog2E = 1.4426950408889634f;

template <int kCount>
constexpr int steps_for() {  // rows of a register tile beside `kCount` vectors
  return kLanes == 8 ? 8 / kCount : kCount == 1 ? 16 : kCount == 2 ? 8 : 4;
}

// sums[row][lane] += the products of `kRows` rows' units, from `at` on, with the lanes' units.
template <class Route, int kRows, int kCount>
inline void multiply(const typename Route::Unit* const* rows, int at,
                     const typename Route::Unit* lanes, int units, Floats (&sums)[kRows][kCount]) {
  constexpr int kWidth = kCount * kLanes;
  for (int u = 0; u < units; ++u) {
    typename Route::Vector column[kCount];
    for (int v = 0; v < kCount; ++v)
      column[v] = load<typename Route::Vector>(lanes + u * kWidth + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) sums[r][v] = Route::add(sums[r][v], column[v], rows[r][at + u]);
  }
}

// scores[key][lane] of keys [begin, end); up to a step more are read and written.
template <class Route, int kCount>
void score(const typename Route::Unit* const* keys, int at, int begin, int end,
           const typename Route::Unit* query, int units, float* scores) {
  constexpr int kRows = steps_for<kCount>(), kWidth = kCount * kLanes;
  for (int key = begin; key < end; key += kRows) {
    Floats sums[kRows][kCount] = {};
    multiply<Route, kRows, kCount>(keys + key, at, query, units, sums);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kCount; ++v) store(scores + (key + r) * kWidth + v * kLanes, sums[r][v]);
  }
}

// sums[dim][lane] = sums * shrink + the weighed values; `values[unit]` is a row of units per dim.
template <class Route, int kRows, int kCount>
inline void weigh_rows(const typename Route::Unit* const* values, int at, int dim, int begin,
                       int end, const typename Route::Unit* weights, const float* shrink, float* out) {
  constexpr int kWidth = kCount * kLanes;
  Floats sums[kRows][kCount];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kCount; ++v)
      sums[r][v] = load<Floats>(out + (dim + r) * kWidth + v * kLanes) *
                   load<Floats>(shrink + v * kLanes);
  for (int u = begin; u < end; ++u) {
    typename Route::Vector column[kCount];
    for (int v = 0; v < kCount; ++v)
      column[v] = load<typename Route::Vector>(weights + u * kWidth + v * kLanes);
    const typename Route::Unit* row = values[u] + at + dim;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kCount; ++v) sums[r][v] = Route::add(sums[r][v], column[v], row[r]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kCount; ++v) store(out + (dim + r) * kWidth + v * kLanes, sums[r][v]);
}

template <class Route, int kCount>
void weigh(const typename Route::Unit* const* values, int at, int value_dim, int begin, int end,
           const typename Route::Unit* weights, const float* shrink, float* out) {
  constexpr int kRows = steps_for<kCount>();
  int dim = 0;
  for (; dim + kRows <= value_dim; dim += kRows)
    weigh_rows<Route, kRows, kCount>(values, at, dim, begin, end, weights, shrink, out);
  for (; dim < value_dim; ++dim)
    weigh_rows<Route, 1, kCount>(values, at, dim, begin, end, weights, shrink, out);
}
