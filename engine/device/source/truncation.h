// top_k, top_p and min_p of a row, as `engine/sampling/truncation.py` defines them: what they cut becomes -inf.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"

inline bool any(Ints flags) {
  uint64_t parts[kLanes / 2], all = 0;
  std::memcpy(parts, &flags, sizeof parts);
  for (uint64_t part : parts) all |= part;
  return all != 0;
}

struct Cut {
  float top_k, top_p, min_p;  // 0, 1, 0: nothing is cut
};

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The ids that may be kept are found by a limit that all of them reach; only these are ranked.
struct Truncation {
  const float* logits;
  int64_t vocab;
  float temperature, most;
  Cut cut;

  Truncation(const float* logits, int64_t vocab, float temperature, Cut cut)
      : logits(logits), vocab(vocab), temperature(temperature), most(kNever), cut(cut) {
    Floats top = all(kNever);
    for_each([&](Floats values) { top = larger(top, values); });
    most = largest_of(top);
  }

  void write(float* out) const {
    std::fill(out, out + vocab, kNever);
    if (most == kNever) return;
    double mass = cut.top_k == 0 && cut.top_p < 1 ? total() : 0;
    std::vector<uint64_t> ids = reaching(limit(mass));
    if (cut.top_k > 0 && size_t(cut.top_k) < ids.size()) {
      first(ids, 0, size_t(cut.top_k));
      ids.resize(size_t(cut.top_k));
    }
    if (cut.top_k > 0 && cut.top_p < 1)
      for (uint64_t key : ids) mass += weight(key);
    const size_t count = ranked(ids, cut.top_p < 1 ? cut.top_p * mass : HUGE_VAL);
    for (size_t i = 0; i < count; ++i) out[id_of(ids[i])] = logits[id_of(ids[i])];
  }

 private:
  // Lanes behind the last id are -inf.
  template <class Do>
  void for_each(Do run) const {
    int64_t at = 0;
    for (; at + kLanes <= vocab; at += kLanes) run(load<Floats>(logits + at));
    if (at == vocab) return;
    Floats rest = all(kNever);
    std::memcpy(&rest, logits + at, size_t(vocab - at) * sizeof(float));
    run(rest);
  }

  float weight(uint64_t key) const {
    return std::exp((logits[id_of(key)] - most) / temperature);
  }

  // Of all weights.
  float total() const {
    Floats sum = {};
    const float factor = 1.4426950408889634f / temperature;
    for_each([&](Floats values) {
      sum += exp2<false>(larger((values - most) * factor, all(-126.0f)));
    });
    return sum_of(sum);
  }

  // A logit that all kept ones reach; and all that top_k keeps, if top_p's share is of these.
  float limit(double mass) const {
    float found = kNever;
    if (cut.top_k > 0) found = limit_of_top_k();
    if (cut.top_k > 0 && cut.top_p < 1) return found;
    if (cut.min_p > 0)
      found = std::max(found, most + temperature * (std::log(cut.min_p) - 0.01f));
    if (cut.top_p >= 1) return found;
    const float tail = (1 - cut.top_p) * float(mass) / (2 * float(vocab));  // all ids of less are cut
    return std::max(found, most + temperature * std::log(tail));
  }

  // Of so many parts of the row, top_k have a largest one that reaches it.
  float limit_of_top_k() const {
    std::vector<float> best(size_t(vocab / kLanes), kNever);
    const size_t last = size_t(cut.top_k) - 1;
    if (last >= best.size()) return kNever;
    for (size_t i = 0; i < best.size(); ++i)
      best[i] = largest_of(load<Floats>(logits + i * kLanes));
    std::nth_element(best.begin(), best.begin() + last, best.end(), std::greater<float>());
    return best[last];
  }

  // The largest logit has the largest key, and of equals the smallest id.
  static uint64_t key_of(float logit, int64_t id) {
    int32_t bits;
    logit += 0.0f;  // of -0 and 0, which are equal, the same key
    std::memcpy(&bits, &logit, sizeof bits);
    const uint32_t order = bits < 0 ? ~uint32_t(bits) : uint32_t(bits) | 0x80000000u;
    return uint64_t(order) << 32 | (0xFFFFFFFFu - uint32_t(id));
  }

  static int64_t id_of(uint64_t key) { return 0xFFFFFFFFu - uint32_t(key); }

  std::vector<uint64_t> reaching(float limit) const {
    thread_local std::vector<uint32_t> found;
    found.resize(size_t(vocab) + kLanes);
    uint32_t *end = found.data(), first = 0;
    for_each([&](Floats values) {
      const Ints hits = values >= limit & values > kNever;
      if (any(hits))
        for (int lane = 0; lane < kLanes; ++lane) {
          *end = first + uint32_t(lane);
          end -= hits[lane];  // a hit is -1
        }
      first += kLanes;
    });
    std::vector<uint64_t> keys;
    keys.reserve(size_t(end - found.data()));
    for (const uint32_t* id = found.data(); id != end; ++id) keys.push_back(key_of(logits[*id], *id));
    return keys;
  }

  // Puts what ranks in [from, to) there, in any order.
  static void first(std::vector<uint64_t>& ids, size_t from, size_t to) {
    if (to < ids.size())
      std::nth_element(ids.begin() + from, ids.begin() + to, ids.end(), std::greater<uint64_t>());
  }

  // How many of the ids are kept, which are in order then; the nucleus has `share` of the weights.
  size_t ranked(std::vector<uint64_t>& ids, double share) const {
    double before = 0;
    for (size_t from = 0, to; from < ids.size(); from = to) {
      to = std::min(ids.size(), from + std::max<size_t>(128, 3 * from));
      first(ids, from, to);
      std::sort(ids.begin() + from, ids.begin() + to, std::greater<uint64_t>());
      for (size_t i = from; i < to; ++i) {
        const float own = weight(ids[i]);
        if (i > 0 && (before >= share || own < cut.min_p)) return i;
        before += own;
      }
    }
    return ids.size();
  }
};
