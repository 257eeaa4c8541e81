// Operations that follow each other, over few rows, by one team. Its layout is mirrored in
// engine/compiled/library.py.
#pragma once

#include <sched.h>

#include "../../device/source/team.h"
#include "product.h"
#include "rows.h"

enum Kind : int32_t { kProduct, kNorm, kAdd, kAddNorm, kRotate, kSilu, kGelu };

// Rows of a buffer: numbers `offset` and on of each, rows `stride` numbers apart.
struct Value {
  int32_t buffer, offset, stride, spare;
};

// A product's `width` is its outputs, `heads` its inputs; `depth` those in a panel, with what is filled
// up. Others' rows are `heads` heads of `width` numbers, `head_stride` apart in `x`, dense in `out`.
struct Op {
  int32_t kind, heads, width, depth, head_stride, rounds;
  float eps;
  Value x, y, z, out, more;
  const void* weight;
  const void* bias;
};

struct Chain {
  const Op* ops;
  const int64_t* starts;  // buffer |-> where its rows begin, times the rows; inputs have memory of their own
  int32_t count, inputs;
};

struct ChainCall {
  const Chain* chain;
  const void* const* inputs;
  void* block;  // all other buffers
  Fork fork;
  int32_t rows, threads;
};

constexpr int kMostOps = 64, kGateColumns = 768;

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A thread that is late finds an operation's pieces taken, and done.
struct alignas(64) Progress {
  int next, done;
};

template <class Weights>
struct Run {
  typedef typename Weights::Number Number;

  const ChainCall& call;
  Progress progress[kMostOps];

  explicit Run(const ChainCall& call) : call(call), progress{} {}

  static void work(void* data) {
    Run& run = *static_cast<Run*>(data);
    for (int i = 0; i < run.call.chain->count; ++i) run.take(run.call.chain->ops[i], run.progress[i]);
  }

 private:
  void take(const Op& op, Progress& progress) {
    const int count = pieces(op);
    int mine = 0;
    for (int piece; (piece = __atomic_fetch_add(&progress.next, 1, __ATOMIC_RELAXED)) < count; ++mine)
      compute(op, piece);
    if (mine > 0) __atomic_fetch_add(&progress.done, mine, __ATOMIC_RELEASE);
    for (int turns = 0; __atomic_load_n(&progress.done, __ATOMIC_ACQUIRE) < count; ++turns)
      turns < 10000 ? rest() : void(sched_yield());
  }

  int halves(const Op& op) const { return (op.width + kHalf - 1) / kHalf; }
  int halves_of_piece(const Op& op) const { return std::max(1, halves(op) / (8 * call.threads)); }
  int gate_pieces(const Op& op) const { return (op.width + kGateColumns - 1) / kGateColumns; }

  int pieces(const Op& op) const {
    switch (op.kind) {
      case kProduct: return (halves(op) + halves_of_piece(op) - 1) / halves_of_piece(op);
      case kSilu:
      case kGelu: return call.rows * gate_pieces(op);
      default: return call.rows;
    }
  }

  Number* at(const Value& value, int row) const {
    const int32_t buffer = value.buffer;
    const Number* base = buffer < call.chain->inputs
                             ? static_cast<const Number*>(call.inputs[buffer])
                             : static_cast<Number*>(call.block) + call.chain->starts[buffer] * call.rows;
    return const_cast<Number*>(base) + value.offset + int64_t(row) * value.stride;
  }

  void compute(const Op& op, int piece) const {
    switch (op.kind) {
      case kProduct: return product(op, piece);
      case kSilu: return gate<Silu>(op, piece);
      case kGelu: return gate<GeluTanh>(op, piece);
      case kRotate: return rotate(op, piece);
      case kAdd: return add_row(at(op.x, piece), at(op.y, piece), at(op.out, piece), op.width);
      case kAddNorm: add_row(at(op.x, piece), at(op.y, piece), at(op.more, piece), op.width);
    }
    norm(op, op.kind == kAddNorm ? op.more : op.x, piece);
  }

  void product(const Op& op, int piece) const {
    constexpr int kNumbers = sizeof(typename Weights::Unit) / sizeof(Number);
    const Product<Weights> product{at(op.x, 0), at(op.out, 0), op.x.stride, op.out.stride,
                                   static_cast<const typename Weights::Unit*>(op.weight),
                                   static_cast<const Number*>(op.bias), op.heads / kNumbers,
                                   op.depth / kNumbers, call.rows, op.width};
    const int size = halves_of_piece(op);
    product.compute(piece * size, std::min(halves(op), (piece + 1) * size));
  }

  void norm(const Op& op, const Value& source, int row) const {
    for (int head = 0; head < op.heads; ++head)
      norm_row(at(source, row) + head * op.head_stride, static_cast<const float*>(op.weight),
               at(op.out, row) + head * op.width, op.width, op.eps, op.rounds != 0);
  }

  void rotate(const Op& op, int row) const {
    for (int head = 0; head < op.heads; ++head)
      rotate_row(at(op.x, row) + head * op.head_stride, at(op.y, row), at(op.z, row),
                 at(op.out, row) + head * op.width, op.width);
  }

  template <class Activation>
  void gate(const Op& op, int piece) const {
    const int row = piece / gate_pieces(op), from = piece % gate_pieces(op) * kGateColumns;
    gate_row<Activation>(at(op.x, row) + from, at(op.y, row) + from, at(op.out, row) + from,
                         std::min(kGateColumns, op.width - from));
  }
};

template <class Weights>
void run_chain(const ChainCall& call) {
  Run<Weights> run(call);
  if (call.fork != nullptr && call.threads > 1)
    call.fork(&Run<Weights>::work, &run, unsigned(call.threads), 0);
  else
    Run<Weights>::work(&run);
}
