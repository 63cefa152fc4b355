// The matrix product that the five of the gradient are made of: a tile of kTileRows x kPanel sums held in registers
// while k runs, C = A B or C += A B. B is a packed panel; numbers of A are read one at a time and broadcast.
//
// Where A lies is a template argument: rows kRowStep apart, one k to the next kDepthStep. A's depth may be cut into
// segments that lie `jump` apart, which is how a row lies in panels: so one packed copy of the query rows serves both
// as the A of Q K^T and as the B of dS^T Q.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA::grad {

struct Depth {
  int64_t count;
  int64_t segment;
  int64_t jump;
};

template <int kRows, int kRowStep, int kDepthStep, bool kAdd>
FA_INLINE void multiply_rows(const float* a, const float* b, Depth depth, float* c, int64_t c_row) {
  Vec sum[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = kAdd ? load(c + r * c_row) : Vec{};
    sum[r][1] = kAdd ? load(c + r * c_row + kLanes) : Vec{};
  }
  for (int64_t left = depth.count; left > 0; left -= depth.segment) {
    const float* x = a;
    for (int64_t k = smaller(left, depth.segment); k > 0; --k) {
      const Vec b0 = load(b);
      const Vec b1 = load(b + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec y = splat(x[r * kRowStep]);
        sum[r][0] += y * b0;
        sum[r][1] += y * b1;
      }
      x += kDepthStep;
      b += kPanel;
    }
    a += depth.jump;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    store(c + r * c_row, sum[r][0]);
    store(c + r * c_row + kLanes, sum[r][1]);
  }
}

// `rows` from 1 to kTileRows: each count is a loop of its own.
template <int kRowStep, int kDepthStep, bool kAdd, int kRows = kTileRows>
static void multiply(int64_t rows, const float* a, const float* b, Depth depth, float* c, int64_t c_row) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply<kRowStep, kDepthStep, kAdd, kRows - 1>(rows, a, b, depth, c, c_row);
      return;
    }
  }
  multiply_rows<kRows, kRowStep, kDepthStep, kAdd>(a, b, depth, c, c_row);
}

}  // namespace fa::FA_ISA::grad
