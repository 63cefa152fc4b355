// The end of a span: sums become outputs, and rows without keys get what the operator or its extension says.
#pragma once

#include "overflow.hpp"
#include "dropout.hpp"
#include "masked_keys.hpp"
#include "query_tile.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// No key attended, as against attended keys whose scores are all -inf. With biased masked keys every key has a score.
static bool is_empty(const Span& span, int64_t r) {
  if (span.problem.masked_bias || span.s.max[r] != -kInfinity || is_nan(span.s.total[r])) return false;
  for (int64_t first = 0; first < span.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, span.sequence.key_length - first);
    if (!view_of(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys).empty()) return false;
  }
  return true;
}

FA_INLINE int64_t place_of(const Span& span, int64_t r) {
  const Strided& out = span.problem.out;
  return span.sequence.out + span.head_of(r) * out.head + span.index_of(r) * out.row;
}

FA_INLINE void put(const Span& span, int64_t r, const float* row) {
  const Problem& problem = span.problem;
  write_floats(problem.out.data, place_of(span, r), row, problem.value_size, problem.type);
}

// row * factor; `row` has room for whole vectors and is scaled itself where the output is of another type.
FA_INLINE void put_scaled(const Span& span, int64_t r, float* row, float factor) {
  const int64_t size = span.problem.value_size;
  if (span.problem.type != Type::float32) {
    for (int64_t d = 0; d < size; d += kLanes) store(row + d, load(row + d) * factor);
    put(span, r, row);
    return;
  }
  float* out = static_cast<float*>(span.problem.out.data) + place_of(span, r);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(out + d, load(row + d) * factor);
  for (; d < size; ++d) out[d] = row[d] * factor;
}

static void write_row(const Span& span, int64_t r, NanRows rule) {
  const int64_t columns = span.columns();
  float* sums = span.s.sums + r * columns;
  const float sum = span.s.total[r];
  const bool all_infinite = sum == 0;  // only scores of -inf leave nothing behind
  if (all_infinite || is_nan(sum)) {
    const bool zero = rule == NanRows::zero || (rule == NanRows::infinite && all_infinite);
    for (int64_t d = 0; d < columns; ++d) sums[d] = zero ? 0.0f : __builtin_nanf("");
    put(span, r, sums);
  } else {
    put_scaled(span, r, sums, 1.0f / sum / span.problem.keep_prob / span.s.unit[r]);
  }
}

// Whether a score of the row is NaN. Beside a score of +inf neither the largest score nor the sum tells, so the scores
// are made once more, in memory that the sums of the values do not need.
static bool has_undefined_score(const Span& span, int64_t r) {
  const Problem& problem = span.problem;
  const int64_t head = span.head_of(r);
  const int64_t i = span.index_of(r);
  if (problem.sink != nullptr && is_nan(problem.sink[head])) return true;
  const int64_t numbers = problem.head_size + problem.rope_size;
  const float* query = query_row(problem, span.sequence, head, i, span.s.rows);
  float* beside = span.s.rows + blocks_of(numbers, kLanes) * kLanes;
  for (int64_t first = 0; first < span.sequence.key_length; first += kBlockKeys) {
    const int64_t keys = smaller(kBlockKeys, span.sequence.key_length - first);
    const View view = view_of(problem, span.sequence, head, i, first, keys);
    const float* bias = nullptr;
    if (has_bias(problem)) bias = bias_row(problem, span.sequence, head, i, first, keys, span.s.scores);
    for (int64_t j = 0; j < keys; ++j) {
      float score = 0;
      if (is_attended(view, j)) {
        const float* key = key_row(problem, span.sequence, span.plan.head, first + j, beside);
        for (int64_t d = 0; d < numbers; ++d) score += query[d] * key[d];
        score = biased_score(problem, splat(score), splat(bias == nullptr ? 0.0f : bias[j]))[0];
      } else if (problem.masked_bias) {
        score = excluded_score(problem, bias, j);
      }
      if (is_nan(score)) return true;
    }
  }
  return false;
}

