// Merges the results of key splits (split-KV). Each split stores its largest scores, sums of exponentials and sums of
// values. The merge rescales them to the largest score of all, as the online softmax does from block to block.
//
// The results of a head are, split by split: max [rows], sum [rows], overflow_scale [rows], acc_rows
// [rows][padded_value_size].
#pragma once

#include "overflow.hpp"
#include "online_softmax.hpp"

namespace fa::FA_ISA {

FA_INLINE int64_t partial_floats(const Shape& shape, int64_t rows) { return rows * (shape.padded_value_size() + 3); }

FA_INLINE float* partial_at(const QueryTile& tile, int64_t split) {
  return tile.plan.partial + split * partial_floats(tile.shape, tile.rows());
}

// Stores the results of one split.
static void store_partial(const QueryTile& tile, int64_t split) {
  const size_t rows = static_cast<size_t>(tile.rows());
  float* out = partial_at(tile, split);
  __builtin_memcpy(out, tile.s.max, rows * sizeof(float));
  __builtin_memcpy(out + rows, tile.s.sum, rows * sizeof(float));
  __builtin_memcpy(out + 2 * rows, tile.s.overflow_scale, rows * sizeof(float));
  __builtin_memcpy(out + 3 * rows, tile.s.acc_rows, rows * static_cast<size_t>(tile.columns()) * sizeof(float));
}

// Merges the splits into max, sum and acc_rows. A row whose sums overflow is merged again with overflow_scale.
static void merge_partials(const QueryTile& tile) {
  const Scratch& s = tile.s;
  const int64_t rows = tile.rows();
  const int64_t columns = tile.columns();
  const int64_t splits = tile.plan.splits;
  for (int64_t r = 0; r < rows; ++r) {
    float max = -kInfinity;
    int64_t seen = 0;  // splits in which the row has a score, or the sink
    for (int64_t n = 0; n < splits; ++n) {
      const float split_max = partial_at(tile, n)[r];
      max = split_max > max ? split_max : max;
      seen += split_max != -kInfinity ? 1 : 0;
    }
    s.max[r] = max;
    float* sums = s.acc_rows + r * columns;
    const auto add_up = [&](float overflow_scale) {
      s.sum[r] = 0;
      s.overflow_scale[r] = overflow_scale;
      for (int64_t d = 0; d < columns; ++d) sums[d] = 0;
      for (int64_t n = 0; n < splits; ++n) {
        const float* from = partial_at(tile, n);
        // If only one split has scores, its sums are taken as they are: if its largest score is +inf, inf - inf would be NaN.
        const bool alone = seen == 1 && from[r] != -kInfinity;
        const float factor = alone ? 1.0f : exp_nonpositive(splat(from[r] - softmax_origin(max)))[0];
        const float change = overflow_scale / from[2 * rows + r];
        s.sum[r] += from[rows + r] * factor;
        for (int64_t d = 0; d < columns; ++d) sums[d] += from[3 * rows + r * columns + d] * change * factor;
      }
    };
    add_up(1.0f);
    if (overflowed(tile, r, sums, 1)) add_up(overflow_scale_for(tile.sequence.key_length));
  }
}

}  // namespace fa::FA_ISA
