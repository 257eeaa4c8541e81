// Vectors of floats, in the compiler's own extension: as wide as the processor that it builds for.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kLanes = 16;
constexpr int kVectors = 4;  // of queries that one register tile holds
#elif defined(__AVX2__)
#include <immintrin.h>
constexpr int kLanes = 8;
constexpr int kVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kVectors = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// The first `count` elements, and zeros behind them.
template <class Vector>
inline Vector load_some(const void* from, int count) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
#else
  Vector vector = {};
  std::memcpy(&vector, from, size_t(count) * 4);
  return vector;
#endif
}

inline Floats all(float value) { return Floats{} + value; }
inline Ints all(int32_t value) { return Ints{} + value; }

inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline Floats smaller(Floats a, Floats b) { return -larger(-a, -b); }

// 2^x for x up to 127, with a relative error of 2e-9 before rounding; 8e-5 if `kRough`, a fiftieth of
// what rounding a weight to bfloat16 adds. Polynomials fitted to the least largest relative error.
#if defined(__AVX512DQ__)
template <bool kRough>
inline Floats exp2(Floats x) {
  const Floats rest = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
  Floats power;
  if (kRough) {
    power = rest * 0x1.3f96a4p-4f + 0x1.cefc4cp-3f;
    power = power * rest + 0x1.64444cp-1f;
    power = power * rest + 0x1.fff632p-1f;
  } else {
    power = rest * 0x1.c54174p-13f + 0x1.46d64ep-10f;
    power = power * rest + 0x1.3d0b92p-7f;
    power = power * rest + 0x1.c68912p-5f;
    power = power * rest + 0x1.ebfd58p-3f;
    power = power * rest + 0x1.62e42cp-1f;
    power = power * rest + 1.0f;
  }
  return (Floats)_mm512_scalef_ps((__m512)power, (__m512)x);  // power * 2^floor(x)
}
#else
template <bool kRough>
inline Floats exp2(Floats x) {
  x = larger(x, all(-126.0f));
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: its last bits count ones
  const Floats shifted = x + magic;
  const Floats rest = x - (shifted - magic);
  Floats power;
  if (kRough) {
    power = rest * 0x1.c3f75ep-5f + 0x1.f0de1ap-3f;
    power = power * rest + 0x1.62f31ap-1f;
    power = power * rest + 0x1.fff692p-1f;
  } else {
    power = rest * 0x1.41d332p-13f + 0x1.5f456ap-10f;
    power = power * rest + 0x1.3b2dbcp-7f;
    power = power * rest + 0x1.c6aed4p-5f;
    power = power * rest + 0x1.ebfbdap-3f;
    power = power * rest + 0x1.62e430p-1f;
    power = power * rest + 1.0f;
  }
  return (Floats)((Ints)power + ((Ints)shifted - (Ints)magic) * (1 << 23));
}
#endif

inline Floats tanh(Floats x) {
  const Floats bounded = smaller(larger(x, all(-20.0f)), all(20.0f));
  const Floats power = exp2<false>(bounded * 2.8853900817779268f);
  return (power - 1.0f) / (power + 1.0f);
}

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

inline float largest_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

// Lane i of the result is the sum of rows[i]'s lanes.
inline Floats sums_of(const Floats (&rows)[kLanes]) {
#if defined(__AVX512F__)
  __m512 pairs[8], fours[4], halves[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)rows[2 * i], b = (__m512)rows[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int i = 0; i < 2; ++i)
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                               _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
  Floats sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_of(rows[i]);
  return sums;
#endif
}
