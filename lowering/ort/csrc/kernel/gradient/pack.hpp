// Copies that the micro-kernel reads: rows, rows transposed into panels, and, for products of pairs, interleaved rows.
#pragma once

#include "../bias.hpp"
#include "../prefetch.hpp"
#include "../exp.hpp"
#include "../rows.hpp"
#include "../stored.hpp"
#include "../transpose.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// The first and the second bfloat16 of each lane as floats.
FA_INLINE Vec lower_of(Vec pairs) { return (Vec)((BitVec)pairs << 16); }
FA_INLINE Vec upper_of(Vec pairs) { return (Vec)((BitVec)pairs & 0xffff0000u); }

// Copies `count` floats or pairs to `out` and fills up with 0 to `room`, a multiple of vectors. Adds 0 to `check` for every
// finite number and NaN for others.
template <bool kPairs>
FA_INLINE void copy_row(const float* row, int64_t count, int64_t room, float* out, Vec& check) {
  for (int64_t d = 0; d < room; d += kLanes) {
    const Vec x = d + kLanes <= count ? load(row + d) : StoredFloats::load_partial(row + d, larger(0, count - d));
    store(out + d, x);
    check += kPairs ? lower_of(x) * 0.0f + upper_of(x) * 0.0f : x * 0.0f;
  }
}

FA_INLINE bool all_finite(Vec check) { return sum_lanes(check) == 0; }

// Interleaves two rows of pairs: one line of [number][2], twice as long as each row.
FA_INLINE void interleave_rows(const float* even, const float* odd, int64_t room, float* out) {
  for (int64_t d = 0; d < room; d += kLanes) {
    Vec low;
    Vec high;
    interleave(load(even + d), odd == nullptr ? Vec{} : load(odd + d), low, high);
    store(out + 2 * d, low);
    store(out + 2 * d + kLanes, high);
  }
}

// `count` numbers as operands of the products.
template <bool kPairs>
FA_INLINE const float* operand_row(const Problem& problem, const void* data, int64_t at, int64_t count, float* buffer) {
  return kPairs ? pairs_at(data, at, count, buffer) : as_floats(data, at, count, problem.type, buffer);
}

// Transposes kLanes rows of `count` floats, filled up to vectors, into columns [first, first + kLanes) of panels.
FA_INLINE void transpose_rows(const float* rows, int64_t row, int64_t count, int64_t first, float* out) {
  const float* from[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) from[j] = rows + j * row;
  float* panel = out + first / kPanel * kPanel * count + first % kPanel;
  for (int64_t d = 0; d < count; d += kLanes) transpose_square(from, d, panel + d * kPanel);
}

// Packs K and V of keys [first_key, first_key + keys): K as rows and transposed, V transposed. Returns whether all of K is
// finite.
template <bool kPairs>
static bool pack_block(const Problem& problem, const Sequence& sequence, const Shape& shape, int64_t key_head,
                       int64_t first_key, int64_t keys, const Scratch& s) {
  Vec check{};
  Vec unchecked{};
  const int64_t key_start = sequence.key + key_head * problem.key.head;
  const int64_t value_start = sequence.value + key_head * problem.value.head;
  const int64_t room = shape.depth_padded();
  float* buffer = s.row_buffer + kLanes * larger(shape.line(), shape.value_line());
  for (int64_t first = 0; first < ceil_div(keys, kPanel) * kPanel; first += kLanes) {
    float* rows = kPairs ? s.row_buffer : s.key_lines + first * shape.line();
    const int64_t row = kPairs ? shape.row() : shape.line();
    // Rows beyond the last key repeat it, unused.
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = first_key + smaller(first + j, keys - 1);
      prefetch_row(problem.key, problem.type, key_start, key + kPrefetchDistance, problem.head_size);
      const float* from = kPairs ? key_pairs(problem, sequence, key_head, key, buffer)
                                 : key_row(problem, sequence, key_head, key, buffer);
      copy_row<kPairs>(from, shape.depth(), kPairs ? room : shape.columns(), rows + j * row, check);
    }
    transpose_rows(rows, row, room, first, s.keys_transposed);
    for (int64_t j = 0; kPairs && j < kLanes; j += 2) {
      const float* odd = first + j + 1 < keys ? rows + (j + 1) * row : nullptr;
      interleave_rows(rows + j * row, odd, room, s.key_lines + (first + j) / 2 * shape.line());
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = first_key + smaller(first + j, keys - 1);
      prefetch_row(problem.value, problem.type, value_start, key + kPrefetchDistance, problem.value_size);
      float* out = s.row_buffer + j * shape.value_row();
      const float* from = operand_row<kPairs>(problem, problem.value.data, value_start + key * problem.value.row,
                                              shape.value_size, buffer);
      copy_row<kPairs>(from, shape.value_depth(), shape.value_depth_padded(), out, unchecked);
    }
    transpose_rows(s.row_buffer, shape.value_row(), shape.value_depth_padded(), first, s.values_transposed);
  }
  return all_finite(check);
}

// The dot product of rows that are filled up to vectors.
template <bool kPairs>
FA_INLINE float dot(const float* a, const float* b, int64_t count) {
  Vec sums{};
  for (int64_t d = 0; d < count; d += kLanes) sums = add_products<kPairs>(sums, load(a + d), load(b + d));
  return sum_lanes(sums);
}

