// The k best of many scores, sorted, without sorting all scores.
//
// Scores become integers of the same order. Three histograms of their leading bits find the k-th best score. One pass
// collects the scores above it and the first ones equal to it, and only these are sorted, by radix. So ties go to the key
// that comes first. +0 and -0 are equal. Every NaN has the order `nan`, whatever its bits: kNanFirst or kNanLast, which no
// number has.
#pragma once

#include "../simd.hpp"

namespace fa::FA_ISA {

inline constexpr uint32_t kNanFirst = 0xffffffffu, kNanLast = 0;

FA_INLINE uint32_t order_of(float score, uint32_t nan) {
  if (score != score) return nan;
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Candidate {
  uint32_t order;
  int32_t place;
};

// The order of the k-th best of `count` > k scores. `equal` becomes how many scores of that order belong to the best k.
static uint32_t threshold_order(const float* scores, int64_t count, int64_t k, uint32_t nan, int64_t& equal) {
  static constexpr int kShift[] = {21, 10, 0};
  static constexpr int kBits[] = {11, 11, 10};
  uint32_t prefix = 0, mask = 0;
  int64_t left = k;
  for (int pass = 0; pass < 3; ++pass) {
    int32_t counts[2048] = {};
    const uint32_t digits = (1u << kBits[pass]) - 1;
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t order = order_of(scores[j], nan);
      if ((order & mask) == prefix) ++counts[order >> kShift[pass] & digits];
    }
    uint32_t digit = digits;
    while (counts[digit] < left) left -= counts[digit--];
    prefix |= digit << kShift[pass];
    mask |= digits << kShift[pass];
  }
  equal = left;
  return prefix;
}

// Writes the places of the best min(k, count) scores to `chosen`, best first, and returns how many they are. `spare` is as
// long.
static int64_t top_k(const float* scores, int64_t count, int64_t k, uint32_t nan, Candidate* chosen, Candidate* spare) {
  int64_t found = 0, equal = 0;
  uint32_t last = 0;
  const bool all = count <= k;
  if (!all) last = threshold_order(scores, count, k, nan, equal);
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t order = order_of(scores[j], nan);
    if (!all && (order < last || (order == last && equal-- <= 0))) continue;
    chosen[found++] = {order, static_cast<int32_t>(j)};
  }
  // Radix sort: 8 bits at a time, stable, the greatest first. An even number of passes ends in the array where it began.
  for (int shift = 0; shift < 32; shift += 8) {
    int32_t starts[256] = {};
    for (int64_t n = 0; n < found; ++n) ++starts[chosen[n].order >> shift & 255];
    int32_t at = 0;
    for (int digit = 255; digit >= 0; --digit) {
      const int32_t many = starts[digit];
      starts[digit] = at;
      at += many;
    }
    for (int64_t n = 0; n < found; ++n) spare[starts[chosen[n].order >> shift & 255]++] = chosen[n];
    Candidate* swap = chosen;
    chosen = spare;
    spare = swap;
  }
  return found;
}

}  // namespace fa::FA_ISA
