// The two ways to multiply: floats, and pairs of bfloat16 added to a float in one instruction.
//
// A product runs over "units": one number of a row, or two neighbours. One operand is a unit that is
// spread over all lanes, the other a vector of units with a query in each lane.
#pragma once

#include "numbers.h"

struct FloatRoute {
  typedef float Unit;
  typedef Floats Vector;
  static constexpr int kNumbers = 1;  // in a unit
  static constexpr bool kRough = false;

  static inline Floats add(Floats sum, Vector lanes, Unit unit) { return sum + lanes * unit; }
  static inline Floats add(Floats sum, Vector a, Vector b) { return sum + a * b; }
  static inline void put(Floats weights, Unit* to) { store(to, weights); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define KVRELAY_HAS_PAIRS 1
struct PairRoute {
  typedef int32_t Unit;
  typedef Ints Vector;
  static constexpr int kNumbers = 2;
  static constexpr bool kRough = true;

  static inline Floats add(Floats sum, Vector a, Vector b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
  static inline Floats add(Floats sum, Vector lanes, Unit unit) {
    return add(sum, lanes, (Vector)_mm512_set1_epi32(unit));
  }
  static inline void put(Floats weights, Unit* to) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
  }
};

// [low[0], high[0], low[1], ...] as bfloat16.
inline Ints join_pairs(Floats low, Floats high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Ints)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// Two rows of `dim` numbers as `dim` pairs.
inline void join_rows(const BFloat16* first, const BFloat16* second, int dim, int32_t* pairs) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i order = _mm512_load_si512(kOrder);
  const __m512i later = _mm512_add_epi16(order, _mm512_set1_epi16(16));
  int i = 0;
  for (; i + 32 <= dim; i += 32) {
    const __m512i low = _mm512_loadu_si512(first + i), high = _mm512_loadu_si512(second + i);
    _mm512_storeu_si512(pairs + i, _mm512_permutex2var_epi16(low, order, high));
    _mm512_storeu_si512(pairs + i + 16, _mm512_permutex2var_epi16(low, later, high));
  }
  for (; i < dim; ++i) pairs[i] = int32_t(first[i].bits) | int32_t(second[i].bits) << 16;
}
#endif
