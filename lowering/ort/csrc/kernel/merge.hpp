// Rows whose keys were cut into chunks: each chunk leaves its largest scores, sums of exponentials and sums of values,
// and the merge shrinks them to the largest score of all, as the online softmax does from block to block.
//
// A head's partial results are, chunk by chunk: max [rows], total [rows], unit [rows], sums [rows][value_columns].
#pragma once

#include "overflow.hpp"
#include "online_softmax.hpp"

namespace fa::FA_ISA {

FA_INLINE int64_t partial_floats(const Shape& shape, int64_t rows) { return rows * (shape.value_columns() + 3); }

FA_INLINE float* partial_of(const Span& span, int64_t chunk) {
  return span.plan.partial + chunk * partial_floats(span.shape, span.rows());
}

static void put_partial(const Span& span, int64_t chunk) {
  const size_t rows = static_cast<size_t>(span.rows());
  float* out = partial_of(span, chunk);
  __builtin_memcpy(out, span.s.max, rows * sizeof(float));
  __builtin_memcpy(out + rows, span.s.total, rows * sizeof(float));
  __builtin_memcpy(out + 2 * rows, span.s.unit, rows * sizeof(float));
  __builtin_memcpy(out + 3 * rows, span.s.sums, rows * static_cast<size_t>(span.columns()) * sizeof(float));
}

static void merge_partials(const Span& span) {
  const Scratch& s = span.s;
  const int64_t rows = span.rows();
  const int64_t columns = span.columns();
  const int64_t chunks = span.plan.chunks;
  for (int64_t r = 0; r < rows; ++r) {
    float max = -kInfinity;
    int64_t seen = 0;  // chunks in which the row has a score, or the sink
    for (int64_t n = 0; n < chunks; ++n) {
      const float own = partial_of(span, n)[r];
      max = own > max ? own : max;
      seen += own != -kInfinity ? 1 : 0;
    }
    s.max[r] = max;
    float* sums = s.sums + r * columns;
    const auto add_up = [&](float unit) {
      s.total[r] = 0;
      s.unit[r] = unit;
      for (int64_t d = 0; d < columns; ++d) sums[d] = 0;
      for (int64_t n = 0; n < chunks; ++n) {
        const float* from = partial_of(span, n);
        // Alone, a chunk keeps all it has, also a largest score of +inf.
        const bool alone = seen == 1 && from[r] != -kInfinity;
        const float factor = alone ? 1.0f : exp_nonpositive(splat(from[r] - exp_origin(max)))[0];
        const float change = unit / from[2 * rows + r];
        s.total[r] += from[rows + r] * factor;
        for (int64_t d = 0; d < columns; ++d) sums[d] += from[3 * rows + r * columns + d] * change * factor;
      }
    };
    add_up(1.0f);
    if (overflowed(span, r, sums, 1)) add_up(unit_for(span.sequence.key_length));
  }
}

}  // namespace fa::FA_ISA
