// Sums of values that contain inf or NaN, or that overflow although their mean does not. They are computed again with
// guards: a value whose key is masked is not read, and each value is multiplied by overflow_scale, a small power of two.
#pragma once

#include "skinny_product.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"

namespace fa::FA_ISA {

static void rescale_accumulators(const QueryTile& tile) {
  const int64_t columns = tile.columns();
  for (int64_t r = 0; r < tile.rows(); ++r) {
    for (int64_t d = 0; d < columns; ++d) tile.s.acc_rows[r * columns + d] *= tile.s.rescale[r];
  }
}

// Whether a sum of the row is inf or NaN although the sum of its weights is a number. Column d is sums[d * step].
FA_INLINE bool overflowed(const QueryTile& tile, int64_t r, const float* sums, int64_t step) {
  if (is_nan(tile.s.sum[r])) return false;
  float check = 0;  // inf * 0 and NaN * 0 are NaN
  for (int64_t d = 0; d < tile.problem.value_size; ++d) check += sums[d * step] * 0.0f;
  return is_nan(check);
}

// Adds P V of row r and one block. A masked key must not be read, because 0 * inf is NaN. The probability of key j is
// scores[j * key_step], column d of the sums is sums[d * column_step].
static void add_values_guarded(const QueryTile& tile, int64_t r, int64_t first, const float* scores, int64_t key_step,
                               float* sums, int64_t column_step) {
  const View& view = tile.s.views[r];
  const float overflow_scale = tile.s.overflow_scale[r];
  for (int64_t j = view.begin; j < view.end; ++j) {
    if (view.mask != nullptr && view.mask[j] != 0) continue;
    const float* value = tile.value(first + j);
    for (int64_t d = 0; d < tile.problem.value_size; ++d) {
      sums[d * column_step] += scores[j * key_step] * (value[d] * overflow_scale);
    }
  }
}

}  // namespace fa::FA_ISA
