// The 16-bit formats of keys, values and queries, and how they become floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class Number>
Number from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#if defined(__FLT16_MAX__)
#define KVRELAY_HAS_FLOAT16 1
typedef _Float16 Float16;
inline float to_float(Float16 value) { return float(value); }

template <>
inline Float16 from_float<Float16>(float value) {
  return Float16(value);
}
#endif

template <class Number>
inline void widen(const Number* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <class Number>
inline void narrow(const float* from, int count, Number* to) {
  for (int i = 0; i < count; ++i) to[i] = from_float<Number>(from[i]);
}
