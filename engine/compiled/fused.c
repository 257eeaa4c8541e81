/* Element-wise operations of decoder layers, fused, over rows that need not be adjacent.
 *
 * Values are float (f32) or bfloat16 (b16); sums are float, and each result is rounded once.
 * Strides and widths count values. Loops are written for the compiler to vectorise.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define FEW 8192 /* values: below it a second thread costs more than it brings */

typedef uint16_t b16;
typedef float f32;

static inline float read_f32(f32 value) { return value; }
static inline f32 write_f32(float value) { return value; }

static inline float read_b16(b16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

static inline b16 write_b16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet_nan = (bits >> 16) | 0x40;
  return (b16)((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

/* 2^n by its exponent bits, the rest by a polynomial: 2 units in the last place of float. */
static inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float n = floorf(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return p * scale;
}

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

static inline float gelu_tanh(float x) {
  float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * inner));
}

#define NORM(T)                                                                                   \
  static inline void norm_row_##T(const T *x, const float *weight, T *out, int64_t width,         \
                                  float eps) {                                                    \
    float squares = 0.0f;                                                                         \
    for (int64_t i = 0; i < width; i++) squares += read_##T(x[i]) * read_##T(x[i]);               \
    float scale = 1.0f / sqrtf(squares / (float)width + eps);                                     \
    for (int64_t i = 0; i < width; i++)                                                           \
      out[i] = write_##T(read_##T(x[i]) * scale * weight[i]);                                     \
  }                                                                                               \
                                                                                                  \
  /* Row i x heads + j of `out` is head j of token i of x. */                                     \
  void rms_norm_##T(const T *x, const float *weight, T *out, int64_t tokens, int64_t heads,       \
                    int64_t width, int64_t token_stride, int64_t head_stride, float eps) {        \
    _Pragma("omp parallel for schedule(static) if (tokens * heads * width > FEW)")                \
    for (int64_t row = 0; row < tokens * heads; row++)                                            \
      norm_row_##T(x + row / heads * token_stride + row % heads * head_stride, weight,            \
                   out + row * width, width, eps);                                                \
  }                                                                                               \
                                                                                                  \
  /* sum = x + other, rounded; out = its norm. All rows adjacent. */                              \
  void add_rms_norm_##T(const T *x, const T *other, const float *weight, T *sum, T *out,          \
                        int64_t rows, int64_t width, float eps) {                                 \
    _Pragma("omp parallel for schedule(static) if (rows * width > FEW)")                          \
    for (int64_t row = 0; row < rows; row++) {                                                    \
      int64_t at = row * width;                                                                   \
      for (int64_t i = at; i < at + width; i++)                                                   \
        sum[i] = write_##T(read_##T(x[i]) + read_##T(other[i]));                                  \
      norm_row_##T(sum + at, weight, out + at, width, eps);                                       \
    }                                                                                             \
  }

/* Rotary embedding (arXiv:2104.09864 §3.4.2, halves instead of pairs). */
#define ROTATE(T)                                                                                 \
  void rotate_##T(const T *x, const T *cosines, const T *sines, T *out, int64_t tokens,           \
                  int64_t heads, int64_t width, int64_t token_stride, int64_t head_stride,        \
                  int64_t angle_stride) {                                                         \
    int64_t half = width / 2;                                                                     \
    _Pragma("omp parallel for schedule(static) if (tokens * heads * width > FEW)")                \
    for (int64_t token = 0; token < tokens; token++) {                                            \
      const T *c = cosines + token * angle_stride, *s = sines + token * angle_stride;             \
      for (int64_t head = 0; head < heads; head++) {                                              \
        const T *in = x + token * token_stride + head * head_stride;                              \
        T *to = out + (token * heads + head) * width;                                             \
        for (int64_t i = 0; i < half; i++) {                                                      \
          float near = read_##T(in[i]), far = read_##T(in[i + half]);                             \
          to[i] = write_##T(near * read_##T(c[i]) - far * read_##T(s[i]));                        \
          to[i + half] = write_##T(far * read_##T(c[i + half]) + near * read_##T(s[i + half]));   \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
  }

#define GATE(T, ACTIVATION)                                                                       \
  void ACTIVATION##_mul_##T(const T *gate, const T *up, T *out, int64_t rows, int64_t width,      \
                            int64_t gate_stride, int64_t up_stride) {                             \
    _Pragma("omp parallel for schedule(static) if (rows * width > FEW)")                          \
    for (int64_t row = 0; row < rows; row++) {                                                    \
      const T *g = gate + row * gate_stride, *u = up + row * up_stride;                           \
      T *to = out + row * width;                                                                  \
      for (int64_t i = 0; i < width; i++)                                                         \
        to[i] = write_##T(ACTIVATION(read_##T(g[i])) * read_##T(u[i]));                           \
    }                                                                                             \
  }

NORM(f32)
NORM(b16)
ROTATE(f32)
ROTATE(b16)
GATE(f32, silu)
GATE(b16, silu)
GATE(f32, gelu_tanh)
GATE(b16, gelu_tanh)
