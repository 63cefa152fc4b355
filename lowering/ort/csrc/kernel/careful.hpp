// Sums of values where some value is inf or NaN.
#pragma once

#include "direct.hpp"
#include "span.hpp"

namespace fa::FA_ISA {

static void shrink_sums(const Span& span) {
  const int64_t columns = span.columns();
  for (int64_t r = 0; r < span.rows(); ++r) {
    for (int64_t d = 0; d < columns; ++d) span.s.sums[r * columns + d] *= span.s.shrink[r];
  }
}

// For values that hold inf or NaN: a key that is not attended must not be read, for 0 * inf is NaN.
static void add_values_carefully(const Span& span, int64_t first) {
  for (int64_t r = 0; r < span.rows(); ++r) {
    const View& view = span.s.views[r];
    float* sums = span.s.sums + r * span.columns();
    for (int64_t j = view.begin; j < view.end; ++j) {
      if (view.mask != nullptr && view.mask[j] != 0) continue;
      add_value(span.s.scores[r * kScoreRow + j], span.value(first + j), span.problem.value_size, sums);
    }
  }
}

}  // namespace fa::FA_ISA