static void write_statistics(const Span& span, int64_t r) {
  const Problem& problem = span.problem;
  if (problem.softmax_max == nullptr && problem.softmax_sum == nullptr) return;
  const int64_t head = span.head_of(r);
  float max = span.s.max[r];
  float sum = span.s.total[r];
  if (span.s.empty[r] != 0) {
    max = problem.sink == nullptr ? -kLargest : problem.sink[head];
    sum = problem.sink == nullptr ? kLargest : 1.0f;
  } else if (is_nan(sum)) {
    if (max != kInfinity || has_undefined_score(span, r)) max = sum;  // the maximum ignored a NaN score
  } else if (sum == 0) {
    sum = __builtin_nanf("");  // exp(-inf - -inf)
  }
  const Sequence& sequence = span.sequence;
  const int64_t at =
      sequence.statistics + head * sequence.statistics_head + span.index_of(r) * sequence.statistics_row;
  for (int64_t c = 0; c < kStatisticsWidth; ++c) {
    if (problem.softmax_max != nullptr) problem.softmax_max[at + c] = max;
    if (problem.softmax_sum != nullptr) problem.softmax_sum[at + c] = sum;
  }
}

// Whether every row has a sum to be divided by and goes to the output in whole vectors, as almost all do.
static bool all_ordinary(const Span& span) {
  const Problem& problem = span.problem;
  bool ordinary = problem.value_size % kLanes == 0 && problem.mask_value == -kInfinity && !problem.masked_bias;
  for (int64_t r = 0; ordinary && r < span.rows(); ++r) ordinary = span.s.max[r] != -kInfinity && span.s.total[r] > 0;
  return ordinary;
}

// From the panels of sums straight to the output.
template <class Write>
static void write_panels_as(const Span& span) {
  const Scratch& s = span.s;
  auto* out = static_cast<typename Write::Number*>(span.problem.out.data);
  for (int64_t first = 0; first < span.rows(); first += kLanes) {
    const float* panel = s.across + first / kPanel * kPanel * span.columns() + first % kPanel;
    const Vec factor = 1.0f / load(s.total + first) / span.problem.keep_prob / load(s.unit + first);
    const int64_t count = smaller(kLanes, span.rows() - first);
    int64_t places[kLanes];
    for (int64_t j = 0; j < count; ++j) {
      places[j] = place_of(span, first + j);
      s.empty[first + j] = 0;
      write_statistics(span, first + j);
    }
    for (int64_t d = 0; d < span.problem.value_size; d += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) rows[j] = load(panel + (d + j) * kPanel) * factor;
      transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if (j < count) Write::put(out + places[j] + d, rows[j]);
      }
    }
  }
}

static void write_panels(const Span& span) {
  switch (span.problem.type) {
    case Type::float32: return write_panels_as<WriteFloats>(span);
    case Type::float16: return write_panels_as<WriteFloat16>(span);
    case Type::bfloat16: return write_panels_as<WriteBfloat16>(span);
  }
}

// Into `mean`, by way of sums of a block each: shorter sums lose less. With dropout it is that of row r.
static void mean_of_values(const Span& span, int64_t r, float* mean, float* block, float unit) {
  const Problem& problem = span.problem;
  const int64_t length = span.sequence.key_length;
  const int64_t columns = span.columns();
  const int64_t bit = drop_bit(span.sequence, span.head_of(r), span.index_of(r));
  for (int64_t d = 0; d < columns; ++d) mean[d] = 0;
  for (int64_t first = 0; first < length; first += kBlockKeys) {
    for (int64_t d = 0; d < columns; ++d) block[d] = 0;
    for (int64_t j = first; j < smaller(length, first + kBlockKeys); ++j) {
      const bool kept = problem.drop_mask == nullptr || (bits_from(problem.drop_mask, bit + j, 1) & 1) != 0;
      add_value(kept ? unit : 0.0f, span.value(j), problem.value_size, block);
    }
    for (int64_t d = 0; d < columns; ++d) mean[d] += block[d];
  }
  for (int64_t d = 0; d < columns; ++d) mean[d] /= static_cast<float>(length) * problem.keep_prob * unit;
}

// Every row of `sums` is written out by now.
static void write_empty_rows(const Span& span) {
  const EmptyRows rule = span.problem.empty_rows;
  const int64_t columns = span.columns();
  float* row = span.s.sums;
  const float fill = rule == EmptyRows::nan ? __builtin_nanf("") : 0.0f;
  for (int64_t d = 0; d < columns; ++d) row[d] = fill;
  bool done = rule != EmptyRows::mean;
  for (int64_t r = 0; r < span.rows(); ++r) {
    if (span.s.empty[r] == 0) continue;
    if (!done) mean_of_values(span, r, row, row + columns, 1.0f);
    if (!done && !all_finite(row, columns)) {
      mean_of_values(span, r, row, row + columns, unit_for(span.sequence.key_length));
    }
    done = done || span.problem.drop_mask == nullptr;  // then all rows have the same mean
    put(span, r, row);
  }
}

}  // namespace fa::FA_ISA
