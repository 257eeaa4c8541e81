// The operations of rows.h over rows that need not be adjacent, and chains of operations over few rows.
// Strides and widths count numbers.

#include "chain.h"

namespace {

constexpr int64_t kFew = 8192;  // numbers: below it a second thread costs more than it brings

struct Threads {
  Fork fork;
  int64_t count;
};

// `work` of each row; pieces are of about kFew / 2 numbers.
template <class Work>
void each_row(const Threads& threads, int64_t rows, int64_t width, Work work) {
  const int64_t size = std::max<int64_t>(1, kFew / 2 / width);
  const int64_t count = rows * width <= kFew ? 1 : (rows + size - 1) / size;
  const int64_t step = count == 1 ? rows : size;
  share(threads.fork, int(threads.count), int(count), [=](int piece) {
    for (int64_t row = piece * step; row < std::min(rows, (piece + 1) * step); ++row) work(row);
  });
}

// Row i x heads + j of `out` is head j of token i of x.
template <class Number>
void rms_norm(Threads threads, const Number* x, const float* weight, Number* out, int64_t tokens,
              int64_t heads, int64_t width, int64_t token_stride, int64_t head_stride, float eps,
              bool rounds) {
  each_row(threads, tokens * heads, width, [=](int64_t row) {
    norm_row(x + row / heads * token_stride + row % heads * head_stride, weight, out + row * width,
             width, eps, rounds);
  });
}

// sum = x + other, rounded; out = its norm. All rows adjacent.
template <class Number>
void add_rms_norm(Threads threads, const Number* x, const Number* other, const float* weight,
                  Number* sum, Number* out, int64_t rows, int64_t width, float eps, bool rounds) {
  each_row(threads, rows, width, [=](int64_t row) {
    const int64_t at = row * width;
    add_row(x + at, other + at, sum + at, width);
    norm_row(sum + at, weight, out + at, width, eps, rounds);
  });
}

template <class Number>
void rotate(Threads threads, const Number* x, const Number* cosines, const Number* sines, Number* out,
            int64_t tokens, int64_t heads, int64_t width, int64_t token_stride, int64_t head_stride,
            int64_t angle_stride) {
  each_row(threads, tokens, heads * width, [=](int64_t token) {
    for (int64_t head = 0; head < heads; ++head)
      rotate_row(x + token * token_stride + head * head_stride, cosines + token * angle_stride,
                 sines + token * angle_stride, out + (token * heads + head) * width, width);
  });
}

template <class Activation, class Number>
void gate(Threads threads, const Number* gate, const Number* up, Number* out, int64_t rows,
          int64_t width, int64_t gate_stride, int64_t up_stride) {
  each_row(threads, rows, width, [=](int64_t row) {
    gate_row<Activation>(gate + row * gate_stride, up + row * up_stride, out + row * width, width);
  });
}

}  // namespace

#define FOR_EACH_NUMBER(DEFINE) DEFINE(f32, float, FloatWeights) DEFINE(b16, BFloat16, PairWeights)

#define DEFINE(NAME, T, WEIGHTS)                                                                  \
  void rms_norm_##NAME(Fork fork, int64_t count, const T* x, const float* weight, T* out,         \
                       int64_t tokens, int64_t heads, int64_t width, int64_t token_stride,        \
                       int64_t head_stride, float eps, int64_t rounds) {                          \
    rms_norm<T>({fork, count}, x, weight, out, tokens, heads, width, token_stride, head_stride,   \
                eps, rounds != 0);                                                                \
  }                                                                                               \
  void add_rms_norm_##NAME(Fork fork, int64_t count, const T* x, const T* other,                  \
                           const float* weight, T* sum, T* out, int64_t rows, int64_t width,      \
                           float eps, int64_t rounds) {                                           \
    add_rms_norm<T>({fork, count}, x, other, weight, sum, out, rows, width, eps, rounds != 0);    \
  }                                                                                               \
  void rotate_##NAME(Fork fork, int64_t count, const T* x, const T* cosines, const T* sines,      \
                     T* out, int64_t tokens, int64_t heads, int64_t width, int64_t token_stride,  \
                     int64_t head_stride, int64_t angle_stride) {                                 \
    rotate<T>({fork, count}, x, cosines, sines, out, tokens, heads, width, token_stride,          \
              head_stride, angle_stride);                                                         \
  }                                                                                               \
  void silu_mul_##NAME(Fork fork, int64_t count, const T* x, const T* up, T* out, int64_t rows,   \
                       int64_t width, int64_t gate_stride, int64_t up_stride) {                   \
    gate<Silu, T>({fork, count}, x, up, out, rows, width, gate_stride, up_stride);                \
  }                                                                                               \
  void gelu_tanh_mul_##NAME(Fork fork, int64_t count, const T* x, const T* up, T* out,            \
                            int64_t rows, int64_t width, int64_t gate_stride,                     \
                            int64_t up_stride) {                                                  \
    gate<GeluTanh, T>({fork, count}, x, up, out, rows, width, gate_stride, up_stride);            \
  }                                                                                               \
  void chain_##NAME(const ChainCall* call) { run_chain<WEIGHTS>(*call); }

extern "C" {
int kvrelay_op_bytes() { return sizeof(Op); }
FOR_EACH_NUMBER(DEFINE)
}
