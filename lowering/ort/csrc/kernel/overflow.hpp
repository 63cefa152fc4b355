// Sums of values where some value is inf or NaN, or where the values are so large that their sum is not a float although their
// mean is: each value is multiplied by a small power of two first, the unit of the row.
#pragma once

#include "skinny_product.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"

namespace fa::FA_ISA {

static void shrink_sums(const Span& span) {
  const int64_t columns = span.columns();
  for (int64_t r = 0; r < span.rows(); ++r) {
    for (int64_t d = 0; d < columns; ++d) span.s.sums[r * columns + d] *= span.s.shrink[r];
  }
}

// Whether a row has a sum that is inf or NaN although the sum of its weights is a number. `sums` holds its columns, every
// `step` floats.
FA_INLINE bool overflowed(const Span& span, int64_t r, const float* sums, int64_t step) {
  if (is_nan(span.s.total[r])) return false;
  float check = 0;  // inf * 0 and NaN * 0 are NaN
  for (int64_t d = 0; d < span.problem.value_size; ++d) check += sums[d * step] * 0.0f;
  return is_nan(check);
}

// A key that is not attended must not be read, for 0 * inf is NaN. The probability of row r and key j of the block is
// scores[j * key_step], column d of its sums is sums[d * column_step].
static void add_values_carefully(const Span& span, int64_t r, int64_t first, const float* scores, int64_t key_step,
                                 float* sums, int64_t column_step) {
  const View& view = span.s.views[r];
  const float unit = span.s.unit[r];
  for (int64_t j = view.begin; j < view.end; ++j) {
    if (view.mask != nullptr && view.mask[j] != 0) continue;
    const float* value = span.value(first + j);
    for (int64_t d = 0; d < span.problem.value_size; ++d) {
      sums[d * column_step] += scores[j * key_step] * (value[d] * unit);
    }
  }
}

static bool all_finite(const float* numbers, int64_t count) {
  constexpr int kBeside = 4;  // sums, so that none waits for the one before
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
