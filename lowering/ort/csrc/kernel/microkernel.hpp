// The matrix product both halves of attention are made of: a tile of kTileRows x kPanel sums held in
// registers while k runs, C = A B or C = diag(alpha) C + A B.
//
// B is a packed panel, kPanel consecutive floats for each k. A is read one number at a time and
// broadcast; where it lies is a template argument, so that all rows are reached from one pointer.
//
// With kPairs the 32 bits of a number of A or B are two bfloat16 that lie one after the other along the depth, which is
// then half as long; their products are added as floats.
#pragma once

#include "pairs.hpp"

namespace fa::FA_ISA {

template <int kRows, int kRowStep, int kDepthStep, bool kAccumulate, bool kPairs>
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
      sum[r][0] = add_products<kPairs>(sum[r][0], a[r * kRowStep], b0);
      sum[r][1] = add_products<kPairs>(sum[r][1], a[r * kRowStep], b1);
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
template <int kRowStep, int kDepthStep, bool kAccumulate, bool kPairs = false, int kRows = kTileRows>
static void multiply(int64_t rows, const float* a, const float* b, int64_t depth, float* c, int64_t c_row,
                     const float* alpha) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply<kRowStep, kDepthStep, kAccumulate, kPairs, kRows - 1>(rows, a, b, depth, c, c_row, alpha);
      return;
    }
  }
  multiply_rows<kRows, kRowStep, kDepthStep, kAccumulate, kPairs>(a, b, depth, c, c_row, alpha);
}

}  // namespace fa::FA_ISA
