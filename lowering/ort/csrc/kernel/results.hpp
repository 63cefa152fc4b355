// The end of a tile: accumulators become outputs. Rows that attend no key get what the operator or its extension says.
#pragma once

#include "overflow.hpp"
#include "dropout.hpp"
#include "finite.hpp"
#include "masked_keys.hpp"
#include "query_tile.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// Whether the row attends no key, as opposed to keys whose scores are all -inf. With `cpu_masked_bias` every key has a
// score.
static bool is_empty(const QueryTile& tile, int64_t r) {
  if (tile.problem.masked_bias || tile.s.max[r] != -kInfinity || is_nan(tile.s.sum[r])) return false;
  for (int64_t first = 0; first < tile.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, tile.sequence.key_length - first);
    if (!view_of(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys).empty()) return false;
  }
  return true;
}

FA_INLINE int64_t out_offset(const QueryTile& tile, int64_t r) {
  const Strided& out = tile.problem.out;
  return tile.sequence.out + tile.head_of(r) * out.head + tile.index_of(r) * out.row;
}

FA_INLINE void store_row(const QueryTile& tile, int64_t r, const float* row) {
  const Problem& problem = tile.problem;
  write_floats(problem.out.data, out_offset(tile, r), row, problem.value_size, problem.type);
}

// Writes row * factor. `row` has room for whole vectors. It is scaled in place if the output is not float32.
FA_INLINE void store_scaled(const QueryTile& tile, int64_t r, float* row, float factor) {
  const int64_t size = tile.problem.value_size;
  if (tile.problem.type != Type::float32) {
    for (int64_t d = 0; d < size; d += kLanes) store(row + d, load(row + d) * factor);
    store_row(tile, r, row);
    return;
  }
  float* out = static_cast<float*>(tile.problem.out.data) + out_offset(tile, r);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(out + d, load(row + d) * factor);
  for (; d < size; ++d) out[d] = row[d] * factor;
}

static bool values_are_finite(const QueryTile& tile) {
  bool finite = true;
  for (int64_t j = 0; finite && j < tile.sequence.key_length; ++j) {
    finite = all_finite(tile.value(j), tile.problem.value_size);
  }
  return finite;
}

// The sums of a row whose probabilities are 0: NaN where a value that the row attends is inf or NaN, because 0 * inf is NaN.
static void add_values_of_no_weight(const QueryTile& tile, int64_t r, float* sums) {
  const int64_t length = tile.sequence.key_length;
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, length - first);
    const View view = view_of(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first, keys);
    for (int64_t j = view.begin; j < view.end; ++j) {
      if (is_attended(view, j)) add_value(0.0f, tile.value(first + j), tile.problem.value_size, sums);
    }
  }
}

enum class Values : uint8_t { unknown, finite, some_not_finite };

// Writes row r: its accumulator divided by its sum, or what `rule` says where the softmax is undefined. `values` is what is
// known of the values of the tile's head.
static void write_row(const QueryTile& tile, int64_t r, NanRows rule, Values& values) {
  const int64_t columns = tile.columns();
  float* sums = tile.s.acc_rows + r * columns;
  const float sum = tile.s.sum[r];
  const bool all_infinite = sum == 0;  // only scores of -inf give a sum of 0
  if (all_infinite || is_nan(sum)) {
    const bool zero = rule == NanRows::zero || (rule == NanRows::infinite && all_infinite);
    for (int64_t d = 0; d < columns; ++d) sums[d] = zero ? 0.0f : __builtin_nanf("");
    if (zero && values == Values::unknown) {
      values = values_are_finite(tile) ? Values::finite : Values::some_not_finite;
    }
    if (zero && values == Values::some_not_finite) add_values_of_no_weight(tile, r, sums);
    store_row(tile, r, sums);
  } else {
    store_scaled(tile, r, sums, 1.0f / sum / tile.problem.keep_prob / tile.s.overflow_scale[r]);
  }
}

// Whether a score of the row is NaN. Beside a score of +inf neither the largest score nor the sum tells, so the scores are
// computed once more, in memory that the accumulators do not use.
static bool has_undefined_score(const QueryTile& tile, int64_t r) {
  const Problem& problem = tile.problem;
  const int64_t head = tile.head_of(r);
  const int64_t i = tile.index_of(r);
  if (problem.sink != nullptr && is_nan(problem.sink[head])) return true;
  const int64_t qk_size = problem.head_size + problem.rope_size;
  const float* query = query_row(problem, tile.sequence, head, i, tile.s.row_buffer);
  float* key_buffer = tile.s.row_buffer + ceil_div(qk_size, kLanes) * kLanes;
  for (int64_t first = 0; first < tile.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, tile.sequence.key_length - first);
    const View view = view_of(problem, tile.sequence, head, i, first, keys);
    const float* bias = nullptr;
    if (has_bias(problem)) bias = bias_row(problem, tile.sequence, head, i, first, keys, tile.s.scores);
    for (int64_t j = 0; j < keys; ++j) {
      float score = 0;
      if (is_attended(view, j)) {
        const float* key = key_row(problem, tile.sequence, tile.plan.head, first + j, key_buffer);
        for (int64_t d = 0; d < qk_size; ++d) score += query[d] * key[d];
        score = biased_score(problem, splat(score), splat(bias == nullptr ? 0.0f : bias[j]))[0];
      } else if (problem.masked_bias) {
        score = masked_score(problem, bias, j);
      }
      if (is_nan(score)) return true;
    }
  }
  return false;
}

