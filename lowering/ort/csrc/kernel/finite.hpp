// Whether numbers are finite.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Whether `count` numbers are finite.
static bool all_finite(const float* numbers, int64_t count) {
  constexpr int kBeside = 4;  // independent sums, so that none waits for the one before
  Vec checks[kBeside] = {};   // inf * 0 and NaN * 0 are NaN
  int64_t n = 0;
  for (; n + kBeside * kLanes <= count; n += kBeside * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kBeside; ++i) checks[i] += load(numbers + n + i * kLanes) * 0.0f;
  }
  for (; n + kLanes <= count; n += kLanes) checks[0] += load(numbers + n) * 0.0f;
  float check = sum_lanes((checks[0] + checks[1]) + (checks[2] + checks[3]));
  for (; n < count; ++n) check += numbers[n] * 0.0f;
  return check == 0;
}

}  // namespace fa::FA_ISA
