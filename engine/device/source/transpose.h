// Rows to lanes and back, for elements of 32 bits.
#pragma once

#include "lanes.h"

inline void transpose_square(const Ints* from, Ints* to) {
#if defined(__AVX512F__)
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32((__m512i)from[i], (__m512i)from[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)from[i], (__m512i)from[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int i = 0; i < 4; ++i) {  // a quarter holds four rows of one column
    const __m512i a = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xdd);
    to[i] = (Ints)_mm512_shuffle_i32x4(a, c, 0x88);
    to[i + 4] = (Ints)_mm512_shuffle_i32x4(b, d, 0x88);
    to[i + 8] = (Ints)_mm512_shuffle_i32x4(a, c, 0xdd);
    to[i + 12] = (Ints)_mm512_shuffle_i32x4(b, d, 0xdd);
  }
#else
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[j][i] = from[i][j];
#endif
}

// kLanes rows `from` [kLanes][columns] to `to` [columns][stride].
template <class Number>
inline void to_lanes(const Number* from, int columns, Number* to, int stride) {
  Ints square[kLanes], turned[kLanes];
  int column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    for (int r = 0; r < kLanes; ++r) square[r] = load<Ints>(from + r * columns + column);
    transpose_square(square, turned);
    for (int c = 0; c < kLanes; ++c) store(to + (column + c) * stride, turned[c]);
  }
  for (; column < columns; ++column)
    for (int r = 0; r < kLanes; ++r) to[column * stride + r] = from[r * columns + column];
}

// And back.
template <class Number>
inline void from_lanes(const Number* from, int stride, int columns, Number* to) {
  Ints square[kLanes], turned[kLanes];
  int column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    for (int c = 0; c < kLanes; ++c) square[c] = load<Ints>(from + (column + c) * stride);
    transpose_square(square, turned);
    for (int r = 0; r < kLanes; ++r) store(to + r * columns + column, turned[r]);
  }
  for (; column < columns; ++column)
    for (int r = 0; r < kLanes; ++r) to[r * columns + column] = from[column * stride + r];
}