// exp(score - softmax_max) of a row. A score counts as softmax_max at most, so that P never exceeds 1 / softmax_sum.
// Statistics of another library may differ by their rounding.
FA_INLINE Vec probability(Vec score, float max) {
  return exp2_nonpositive(minimum(Vec{}, (score - max) * kLog2E));
}

FA_INLINE bool is_zeroed(const Problem& problem, float max, float sum) {
  if (problem.nan_rows == NanRows::nan) return false;
  return problem.nan_rows == NanRows::zero ? is_nan(sum) : max == -kInfinity;
}

// Reads the statistics of a chunk's query rows, and computes what the probabilities of masked keys need. No row is packed yet.
static void load_statistics(const Gradients& gradients, const Sequence& sequence, const QueryChunk& chunk, const Scratch& s) {
  const Problem& problem = gradients.problem;
  const bool has_masked_p = problem.mask_value > -kInfinity || problem.masked_bias;  // then no row is empty
  const bool shared_bias = rows_share_bias(problem, sequence);
  float masked_score = problem.mask_value;
  int64_t score_head = -1;  // the head that the masked score was computed for
  const bool keep_empty = problem.empty_rows != EmptyRows::zero && !has_masked_p;
  for (int64_t r = 0; r < chunk.rows(); ++r) {
    const int64_t head = chunk.head_of(r);
    const int64_t i = chunk.index_of(r);
    const int64_t statistic = sequence.statistics + head * sequence.statistics_head + i * sequence.statistics_row;
    s.max[r] = problem.softmax_max[statistic];
    const float sum = problem.softmax_sum[statistic];
    s.weight[r] = 1.0f / sum;
    s.zeroed[r] = is_zeroed(problem, s.max[r], sum);
    s.masked_p[r] = 0;
    if (has_masked_p && !s.zeroed[r]) {
      if (problem.masked_bias && !(shared_bias && head == score_head)) {
        masked_score = masked_score_bound<kBlockKeys>(problem, sequence, head, i, s.row_buffer);
        score_head = head;
      }
      s.masked_p[r] = is_nan(masked_score) ? masked_score : probability(splat(masked_score), s.max[r])[0] * s.weight[r];
    }
    s.empty[r] = keep_empty && view_of(problem, sequence, head, i, 0, sequence.key_length).empty();
  }
  for (int64_t n = 0; n < kChunkBlocks; ++n) s.packed[n] = 0;
}

// dO has the layout of the result.
FA_INLINE Strided dy_rows(const Gradients& gradients) {
  Strided rows = gradients.problem.out;
  rows.data = const_cast<void*>(gradients.dy);
  return rows;
}

// Packs query rows [begin, end) of a chunk and their dO, and computes rowsum(dO O).
template <bool kPairs>
static void pack_rows(const Gradients& gradients, const Sequence& sequence, const Shape& shape, const QueryChunk& chunk,
                      int64_t begin, int64_t end, const Scratch& s) {
  const Problem& problem = gradients.problem;
  const Strided dys = dy_rows(gradients);
  float* out_row = s.row_buffer;
  float* buffer = s.row_buffer + larger(shape.line(), shape.value_line());
  const int64_t room = kPairs ? shape.depth_padded() : shape.columns();
  const int64_t value_room = kPairs ? shape.value_depth_padded() : shape.value_columns();
  Vec query_check{};
  Vec dy_check{};
  Vec unchecked{};
  for (int64_t r = begin; r < end; ++r) {
    const int64_t head = chunk.head_of(r);
    const int64_t i = chunk.index_of(r);
    const int64_t out_start = sequence.out + head * problem.out.head;
    const int64_t at = out_start + i * problem.out.row;
    prefetch_row(problem.query, problem.type, sequence.query + head * problem.query.head, i + kPrefetchDistance,
                 problem.head_size);
    prefetch_row(problem.out, problem.type, out_start, i + kPrefetchDistance, shape.value_size);
    prefetch_row(dys, problem.type, out_start, i + kPrefetchDistance, shape.value_size);
    float* query = s.queries + r * shape.row();
    float* dy = s.dys + r * shape.value_row();
    const auto value_operand = [&](const void* data) {
      return operand_row<kPairs>(problem, data, at, shape.value_size, buffer);
    };
    const float* from = kPairs ? query_pairs(problem, sequence, head, i, buffer)
                               : query_row(problem, sequence, head, i, buffer);
    copy_row<kPairs>(from, shape.depth(), room, query, query_check);
    copy_row<kPairs>(value_operand(gradients.dy), shape.value_depth(), value_room, dy, dy_check);
    copy_row<kPairs>(value_operand(problem.out.data), shape.value_depth(), value_room, out_row, unchecked);
    s.delta[r] = dot<kPairs>(dy, out_row, value_room);
  }
  for (int64_t r = begin; kPairs && r < end; r += 2) {
    const bool both = r + 1 < end;
    const float* query = s.queries + r * shape.row();
    const float* dy = s.dys + r * shape.value_row();
    interleave_rows(query, both ? query + shape.row() : nullptr, room, s.query_lines + r / 2 * shape.line());
    interleave_rows(dy, both ? dy + shape.value_row() : nullptr, value_room, s.dy_lines + r / 2 * shape.value_line());
  }
  s.finite[begin] = all_finite(query_check);
  s.finite[kChunkRows + begin] = all_finite(dy_check);
}

}  // namespace fa::FA_ISA::grad
