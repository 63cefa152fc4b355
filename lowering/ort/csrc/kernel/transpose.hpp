// A square of kLanes rows of kLanes numbers, its rows written as columns.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Exchanges the lanes whose number has the bit kStep with the rows that have it: after all bits, rows are columns.
template <int kStep>
FA_INLINE void transpose_step(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) {
    if ((r & kStep) != 0) continue;
    const Vec a = rows[r];
    const Vec b = rows[r + kStep];
    rows[r] = shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane : kLanes + lane - kStep; });
    rows[r + kStep] = shuffle(a, b, [](int lane) { return (lane & kStep) == 0 ? lane + kStep : kLanes + lane; });
  }
  if constexpr (kStep > 1) transpose_step<kStep / 2>(rows);
}

// kLanes rows by kLanes numbers of each: from[j] + d to out[i * out_row + j], i counting from d.
FA_INLINE void transpose_square(const float* const* from, int64_t d, float* out, int64_t out_row = kPanel) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) rows[j] = load(from[j] + d);
  transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + i * out_row, rows[i]);
}

}  // namespace fa::FA_ISA
