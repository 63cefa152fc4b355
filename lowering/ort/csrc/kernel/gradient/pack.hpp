// Copies that the micro-kernel can stream: rows as panels, and rows turned into the columns of panels.
#pragma once

#include "../exp.hpp"
#include "../rows.hpp"
#include "../transpose.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// Number r of `rows` rows, as panels [rows][kPanel]; what lies beyond `size` becomes 0. Adds 0 to `check` for every
// finite number and NaN for others.
FA_INLINE void put_row(const float* row, int64_t size, int64_t rows, int64_t r, float* out, Vec& check) {
  for (int64_t first = 0; first < size; first += kPanel) {
    float* panel = out + first * rows + r * kPanel;
    if (size - first >= kPanel) {
      const Vec a = load(row + first);
      const Vec b = load(row + first + kLanes);
      store(panel, a);
      store(panel + kLanes, b);
      check += (a + b) * 0.0f;
      continue;
    }
    for (int64_t d = 0; d < kPanel; ++d) panel[d] = d < size - first ? row[first + d] : 0.0f;
    check += (load(panel) + load(panel + kLanes)) * 0.0f;
  }
}

FA_INLINE bool all_finite(Vec check) { return sum_lanes(check) == 0; }

// kLanes rows of `depth` numbers as columns [first, first + kLanes) of panels [depth][kPanel].
FA_INLINE void put_columns(const float* const* from, int64_t depth, int64_t first, float* out) {
  const int64_t whole = depth / kLanes * kLanes;
  float* panel = out + first / kPanel * kPanel * depth + first % kPanel;
  for (int64_t d = 0; d < whole; d += kLanes) transpose_square(from, d, panel + d * kPanel);
  for (int64_t d = whole; d < depth; ++d) {
    for (int64_t j = 0; j < kLanes; ++j) panel[d * kPanel + j] = from[j][d];
  }
}

// K and V of keys [first_key, first_key + keys). Tells whether all numbers of K are finite.
static bool pack_block(const Problem& problem, const Sequence& sequence, const Shape& shape, int64_t key_head,
                       int64_t first_key, int64_t keys, const Scratch& s) {
  const float* from[kLanes];
  Vec check{};
  const int64_t stride = larger(shape.columns(), shape.value_columns());
  for (int64_t first = 0; first < blocks_of(keys, kPanel) * kPanel; first += kLanes) {
    // What is beyond repeats the last key; nobody looks at it.
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = smaller(first + j, keys - 1);
      from[j] = key_row(problem, sequence, key_head, first_key + key, s.rows + j * stride);
      if (first + j < keys) put_row(from[j], shape.depth, keys, first + j, s.keys, check);
    }
    put_columns(from, shape.depth, first, s.keys_across);
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = smaller(first + j, keys - 1);
      from[j] = value_row(problem, sequence, key_head, first_key + key, s.rows + j * stride);
    }
    put_columns(from, shape.value_size, first, s.values_across);
  }
  return all_finite(check);
}

FA_INLINE float dot(const float* a, const float* b, int64_t size) {
  Vec sums{};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) sums += load(a + d) * load(b + d);
  float sum = sum_lanes(sums);
  for (; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

FA_INLINE bool is_silent(const Problem& problem, float max, float sum) {
  if (problem.nan_rows == NanRows::nan) return false;
  return problem.nan_rows == NanRows::zero ? is_nan(sum) : max == -kInfinity;
}

// The query rows of a wave, their dO and what else the softmax and its gradient need of them.
static void read_wave(const Gradients& gradients, const Sequence& sequence, const Shape& shape, const Wave& wave,
                      const Scratch& s) {
  const Problem& problem = gradients.problem;
  const int64_t rows = wave.rows();
  const bool filled = problem.mask_value > -kInfinity;  // then no row is empty
  const bool keep_empty = problem.empty_rows != EmptyRows::zero && !filled;
  float* buffer = s.rows + larger(shape.columns(), shape.value_columns());
  for (int64_t begin = 0; begin < rows; begin += kBlockRows) {
    const int64_t count = smaller(kBlockRows, rows - begin);
    Vec query_check{};
    Vec dy_check{};
    for (int64_t r = begin; r < begin + count; ++r) {
      const int64_t head = wave.head_of(r);
      const int64_t i = wave.index_of(r);
      const float* q = query_row(problem, sequence, head, i, s.rows);
      put_row(q, shape.depth, count, r - begin, s.queries + begin * shape.columns(), query_check);
      const int64_t at = sequence.out + head * problem.out.head + i * problem.out.row;
      const float* dy = as_floats(gradients.dy, at, shape.value_size, problem.type, s.rows);
      put_row(dy, shape.value_size, count, r - begin, s.dys + begin * shape.value_columns(), dy_check);
      const float* out = as_floats(problem.out.data, at, shape.value_size, problem.type, buffer);
      s.delta[r] = dot(dy, out, shape.value_size);
      const int64_t statistic =
          sequence.statistics + head * sequence.statistics_head + i * sequence.statistics_row;
      s.max[r] = problem.softmax_max[statistic];
      const float sum = problem.softmax_sum[statistic];
      s.weight[r] = 1.0f / sum;
      s.silent[r] = is_silent(problem, s.max[r], sum);
      s.fill[r] = 0;
      if (filled && !s.silent[r]) {
        s.fill[r] = exp_nonpositive(splat(problem.mask_value - s.max[r]))[0] * s.weight[r];
      }
      s.empty[r] = keep_empty && view_of(problem, sequence, head, i, 0, sequence.key_length).empty();
    }
    s.finite[begin / kBlockRows] = all_finite(query_check);
    s.finite[(kWaveRows + begin) / kBlockRows] = all_finite(dy_check);
  }
}

}  // namespace fa::FA_ISA::grad
