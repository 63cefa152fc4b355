// A square of kLanes rows of kLanes numbers, its rows written as columns.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Exchanges the lanes whose number has the bit kStep with the rows that have it: after all bits, rows are columns.
template <int kStep>
FA_INLINE void transpose_step(Vec (&rows)[kLanes]) {
  IntVec low;
  IntVec high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = (i & kStep) == 0 ? i : kLanes + i - kStep;
    high[i] = (i & kStep) == 0 ? i + kStep : kLanes + i;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if ((r & kStep) != 0) continue;
    const Vec a = rows[r];
    const Vec b = rows[r + kStep];
    rows[r] = __builtin_shuffle(a, b, low);
    rows[r + kStep] = __builtin_shuffle(a, b, high);
  }
  if constexpr (kStep > 1) transpose_step<kStep / 2>(rows);
}

// kLanes keys by kLanes numbers of each: from[j] + d to out[d * kPanel + j].
FA_INLINE void transpose_square(const float* const* from, int64_t d, float* out) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) rows[j] = load(from[j] + d);
  transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + (d + i) * kPanel, rows[i]);
}

}  // namespace fa::FA_ISA
