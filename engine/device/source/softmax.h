// The running softmax of a block of lanes over tiles of keys (Milakov and Gimelshein,
// arXiv:1805.02867), in powers of two.
#pragma once

#include "tile.h"

// Lane |-> what it sees and has seen. `out` is [value_dim][lanes], not yet divided by `total`.
struct Running {
  int32_t* first;  // the positions that the lane sees, [first, last]
  int32_t* last;
  float* top;    // the largest score so far, times log2(e)
  float* total;  // of the weights
  float* out;
  float* shrink;  // what the last tile did to earlier weights
};

// How a score becomes an exponent: times `factor`, after a soft cap if there is one.
struct Curve {
  float factor, scaling, softcap;

  Curve(float scaling, float softcap)
      : factor(softcap > 0 ? kLog2E : scaling * kLog2E), scaling(scaling), softcap(softcap) {}

  Floats capped(Floats score) const { return tanh(score * (scaling / softcap)) * softcap; }
};

template <int kCount>
void cap(float* scores, int begin, int end, const Curve& curve) {
  for (int i = begin * kCount; i < end * kCount; ++i)
    store(scores + i * kLanes, curve.capped(load<Floats>(scores + i * kLanes)));
}

// One vector of lanes; its scores are `width` floats apart.
template <bool kMasked>
struct Column {
  const float* scores;
  int width;
  float factor;
  int32_t position;  // of the tile's first key
  Ints first, last;

  Ints sees(int key) const {
    const Ints place = all(position + key);
    return (place >= first) & (place <= last);
  }
  Floats largest(int begin, int end, Floats top) const {
    Floats best = all(kLeast);
    for (int key = begin; key < end; ++key) {
      Floats score = load<Floats>(scores + key * width);
      if (kMasked) score = sees(key) ? score : all(kLeast);
      best = larger(best, score);
    }
    return larger(top, best * factor);
  }
  template <bool kRough>
  Floats weight(int key, Floats best) const {
    const Floats power = exp2<kRough>(load<Floats>(scores + key * width) * factor - best);
    return kMasked ? (sees(key) ? power : Floats{}) : power;
  }
};

template <class Column>
inline Floats put_weights(FloatRoute, const Column& column, int begin, int end, Floats best,
                          float* weights) {
  Floats total = {};
  for (int key = begin; key < end; ++key) {
    const Floats weight = column.template weight<false>(key, best);
    store(weights + key * column.width, weight);
    total += weight;
  }
  return total;
}

#if defined(KVRELAY_HAS_PAIRS)
template <class Column>
inline Floats put_weights(PairRoute, const Column& column, int begin, int end, Floats best,
                          int32_t* weights) {
  Floats total = {};
  for (int key = begin; key < end; key += 2) {
    const Floats low = column.template weight<true>(key, best);
    const Floats high = key + 1 < end ? column.template weight<true>(key + 1, best) : Floats{};
    store(weights + key / 2 * column.width, join_pairs(low, high));
    total += low + high;
  }
  return total;
}
#endif

// Scores to weights, for keys [begin, end) of the tile. `weights` may be `scores`.
template <class Route, int kCount, bool kMasked>
void soften(float* scores, int begin, int end, int32_t position, const Curve& curve,
            const Running& run, typename Route::Unit* weights) {
  for (int v = 0; v < kCount; ++v) {
    const int lane = v * kLanes;
    const Column<kMasked> column{scores + lane,          kCount * kLanes,
                                 curve.factor,           position,
                                 load<Ints>(run.first + lane), load<Ints>(run.last + lane)};
    const Floats top = load<Floats>(run.top + lane);
    const Floats best = column.largest(begin, end, top);
    const Floats shrink = exp2<Route::kRough>(top - best);
    const Floats total = put_weights(Route{}, column, begin, end, best, weights + lane);
    store(run.top + lane, best);
    store(run.shrink + lane, shrink);
    store(run.total + lane, load<Floats>(run.total + lane) * shrink + total);
  }
}
