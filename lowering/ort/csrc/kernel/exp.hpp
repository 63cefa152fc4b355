// exp of a vector. Each argument is at most 0 (a score minus the largest score of its row) or NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, so exp(x) = 2^n p(r). p is the minimax polynomial of degree 6 for the relative error
// (1.9e-9, far below float rounding), found with the Remez exchange. ln 2 is split in two numbers, so that n ln 2 loses
// nothing. Below -126 ln 2, where 2^n would be subnormal, the result is 0. A NaN stays a NaN.
//
// Measured: degree 5 (7.5e-8) saves one multiplication in ten, but makes exp(0) differ from 1.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

FA_INLINE Vec exp_nonpositive(Vec x) {
  constexpr float kLowest = -87.3365f;     // -126 ln 2
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec low = splat(kLowest);
  const Vec clamped = maximum(low, x);
  const Vec shifted = clamped * 1.44269504f + kRounder;
  const Vec n = shifted - kRounder;
  const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = r * 1.3836846e-3f + 8.3748158e-3f;
  p = p * r + 4.16682256e-2f;
  p = p * r + 1.66664202e-1f;
  p = p * r + 4.99999921e-1f;
  p = p * r + 1.00000004f;
  p = p * r + 1.0f;
  // The shift drops the upper bits, which are those of kRounder. What remains is n, at the place of the exponent.
  const Vec power = (Vec)(((BitVec)shifted << 23) + 0x3f800000u);
  return clear_where(clamped == low, p * power);
}

FA_INLINE Vec exp2_nonpositive(Vec x) { return Isa::exp2_nonpositive(x); }

inline constexpr float kLog2E = 1.44269504f;

}  // namespace fa::FA_ISA
