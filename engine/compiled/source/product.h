// Few rows times weights that lie as oneDNN packs them: panels of 64 outputs, one behind the other, in
// each [units][64], where a unit is one float or a pair of bfloat16. Every output is one sum, in the
// order of the inputs, whatever the number of rows.
#pragma once

#include <algorithm>

#include "../../device/source/routes.h"

constexpr int kPanel = 64, kHalf = 32;
constexpr int kMostRows = kLanes == 16 ? 6 : 2;  // of a register tile

struct FloatWeights {
  typedef float Number;
  typedef float Unit;
  typedef Floats Vector;
  static inline Floats add(Floats sum, Vector weights, Unit x) { return sum + weights * x; }
};

struct PairWeights {
  typedef BFloat16 Number;
  typedef int32_t Unit;
  typedef Ints Vector;
  static inline Floats add(Floats sum, Vector weights, Unit x) {
#if defined(KVRELAY_HAS_PAIRS)
    return PairRoute::add(sum, weights, x);
#else
    const Floats low = (Floats)(weights << 16), high = (Floats)(weights & int32_t(0xffff0000));
    return sum + low * to_float(BFloat16{uint16_t(x)}) + high * to_float(BFloat16{uint16_t(uint32_t(x) >> 16)});
#endif
  }
};

template <class Weights>
struct Product {
  typedef typename Weights::Number Number;
  typedef typename Weights::Unit Unit;

  const Number* x;
  Number* out;
  int64_t x_stride, out_stride;  // between rows
  const Unit* weights;
  const Number* bias;  // or none
  int64_t units, panel_units;  // of a row; of an output in a panel, with what is filled up
  int rows, width;

  // Outputs [32 * begin, 32 * end).
  void compute(int begin, int end) const {
    for (int half = begin; half < end;) {
      const int left = end - half;
      if (kLanes == 16 && half % 2 == 0 && left > 1) {
        all_rows<kPanel / kLanes>(half * kHalf), half += 2;
      } else {
        all_rows<kHalf / kLanes>(half * kHalf), half += 1;
      }
    }
  }

 private:
  // In tiles of about as many rows each.
  template <int kVectors>
  void all_rows(int column) const {
    const int tiles = (rows + kMostRows - 1) / kMostRows;
    for (int i = 0, row = 0; i < tiles; ++i) {
      const int count = (rows - row + tiles - i - 1) / (tiles - i);
      some_rows<kMostRows, kVectors>(row, count, column);
      row += count;
    }
  }

  template <int kRows, int kVectors>
  void some_rows(int row, int count, int column) const {
    if (count == kRows) return tile<kRows, kVectors>(row, column);
    if constexpr (kRows > 1) some_rows<kRows - 1, kVectors>(row, count, column);
  }

  template <int kRows, int kVectors>
  void tile(int row, int column) const {
    const Unit* from = weights + column / kPanel * panel_units * kPanel + column % kPanel;
    const char* inputs[kRows];
    for (int r = 0; r < kRows; ++r) inputs[r] = reinterpret_cast<const char*>(x + (row + r) * x_stride);
    Floats sums[kRows][kVectors] = {};
    for (int64_t u = 0; u < units; ++u, from += kPanel) {
      typename Weights::Vector panel[kVectors];
      for (int v = 0; v < kVectors; ++v)
        panel[v] = load<typename Weights::Vector>(from + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Unit unit = load<Unit>(inputs[r] + u * sizeof(Unit));
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Weights::add(sums[r][v], panel[v], unit);
      }
    }
    for (int r = 0; r < kRows; ++r) put<kVectors>(sums[r], row + r, column);
  }

  template <int kVectors>
  void put(const Floats (&sums)[kVectors], int row, int column) const {
    alignas(64) float wide[kVectors * kLanes];
    for (int v = 0; v < kVectors; ++v) store(wide + v * kLanes, sums[v]);
    const int count = std::min(kVectors * kLanes, width - column);
    Number* to = out + row * out_stride + column;
    if (bias != nullptr)
      for (int i = 0; i < count; ++i) wide[i] += to_float(bias[column + i]);
    narrow(wide, count, to);
  }
};
