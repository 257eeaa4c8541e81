// The draw of a token: the first of the largest logit + temperature x noise. `engine/sampling/gumbel.py` defines
// it; this gives the same bits, so no product may be contracted with a sum.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "lanes.h"
#include "team.h"
#include "truncation.h"

namespace {

constexpr int kBlocks = 16;  // counters that go through Philox together
constexpr int kGroup = 4 * kBlocks;  // their ids: word w of block b is id 16 w + b
constexpr float kMostNoise = 22.19f;

struct Words {
  uint32_t of[kGroup];
};

#if defined(__AVX512F__)
constexpr int kWide = 8;
#elif defined(__AVX2__)
constexpr int kWide = 4;
#else
constexpr int kWide = 2;
#endif
constexpr int kWides = kBlocks / kWide;

// A word in the low half of each lane; what is in the high half does not matter.
typedef uint64_t Wide __attribute__((vector_size(kWide * 8)));
typedef uint32_t Narrow __attribute__((vector_size(kWide * 4)));

inline Wide times(Wide words, uint32_t factor) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)words, _mm_set1_epi64x(factor));
#else
  for (int i = 0; i < kWide; ++i) words[i] = uint64_t(uint32_t(words[i])) * factor;
  return words;
#endif
}

// Philox4x32-10 of the counters (block, index, choice, 0) of a group's 16 blocks.
inline void philox(const uint32_t* key, uint32_t group, Words& words) {
  Wide state[4][kWides];
  for (int v = 0; v < kWides; ++v) {
    for (int i = 0; i < kWide; ++i) state[0][v][i] = group * kBlocks + uint32_t(v * kWide + i);
    state[1][v] = Wide{} + key[3];
    state[2][v] = Wide{} + key[2];
    state[3][v] = Wide{};
  }
  for (uint32_t round = 0; round < 10; ++round) {
    const uint32_t key0 = key[0] + round * 0x9E3779B9u, key1 = key[1] + round * 0xBB67AE85u;
    for (int v = 0; v < kWides; ++v) {
      const Wide wide0 = times(state[0][v], 0xD2511F53u), wide1 = times(state[2][v], 0xCD9E8D57u);
      state[0][v] = (wide1 >> 32) ^ state[1][v] ^ key0;
      state[1][v] = wide1;
      state[2][v] = (wide0 >> 32) ^ state[3][v] ^ key1;
      state[3][v] = wide0;
    }
  }
  for (int w = 0; w < 4; ++w)
    for (int v = 0; v < kWides; ++v) {
      const Narrow low = __builtin_convertvector(state[w][v], Narrow);
      store(words.of + w * kBlocks + v * kWide, low);
    }
}

inline int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The middle of one of 2^31 parts of [0, 1].
inline float uniform(int32_t half) { return (float(half) + 0.5f) * 0x1p-31f; }

// log((1 + r) 2^e), r within [sqrt(1/2) - 1, sqrt(2) - 1].
inline float log_of(float r, float e) {
  const float square = r * r;
  float tail = 0.08700364083051682f;
  tail = tail * r + -0.14267493784427643f;
  tail = tail * r + 0.1491478979587555f;
  tail = tail * r + -0.1657758355140686f;
  tail = tail * r + 0.19963061809539795f;
  tail = tail * r + -0.2500133812427521f;
  tail = tail * r + 0.3333390951156616f;
  tail = tail * r * square + e * -0.00021219444170128554f;
  return (r + (tail - square * 0.5f)) + e * 0.693359375f;
}

struct Parts {
  float r, e;
};

inline Parts parts_of(float value) {
  const int32_t bits = bits_of(value);
  const int32_t exponent = (bits - 0x3F3504F3) >> 23;
  return {float_of(bits - exponent * (1 << 23)) - 1.0f, float(exponent)};
}

float noise(uint32_t word) {
  const int32_t half = int32_t(word >> 1);
  const float near = uniform(half);
  const Parts far = parts_of(uniform(0x7FFFFFFF - half));
  const float wait = near < 0.25f ? -log_of(-near, 0.0f) : -log_of(far.r, far.e);
  const Parts parts = parts_of(wait);
  return -log_of(parts.r, parts.e);
}

struct Best {
  float score = -std::numeric_limits<float>::infinity();
  int64_t id = 0;
};

// At least `noise` of each: -log(-log(1 - x)) <= -log(x), and log2(1 + f) >= f.
inline Floats noise_limit(Ints words) {
  const Ints halves = (words >> 1) & 0x7FFFFFFF;
  const Floats x = (__builtin_convertvector(halves, Floats) + 0.5f) * 0x1p-31f;
  return 88.0306f - __builtin_convertvector((Ints)x, Floats) * 8.262958e-8f;
}

