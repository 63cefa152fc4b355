// Transposes squares of kLanes x kLanes floats in registers.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Exchanges lanes and rows whose numbers differ in the bit kStep. After all bits, row i holds what lane i of each row held.
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

// Transposes from[j][d .. d + kLanes) of kLanes rows j: out[i * out_stride + j] = from[j][d + i].
FA_INLINE void transpose_square(const float* const* from, int64_t d, float* out, int64_t out_stride = kPanel) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) rows[j] = load(from[j] + d);
  transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + i * out_stride, rows[i]);
}

}  // namespace fa::FA_ISA
