// Tiles of up to kSkinnyRows query rows. The products of skinny_product.hpp read K and V directly, and nothing is packed.
#pragma once

#include "finite.hpp"
#include "overflow.hpp"
#include "masked_keys.hpp"
#include "softmax_rows.hpp"

namespace fa::FA_ISA {

// Floats from one query row to the next: whole loads.
template <class Stored>
FA_INLINE int64_t query_row_floats(const QueryTile& tile) {
  return ceil_div(tile.shape.qk_size, Stored::kPerLoad) * kLanes;
}

// Floats of one row that hold numbers.
template <class Stored>
FA_INLINE int64_t row_floats(const QueryTile& tile) {
  return Stored::kPairs ? ceil_div(tile.shape.qk_size, 2) : tile.shape.qk_size;
}

// Copies the query rows, [rows][floats], filled up with 0. float32 is not rounded to bfloat16 here, because memory is the
// limit.
template <class Stored>
static void read_skinny_queries(const QueryTile& tile) {
  const int64_t stride = query_row_floats<Stored>(tile);
  const int64_t depth = row_floats<Stored>(tile);
  for (int64_t r = 0; r < tile.rows(); ++r) {
    const int64_t head = tile.head_of(r);
    const int64_t i = tile.index_of(r);
    float* out = tile.s.queries + r * stride;
    const float* q = Stored::kPairs ? query_pairs(tile.problem, tile.sequence, head, i, tile.s.row_buffer)
                                    : query_row(tile.problem, tile.sequence, head, i, tile.s.row_buffer);
    __builtin_memcpy(out, q, static_cast<size_t>(depth) * sizeof(float));
    for (int64_t d = depth; d < stride; ++d) out[d] = 0;
  }
}

// Scores of `count` keys from `first` on, [rows][kScoreStride]. Keys with a rope part are joined first, kLanes at a time.
template <class Stored>
static void skinny_tile_scores(const QueryTile& tile, int64_t first, int64_t count, float* scores) {
  const Scratch& s = tile.s;
  const Problem& problem = tile.problem;
  const int64_t rows = tile.rows();
  const QueryRows queries{s.queries, query_row_floats<Stored>(tile)};
  if (problem.rope_size == 0) {
    skinny_scores(rows, queries, stored_rows<Stored>(problem.key, tile.sequence.key, tile.plan.head, first), count,
                  problem.head_size, scores, kScoreStride);
    return;
  }
  using Number = typename Joined<Stored>::Number;
  const int64_t row = row_floats<Stored>(tile) * static_cast<int64_t>(sizeof(float) / sizeof(Number));
  for (int64_t c = 0; c < count; c += kLanes) {
    const int64_t keys = smaller(kLanes, count - c);
    for (int64_t j = 0; j < keys; ++j) {
      float* out = s.row_buffer + j * row_floats<Stored>(tile);
      if constexpr (Stored::kPairs) {
        key_pairs(problem, tile.sequence, tile.plan.head, first + c + j, out);
      } else {
        key_row(problem, tile.sequence, tile.plan.head, first + c + j, out);
      }
    }
    const StoredRows<Joined<Stored>> joined{reinterpret_cast<const Number*>(s.row_buffer), row};
    skinny_scores(rows, queries, joined, keys, tile.shape.qk_size, scores + c, kScoreStride);
  }
}

// A skinny tile and the block of keys [first, first + keys): scores, online softmax, weighted values.
template <class Stored>
static void attend_skinny(const QueryTile& tile, int64_t first, int64_t keys) {
  const Scratch& s = tile.s;
  const Problem& problem = tile.problem;
  const int64_t rows = tile.rows();
  const int64_t columns = tile.columns();
  const Window all = visible_to_some(tile, keys);
  const int64_t count = all.end - all.begin;
  skinny_tile_scores<Stored>(tile, first + all.begin, count, s.scores + all.begin);
  softmax_rows(tile, first);
  rescale_accumulators(tile);
  // Only the sums show whether a value is inf or NaN, or whether they overflow. The sums of this block are then computed
  // again with guards, and those of all later blocks, too.
  if (s.overflow_scale[0] == 1.0f) {
    const size_t bytes = static_cast<size_t>(rows * columns) * sizeof(float);
    __builtin_memcpy(s.saved_acc, s.acc_rows, bytes);
    skinny_values(rows, s.scores + all.begin, kScoreStride,
                  stored_rows<Stored>(problem.value, tile.sequence.value, tile.plan.head, first + all.begin), count,
                  problem.value_size, s.acc_rows, columns);
    if (all_finite(s.acc_rows, rows * columns)) return;
    __builtin_memcpy(s.acc_rows, s.saved_acc, bytes);
    const float unit = overflow_scale_for(tile.sequence.key_length);
    for (int64_t r = 0; r < rows; ++r) s.overflow_scale[r] = unit;
    for (int64_t i = 0; i < rows * columns; ++i) s.acc_rows[i] *= unit;
  }
  for (int64_t r = 0; r < rows; ++r) {
    add_values_guarded(tile, r, first, s.scores + r * kScoreStride, 1, s.acc_rows + r * columns, 1);
  }
}

}  // namespace fa::FA_ISA
