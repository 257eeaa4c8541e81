// Element-wise operations of decoder layers, a row at a time. Sums are float; what torch's operations
// would round is rounded. Loops are written for the compiler to vectorise.
#pragma once

#include <cmath>

#include "../../device/source/numbers.h"

// 2^n by its exponent bits, the rest by a polynomial: 2 units in the last place of float.
static inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

struct Silu {
  static inline float of(float x) { return x / (1.0f + exponential(-x)); }
};

struct GeluTanh {
  static inline float of(float x) {
    const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * inner));
  }
};

template <class Number>
inline float rounded(float value) {
  return to_float(from_float<Number>(value));
}

// `rounds`: before the weight, as most models do.
template <class Number>
inline void norm_row(const Number* x, const float* weight, Number* out, int64_t width, float eps,
                     bool rounds) {
  float squares = 0.0f;
  for (int64_t i = 0; i < width; ++i) squares += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt(squares / float(width) + eps);
  if (rounds)
    for (int64_t i = 0; i < width; ++i)
      out[i] = from_float<Number>(rounded<Number>(to_float(x[i]) * scale) * weight[i]);
  else
    for (int64_t i = 0; i < width; ++i)
      out[i] = from_float<Number>(to_float(x[i]) * scale * weight[i]);
}

template <class Number>
inline void add_row(const Number* x, const Number* other, Number* sum, int64_t width) {
  for (int64_t i = 0; i < width; ++i) sum[i] = from_float<Number>(to_float(x[i]) + to_float(other[i]));
}

// Rotary embedding (arXiv:2104.09864 §3.4.2, halves instead of pairs).
template <class Number>
inline void rotate_row(const Number* x, const Number* cosines, const Number* sines, Number* out,
                       int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float near = to_float(x[i]), far = to_float(x[i + half]);
    out[i] = from_float<Number>(rounded<Number>(near * to_float(cosines[i])) -
                                rounded<Number>(far * to_float(sines[i])));
    out[i + half] = from_float<Number>(rounded<Number>(far * to_float(cosines[i + half])) +
                                       rounded<Number>(near * to_float(sines[i + half])));
  }
}

template <class Activation, class Number>
inline void gate_row(const Number* gate, const Number* up, Number* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i)
    out[i] = from_float<Number>(rounded<Number>(Activation::of(to_float(gate[i]))) * to_float(up[i]));
}
