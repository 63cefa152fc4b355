// The two products for a few query rows, straight from K and V: each key is read once, so packing them would
// cost more than it saves. Used by decoding, where one new token meets a long cache.
#pragma once

#include "convert.hpp"

namespace fa::FA_ISA {

// With up to this many rows a span goes this way: packing a key costs about as much as 8 rows' dot products.
inline constexpr int64_t kDirectRows = 8;

// scores[r * score_row] = q_r . k for one key.
FA_INLINE void direct_scores(const float* queries, int64_t query_row, int64_t rows, const float* k, int64_t size,
                             float* scores, int64_t score_row) {
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t r = 0; r < rows; ++r) {
    const float* q = queries + r * query_row;
    Vec sum{};
    for (int64_t d = 0; d < whole; d += kLanes) sum += load(q + d) * load(k + d);
    float score = sum_lanes(sum);
    for (int64_t d = whole; d < size; ++d) score += q[d] * k[d];
    scores[r * score_row] = score;
  }
}

// sums_r += p_r v for one key.
FA_INLINE void direct_values(const float* p, int64_t p_row, int64_t rows, const float* v, int64_t size, float* sums,
                             int64_t sums_row) {
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t r = 0; r < rows; ++r) {
    const float weight = p[r * p_row];
    float* sum = sums + r * sums_row;
    for (int64_t d = 0; d < whole; d += kLanes) store(sum + d, load(sum + d) + load(v + d) * weight);
    for (int64_t d = whole; d < size; ++d) sum[d] += v[d] * weight;
  }
}

}  // namespace fa::FA_ISA