// Writes softmax_max and softmax_sum of row r, if somebody reads them.
static void write_statistics(const QueryTile& tile, int64_t r) {
  const Problem& problem = tile.problem;
  if (problem.softmax_max == nullptr && problem.softmax_sum == nullptr) return;
  const int64_t head = tile.head_of(r);
  float max = tile.s.max[r];
  float sum = tile.s.sum[r];
  if (tile.s.empty[r] != 0) {
    max = problem.sink == nullptr ? -kLargest : problem.sink[head];
    sum = problem.sink == nullptr ? kLargest : 1.0f;
  } else if (is_nan(sum)) {
    if (max != kInfinity || has_undefined_score(tile, r)) max = sum;  // the maximum ignores a NaN score
  } else if (sum == 0) {
    sum = __builtin_nanf("");  // exp(-inf - -inf)
  }
  const Sequence& sequence = tile.sequence;
  const int64_t at =
      sequence.statistics + head * sequence.statistics_head + tile.index_of(r) * sequence.statistics_row;
  for (int64_t c = 0; c < kStatisticsWidth; ++c) {
    if (problem.softmax_max != nullptr) problem.softmax_max[at + c] = max;
    if (problem.softmax_sum != nullptr) problem.softmax_sum[at + c] = sum;
  }
}

// Whether every row has a sum to divide by and an output of whole vectors, as almost all have.
static bool all_rows_ordinary(const QueryTile& tile) {
  const Problem& problem = tile.problem;
  bool ordinary = problem.value_size % kLanes == 0 && problem.mask_value == -kInfinity && !problem.masked_bias;
  for (int64_t r = 0; ordinary && r < tile.rows(); ++r) ordinary = tile.s.max[r] != -kInfinity && tile.s.sum[r] > 0;
  return ordinary;
}

// Writes the accumulator panels directly to the output.
template <class Write>
static void write_panels_as(const QueryTile& tile) {
  const Scratch& s = tile.s;
  auto* out = static_cast<typename Write::Number*>(tile.problem.out.data);
  for (int64_t first = 0; first < tile.rows(); first += kLanes) {
    const float* panel = s.acc_panels + first / kPanel * kPanel * tile.columns() + first % kPanel;
    const Vec factor = 1.0f / load(s.sum + first) / tile.problem.keep_prob / load(s.overflow_scale + first);
    const int64_t count = smaller(kLanes, tile.rows() - first);
    int64_t out_offsets[kLanes];
    for (int64_t j = 0; j < count; ++j) {
      out_offsets[j] = out_offset(tile, first + j);
      s.empty[first + j] = 0;
      write_statistics(tile, first + j);
    }
    for (int64_t d = 0; d < tile.problem.value_size; d += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) rows[j] = load(panel + (d + j) * kPanel) * factor;
      transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if (j < count) Write::put(out + out_offsets[j] + d, rows[j]);
      }
    }
  }
}

static void write_panels(const QueryTile& tile) {
  switch (tile.problem.type) {
    case Type::float32: return write_panels_as<WriteFloats>(tile);
    case Type::float16: return write_panels_as<WriteFloat16>(tile);
    case Type::bfloat16: return write_panels_as<WriteBfloat16>(tile);
  }
}

// The mean of all values into `mean`. The values of each block are summed in `block` first: shorter sums round less. With
// dropout, the values that row r drops are left out.
static void mean_of_values(const QueryTile& tile, int64_t r, float* mean, float* block, float overflow_scale) {
  const Problem& problem = tile.problem;
  const int64_t length = tile.sequence.key_length;
  const int64_t columns = tile.columns();
  const int64_t bit = drop_bit(tile.sequence, tile.head_of(r), tile.index_of(r));
  for (int64_t d = 0; d < columns; ++d) mean[d] = 0;
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    for (int64_t d = 0; d < columns; ++d) block[d] = 0;
    for (int64_t j = first; j < smaller(length, first + kBlockKeys); ++j) {
      const bool kept = problem.drop_mask == nullptr || (bits_from(problem.drop_mask, bit + j, 1) & 1) != 0;
      add_value(kept ? overflow_scale : 0.0f, tile.value(j), problem.value_size, block);
    }
    for (int64_t d = 0; d < columns; ++d) mean[d] += block[d];
  }
  for (int64_t d = 0; d < columns; ++d) mean[d] /= static_cast<float>(length) * problem.keep_prob * overflow_scale;
}

// Writes the rows that attend no key. All other rows are written by now, so acc_rows is free.
static void write_empty_rows(const QueryTile& tile) {
  const EmptyRows rule = tile.problem.empty_rows;
  const int64_t columns = tile.columns();
  float* row = tile.s.acc_rows;
  const float fill = rule == EmptyRows::nan ? __builtin_nanf("") : 0.0f;
  for (int64_t d = 0; d < columns; ++d) row[d] = fill;
  bool done = rule != EmptyRows::mean;
  for (int64_t r = 0; r < tile.rows(); ++r) {
    if (tile.s.empty[r] == 0) continue;
    if (!done) mean_of_values(tile, r, row, row + columns, 1.0f);
    if (!done && !all_finite(row, columns)) {
      mean_of_values(tile, r, row, row + columns, overflow_scale_for(tile.sequence.key_length));
    }
    done = done || tile.problem.drop_mask == nullptr;  // then all rows have the same mean
    store_row(tile, r, row);
  }
}

}  // namespace fa::FA_ISA
