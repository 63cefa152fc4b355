// Copies that the micro-kernel reads: rows, rows turned into the columns of panels, and lines of two rows where products
// are made of pairs.
#pragma once

#include "../prefetch.hpp"
#include "../exp.hpp"
#include "../rows.hpp"
#include "../stored.hpp"
#include "../transpose.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// Two bfloat16 as floats.
FA_INLINE Vec lower_of(Vec pairs) { return (Vec)((BitVec)pairs << 16); }
FA_INLINE Vec upper_of(Vec pairs) { return (Vec)((BitVec)pairs & 0xffff0000u); }

// `count` floats or pairs to `out`, filled up with 0 to `room`, a multiple of vectors. Adds 0 to `check` for every finite
// number and NaN for others.
template <bool kPairs>
FA_INLINE void put_row(const float* row, int64_t count, int64_t room, float* out, Vec& check) {
  for (int64_t d = 0; d < room; d += kLanes) {
    const Vec x = d + kLanes <= count ? load(row + d) : StoredFloats::load_some(row + d, larger(0, count - d));
    store(out + d, x);
    check += kPairs ? lower_of(x) * 0.0f + upper_of(x) * 0.0f : x * 0.0f;
  }
}

FA_INLINE bool all_finite(Vec check) { return sum_lanes(check) == 0; }

// A line of two rows of pairs, kPanel numbers for each vector of them.
FA_INLINE void put_line(const float* even, const float* odd, int64_t room, float* out) {
  for (int64_t d = 0; d < room; d += kLanes) {
    Vec low;
    Vec high;
    interleave(load(even + d), odd == nullptr ? Vec{} : load(odd + d), low, high);
    store(out + 2 * d, low);
    store(out + 2 * d + kLanes, high);
  }
}

// `count` numbers as the products take them.
template <bool kPairs>
FA_INLINE const float* numbers_at(const Problem& problem, const void* data, int64_t at, int64_t count, float* buffer) {
  return kPairs ? pairs_at(data, at, count, buffer) : as_floats(data, at, count, problem.type, buffer);
}

// kLanes rows of `count` floats, which are filled up to vectors, as columns [first, first + kLanes) of panels.
FA_INLINE void put_columns(const float* rows, int64_t row, int64_t count, int64_t first, float* out) {
  const float* from[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) from[j] = rows + j * row;
  float* panel = out + first / kPanel * kPanel * count + first % kPanel;
  for (int64_t d = 0; d < count; d += kLanes) transpose_square(from, d, panel + d * kPanel);
}

// K and V of keys [first_key, first_key + keys). Tells whether all numbers of K are finite.
template <bool kPairs>
static bool pack_block(const Problem& problem, const Sequence& sequence, const Shape& shape, int64_t key_head,
                       int64_t first_key, int64_t keys, const Scratch& s) {
  Vec check{};
  Vec unchecked{};
  const int64_t key_start = sequence.key + key_head * problem.key.head;
  const int64_t value_start = sequence.value + key_head * problem.value.head;
  const int64_t room = shape.across();
  float* buffer = s.rows + kLanes * larger(shape.line(), shape.value_line());
  for (int64_t first = 0; first < blocks_of(keys, kPanel) * kPanel; first += kLanes) {
    float* rows = kPairs ? s.rows : s.key_lines + first * shape.line();
    const int64_t row = kPairs ? shape.row() : shape.line();
    // What is beyond repeats the last key; nobody looks at it.
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = first_key + smaller(first + j, keys - 1);
      ask_for_row(problem.key, problem.type, key_start, key + kAhead, problem.head_size);
      const float* from = kPairs ? key_pairs(problem, sequence, key_head, key, buffer)
                                 : key_row(problem, sequence, key_head, key, buffer);
      put_row<kPairs>(from, shape.depth(), kPairs ? room : shape.columns(), rows + j * row, check);
    }
    put_columns(rows, row, room, first, s.keys_across);
    for (int64_t j = 0; kPairs && j < kLanes; j += 2) {
      const float* odd = first + j + 1 < keys ? rows + (j + 1) * row : nullptr;
      put_line(rows + j * row, odd, room, s.key_lines + (first + j) / 2 * shape.line());
    }
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t key = first_key + smaller(first + j, keys - 1);
      ask_for_row(problem.value, problem.type, value_start, key + kAhead, problem.value_size);
      float* out = s.rows + j * shape.value_row();
      const float* from = numbers_at<kPairs>(problem, problem.value.data, value_start + key * problem.value.row,
                                             shape.value_size, buffer);
      put_row<kPairs>(from, shape.value_depth(), shape.value_across(), out, unchecked);
    }
    put_columns(s.rows, shape.value_row(), shape.value_across(), first, s.values_across);
  }
  return all_finite(check);
}

