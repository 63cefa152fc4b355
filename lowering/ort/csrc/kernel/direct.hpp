// The two products for a few query rows straight from K and V: each key is read once, so packing it would cost more than
// it saves. Used by decoding, where one new token meets a long cache. kLanes keys are taken at a time: they come in
// order from memory for the first row and lie in the first-level cache for the others.
#pragma once

#include "rows.hpp"

namespace fa::FA_ISA {

// With up to this many rows a head goes this way. For 16 keys of 16 numbers, packing takes 64 shuffles (a transposed
// square); a row takes 16 multiplications either way, and here 30 shuffles for each row to add up 16 vectors, once for
// all numbers of the keys: at head size 64 the two meet at 8 rows.
inline constexpr int64_t kDirectRows = 8;

// Adds lanes that differ in the bit kStep; lane l of the result holds a's sum, or b's where l has the bit.
template <int kStep>
FA_INLINE Vec add_halves(Vec a, Vec b) {
  IntVec own;
  IntVec other;
  for (int i = 0; i < kLanes; ++i) {
    own[i] = (i & kStep) == 0 ? i : kLanes + i;
    other[i] = (i & kStep) == 0 ? i + kStep : kLanes + i - kStep;
  }
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Lane l of the result is the sum of the lanes of vector l.
template <int kCount = kLanes>
FA_INLINE Vec sum_each(Vec (&vectors)[kLanes]) {
  constexpr int kStep = kCount / 2;
#pragma GCC unroll 8
  for (int i = 0; i < kStep; ++i) vectors[i] = add_halves<kStep>(vectors[i], vectors[i + kStep]);
  if constexpr (kStep > 1) return sum_each<kStep>(vectors);
  return vectors[0];
}

// kLanes scores of each of kRows query rows, of the keys at `from`; `size` numbers each. Key after key, as they lie in
// memory, each number loaded once for all rows.
template <int kRows>
FA_INLINE void direct_scores_of(const float* queries, int64_t query_row, const float* const* from, int64_t size,
                                float* scores, int64_t score_row) {
  Vec parts[kRows][kLanes];
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t j = 0; j < kLanes; ++j) {
    Vec sum[kRows] = {};
    for (int64_t d = 0; d < whole; d += kLanes) {
      const Vec k = load(from[j] + d);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r] += k * load(queries + r * query_row + d);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) parts[r][j] = sum[r];
  }
  for (int r = 0; r < kRows; ++r) {
    Vec result = sum_each(parts[r]);
    for (int64_t d = whole; d < size; ++d) {
      Vec last;
      for (int j = 0; j < kLanes; ++j) last[j] = from[j][d];
      result += last * queries[r * query_row + d];
    }
    store(scores + r * score_row, result);
  }
}

// `rows` from 1 to kDirectRows.
template <int kRows = kDirectRows>
static void direct_scores(int64_t rows, const float* queries, int64_t query_row, const float* const* from, int64_t size,
                          float* scores, int64_t score_row) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      direct_scores<kRows - 1>(rows, queries, query_row, from, size, scores, score_row);
      return;
    }
  }
  direct_scores_of<kRows>(queries, query_row, from, size, scores, score_row);
}

// kVectors vectors of sums, in registers while the keys go by.
template <int kVectors>
FA_INLINE void direct_columns(const float* p, const float* const* from, int64_t keys, int64_t d, float* sums) {
  Vec sum[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sum[v] = load(sums + d + v * kLanes);
  for (int64_t j = 0; j < keys; ++j) {
    const float* row = from[j] + d;
    const Vec weight = splat(p[j]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] += weight * load(row + v * kLanes);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sums + d + v * kLanes, sum[v]);
}

// sums += P V of one row of P, for `keys` values at `from`; `size` numbers each.
FA_INLINE void direct_values(const float* p, const float* const* from, int64_t keys, int64_t size, float* sums) {
  int64_t d = 0;
  for (; d + 8 * kLanes <= size; d += 8 * kLanes) direct_columns<8>(p, from, keys, d, sums);
  for (; d + 4 * kLanes <= size; d += 4 * kLanes) direct_columns<4>(p, from, keys, d, sums);
  for (; d + kLanes <= size; d += kLanes) direct_columns<1>(p, from, keys, d, sums);
  for (; d < size; ++d) {
    for (int64_t j = 0; j < keys; ++j) sums[d] += p[j] * from[j][d];
  }
}

// sum += p v for one key.
FA_INLINE void add_value(float p, const float* v, int64_t size, float* sum) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(sum + d, load(sum + d) + load(v + d) * p);
  for (; d < size; ++d) sum[d] += v[d] * p;
}

}  // namespace fa::FA_ISA