// Whether any of the group could be better if it got the largest noise there is.
inline bool may_win(const float* logits, float temperature, float best) {
  Ints better = {};
  for (int at = 0; at < kGroup; at += kLanes)
    better |= load<Floats>(logits + at) + temperature * kMostNoise > best;
  return any(better);
}

inline void draw_group(const float* logits, int64_t first, float temperature, const Words& words,
                       Best& best) {
  Ints may[kGroup / kLanes], better = {};
  for (int at = 0; at < kGroup; at += kLanes) {
    const Floats limit = temperature * noise_limit(load<Ints>(words.of + at));
    better |= may[at / kLanes] = load<Floats>(logits + at) + limit > best.score;
  }
  if (!any(better)) return;
  for (int i = 0; i < kGroup; ++i) {
    if (may[i / kLanes][i % kLanes] == 0) continue;
    const float score = logits[i] + temperature * noise(words.of[i]);
    if (score > best.score) best = {score, first + i};
  }
}

int64_t draw_row(const float* logits, int64_t vocab, const uint32_t* key, float temperature) {
  Best best;
  Words words;
  float rest[kGroup];
  for (int64_t first = 0; first < vocab; first += kGroup) {
    const float* mine = logits + first;
    if (vocab - first < kGroup) {
      for (float& one : rest) one = -std::numeric_limits<float>::infinity();
      std::memcpy(rest, mine, size_t(vocab - first) * sizeof(float));
      mine = rest;
    }
    if (!may_win(mine, temperature, best.score)) continue;
    philox(key, uint32_t(first / kGroup), words);
    draw_group(mine, first, temperature, words, best);
  }
  return best.id;
}

inline void mask_word(const float* logits, uint32_t allowed, int count, float* out) {
  const float none = -std::numeric_limits<float>::infinity();
  if (allowed == 0)
    for (int i = 0; i < count; ++i) out[i] = none;
  else if (allowed == ~0u)
    for (int i = 0; i < count; ++i) out[i] = logits[i];
  else
    for (int i = 0; i < count; ++i) out[i] = allowed >> i & 1 ? logits[i] : none;
}

}  // namespace

// `keys` [rows][4]: seed's low and high word, choice, index. `logits` [rows][vocab], fp32, dense.
extern "C" void kvrelay_draw(Fork fork, int64_t threads, int64_t rows, int64_t vocab,
                             const float* logits, const uint32_t* keys, const float* temperatures,
                             const Cut* cuts, int64_t* tokens) {
  share(fork, int(threads), int(rows), [&](int row) {
    const float* mine = logits + row * vocab;
    const Cut cut = cuts[row];
    thread_local std::vector<float> kept;
    if (temperatures[row] > 0 && (cut.top_k > 0 || cut.top_p < 1 || cut.min_p > 0)) {
      kept.resize(size_t(vocab));
      Truncation(mine, vocab, temperatures[row], cut).write(kept.data());
      mine = kept.data();
    }
    tokens[row] = draw_row(mine, vocab, keys + row * 4, temperatures[row]);
  });
}

// Copies `logits` [rows][vocab] to `out`; -inf for what a row's bits, the lowest first, don't allow.
// `sources`: of each row its row of `allowed` [][words], or -1: all is allowed.
extern "C" void kvrelay_mask(Fork fork, int64_t threads, int64_t rows, int64_t vocab,
                             const float* logits, const int64_t* sources, const uint32_t* allowed,
                             int64_t words, float* out) {
  share(fork, int(threads), int(rows), [&](int row) {
    const float* mine = logits + row * vocab;
    float* to = out + row * vocab;
    if (sources[row] < 0) {
      std::memcpy(to, mine, size_t(vocab) * sizeof(float));
      return;
    }
    const uint32_t* bits = allowed + sources[row] * words;
    for (int64_t first = 0; first < vocab; first += 32)
      mask_word(mine + first, bits[first / 32], int(std::min<int64_t>(32, vocab - first)), to + first);
  });
}

// What tests compare.
extern "C" void kvrelay_truncate(int64_t vocab, const float* logits, float temperature,
                                 const Cut* cut, float* out) {
  Truncation(logits, vocab, temperature, *cut).write(out);
}

extern "C" void kvrelay_noise(int64_t groups, const uint32_t* key, float* out) {
  Words words;
  for (int64_t group = 0; group < groups; ++group) {
    philox(key, uint32_t(group), words);
    for (uint32_t word : words.of) *out++ = noise(word);
  }
}