// Of rows filled up to vectors.
template <bool kPairs>
FA_INLINE float dot(const float* a, const float* b, int64_t count) {
  Vec sums{};
  for (int64_t d = 0; d < count; d += kLanes) sums = add_products<kPairs>(sums, load(a + d), load(b + d));
  return sum_lanes(sums);
}

FA_INLINE bool is_silent(const Problem& problem, float max, float sum) {
  if (problem.nan_rows == NanRows::nan) return false;
  return problem.nan_rows == NanRows::zero ? is_nan(sum) : max == -kInfinity;
}

// The query rows of a wave, their dO and what else the softmax and its gradient need of them.
template <bool kPairs>
static void read_wave(const Gradients& gradients, const Sequence& sequence, const Shape& shape, const Wave& wave,
                      const Scratch& s) {
  const Problem& problem = gradients.problem;
  const bool filled = problem.mask_value > -kInfinity;  // then no row is empty
  const bool keep_empty = problem.empty_rows != EmptyRows::zero && !filled;
  Strided dys = problem.out;
  dys.data = const_cast<void*>(gradients.dy);
  float* out_row = s.rows;
  float* buffer = s.rows + larger(shape.line(), shape.value_line());
  const int64_t room = kPairs ? shape.across() : shape.columns();
  const int64_t value_room = kPairs ? shape.value_across() : shape.value_columns();
  for (int64_t begin = 0; begin < wave.rows(); begin += wave.block_rows()) {
    const int64_t end = smaller(wave.rows(), begin + wave.block_rows());
    Vec query_check{};
    Vec dy_check{};
    Vec unchecked{};
    for (int64_t r = begin; r < end; ++r) {
      const int64_t head = wave.head_of(r);
      const int64_t i = wave.index_of(r);
      const int64_t out_start = sequence.out + head * problem.out.head;
      const int64_t at = out_start + i * problem.out.row;
      ask_for_row(problem.query, problem.type, sequence.query + head * problem.query.head, i + kAhead, problem.head_size);
      ask_for_row(problem.out, problem.type, out_start, i + kAhead, shape.value_size);
      ask_for_row(dys, problem.type, out_start, i + kAhead, shape.value_size);
      float* query = s.queries + r * shape.row();
      float* dy = s.dys + r * shape.value_row();
      const auto of_value = [&](const void* data) {
        return numbers_at<kPairs>(problem, data, at, shape.value_size, buffer);
      };
      const float* from = kPairs ? query_pairs(problem, sequence, head, i, buffer)
                                 : query_row(problem, sequence, head, i, buffer);
      put_row<kPairs>(from, shape.depth(), room, query, query_check);
      put_row<kPairs>(of_value(gradients.dy), shape.value_depth(), value_room, dy, dy_check);
      put_row<kPairs>(of_value(problem.out.data), shape.value_depth(), value_room, out_row, unchecked);
      s.delta[r] = dot<kPairs>(dy, out_row, value_room);
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
    for (int64_t r = begin; kPairs && r < end; r += 2) {
      const bool both = r + 1 < end;
      const float* query = s.queries + r * shape.row();
      const float* dy = s.dys + r * shape.value_row();
      put_line(query, both ? query + shape.row() : nullptr, room, s.query_lines + r / 2 * shape.line());
      put_line(dy, both ? dy + shape.value_row() : nullptr, value_room, s.dy_lines + r / 2 * shape.value_line());
    }
    s.finite[begin] = all_finite(query_check);
    s.finite[kWaveRows + begin] = all_finite(dy_check);
  }
}

}  // namespace fa::FA_ISA::grad
