// The matrix product both halves of attention are made of: a tile of kTileRows x kPanel sums held in
// registers while k runs, C = A B or C = diag(alpha) C + A B.
//
// B is a packed panel, kPanel consecutive floats for each k. A is read one number at a time and
// broadcast; where it lies is a template argument, so that all rows are reached from one pointer.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

template <int kRows, int kRowStep, int kDepthStep, bool kAccumulate>
FA_INLINE void multiply_rows(const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
                             const float* alpha) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = kAccumulate ? load(c + r * c_row) * alpha[r] : Vec{};
    sum[r][1] = kAccumulate ? load(c + r * c_row + kLanes) * alpha[r] : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b0 = load(b);
    const Vec b1 = load(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec x = splat(a[r * kRowStep]);
      sum[r][0] += x * b0;
      sum[r][1] += x * b1;
    }
    a += kDepthStep;
    b += kPanel;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(c + r * c_row, sum[r][0]);
    store(c + r * c_row + kLanes, sum[r][1]);
  }
}

// `rows` from 1 to kTileRows: each count is a loop of its own, so that a short last tile does not pay
// for the missing rows.
template <int kRowStep, int kDepthStep, bool kAccumulate, int kRows = kTileRows>
static void multiply(int64_t rows, const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
                     const float* alpha) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply<kRowStep, kDepthStep, kAccumulate, kRows - 1>(rows, a, b, depth, c, c_row, alpha);
      return;
    }
  }
  multiply_rows<kRows, kRowStep, kDepthStep, kAccumulate>(a, b, depth, c, c_row, alpha);
}

}  // namespace fa::FA_ISA
