// Spans of a few query rows, by the products of skinny_product.hpp.
#pragma once

#include "overflow.hpp"
#include "masked_keys.hpp"
#include "softmax_rows.hpp"

namespace fa::FA_ISA {

// Floats from one query row to the next: whole loads.
template <class Stored>
FA_INLINE int64_t query_words(const Span& span) {
  return blocks_of(span.shape.numbers, Stored::kStep) * kLanes;
}

// Floats of one row that hold numbers.
template <class Stored>
FA_INLINE int64_t row_depth(const Span& span) { return Stored::kPairs ? blocks_of(span.shape.numbers, 2) : span.shape.numbers; }

// Row by row, what is beyond the last number 0. Nothing is rounded here: memory is the limit.
template <class Stored>
static void read_few_queries(const Span& span) {
  const int64_t words = query_words<Stored>(span);
  const int64_t depth = row_depth<Stored>(span);
  for (int64_t r = 0; r < span.rows(); ++r) {
    const int64_t head = span.head_of(r);
    const int64_t i = span.index_of(r);
    float* out = span.s.queries + r * words;
    const float* q = Stored::kPairs ? query_pairs(span.problem, span.sequence, head, i, span.s.rows)
                                    : query_row(span.problem, span.sequence, head, i, span.s.rows);
    __builtin_memcpy(out, q, static_cast<size_t>(depth) * sizeof(float));
    for (int64_t d = depth; d < words; ++d) out[d] = 0;
  }
}

template <class Stored>
FA_INLINE StoredRows<Stored> stored_rows(const Strided& rows, int64_t sequence, int64_t head, int64_t first) {
  return {static_cast<const typename Stored::Number*>(rows.data) + sequence + head * rows.head + first * rows.row,
          rows.row};
}

// Keys with a rope part are joined, kLanes at a time.
template <class Stored>
static void few_scores(const Span& span, int64_t first, int64_t count, float* scores) {
  const Scratch& s = span.s;
  const Problem& problem = span.problem;
  const int64_t rows = span.rows();
  const QueryRows queries{s.queries, query_words<Stored>(span)};
  if (problem.rope_size == 0) {
    direct_scores(rows, queries, stored_rows<Stored>(problem.key, span.sequence.key, span.plan.head, first), count,
                  problem.head_size, scores, kScoreRow);
    return;
  }
  using Number = typename Joined<Stored>::Number;
  const int64_t row = row_depth<Stored>(span) * static_cast<int64_t>(sizeof(float) / sizeof(Number));
  for (int64_t c = 0; c < count; c += kLanes) {
    const int64_t keys = smaller(kLanes, count - c);
    for (int64_t j = 0; j < keys; ++j) {
      float* out = s.rows + j * row_depth<Stored>(span);
      if constexpr (Stored::kPairs) {
        key_pairs(problem, span.sequence, span.plan.head, first + c + j, out);
      } else {
        key_row(problem, span.sequence, span.plan.head, first + c + j, out);
      }
    }
    const StoredRows<Joined<Stored>> joined{reinterpret_cast<const Number*>(s.rows), row};
    direct_scores(rows, queries, joined, keys, span.shape.numbers, scores + c, kScoreRow);
  }
}

template <class Stored>
static void attend_directly(const Span& span, int64_t first, int64_t keys) {
  const Scratch& s = span.s;
  const Problem& problem = span.problem;
  const int64_t rows = span.rows();
  const int64_t columns = span.columns();
  const Window all = seen_by_some(span, keys);
  const int64_t count = all.end - all.begin;
  few_scores<Stored>(span, first + all.begin, count, s.scores + all.begin);
  soften_rows(span, first);
  shrink_sums(span);
  // Whether a value is inf or NaN, or some are too large for a sum, shows only in the sums; then they are made again, and
  // those of all later blocks, carefully.
  if (s.unit[0] == 1.0f) {
    const size_t bytes = static_cast<size_t>(rows * columns) * sizeof(float);
    __builtin_memcpy(s.kept, s.sums, bytes);
    direct_values(rows, s.scores + all.begin, kScoreRow,
                  stored_rows<Stored>(problem.value, span.sequence.value, span.plan.head, first + all.begin), count,
                  problem.value_size, s.sums, columns);
    if (all_finite(s.sums, rows * columns)) return;
    __builtin_memcpy(s.sums, s.kept, bytes);
    const float unit = unit_for(span.sequence.key_length);
    for (int64_t r = 0; r < rows; ++r) s.unit[r] = unit;
    for (int64_t i = 0; i < rows * columns; ++i) s.sums[i] *= unit;
  }
  for (int64_t r = 0; r < rows; ++r) {
    add_values_carefully(span, r, first, s.scores + r * kScoreRow, 1, s.sums + r * columns, 1);
  }
}

}  // namespace fa::FA_ISA
