// What one task works on: some query rows of a key head, and the memory it works in.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA {

// Panels begin on cache lines, so that no vector load touches two.
inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

// Floats from one score row to the next: an odd number of cache lines, so that the rows of a tile do not share a set.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;

// Columns of a block that some row of a tile of kTileRows sees; begins at a panel.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
};

// The memory of one worker.
struct Scratch {
  float* queries;   // tiles of [depth][kTileRows]; direct: see few.hpp
  float* scores;    // [kBlockRows][kScoreRow], then the probabilities in their place
  float* sums;      // [kBlockRows][value_columns]: sum of P V so far
  float* block;     // a packed block of K and V, where they are neither shared nor read directly
  float* kept;      // [kDirectRows][value_columns]
  float* rows;      // kLanes converted rows of K or V, or one of query or bias
  float* max;       // [kBlockRows]: the largest score so far
  float* total;     // [kBlockRows]: sum of exp(score - max) so far
  float* part;      // [kBlockRows]: the same of this block
  float* shrink;    // [kBlockRows]: by this block, the factor of what was summed before
  View* views;      // [kBlockRows]
  Window* windows;  // [kBlockRows / kTileRows]
  uint8_t* hidden;  // [kScoreRow]
  uint8_t* empty;   // [kBlockRows]

  static size_t row_floats(const PackShape& shape) {
    return static_cast<size_t>(larger(larger(shape.numbers, shape.value_columns()) * kLanes, kScoreRow));
  }
  // Where rows are few, each of their two parts is filled up to whole vectors.
  static size_t query_floats(const PackShape& shape) {
    return static_cast<size_t>(kBlockRows * shape.numbers + kDirectRows * 2 * kLanes);
  }
  static size_t block_floats(const PackShape& shape, bool no_own) {
    return no_own ? 0 : static_cast<size_t>(shape.block_floats(kBlockKeys));
  }
  static size_t bytes(const PackShape& shape, bool no_own) {
    const size_t columns = static_cast<size_t>(shape.value_columns());
    const size_t floats = kBlockRows * (kScoreRow + columns + 4) + query_floats(shape) + block_floats(shape, no_own) +
                          kDirectRows * columns + row_floats(shape);
    return kAlignment + floats * sizeof(float) + kBlockRows * (sizeof(View) + sizeof(Window) + 1) + kScoreRow;
  }
  Scratch(void* memory, const PackShape& shape, bool no_own) {
    block = aligned(memory);
    scores = block + block_floats(shape, no_own);
    sums = scores + kBlockRows * kScoreRow;
    kept = sums + kBlockRows * shape.value_columns();
    max = kept + kDirectRows * shape.value_columns();
    total = max + kBlockRows;
    part = total + kBlockRows;
    shrink = part + kBlockRows;
    queries = shrink + kBlockRows;
    rows = queries + query_floats(shape);
    views = reinterpret_cast<View*>(rows + row_floats(shape));
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows);
    empty = hidden + kScoreRow;
  }
};

struct Span {
  const Problem& problem;
  const PackShape& shape;
  const HeadPlan& plan;
  const Sequence& sequence;
  const RowSpan of;
  const Scratch& s;

  int64_t rows() const { return of.count(); }
  int64_t columns() const { return shape.value_columns(); }
  int64_t head_of(int64_t r) const { return of.first_head + r / of.per_head(); }
  int64_t index_of(int64_t r) const { return of.begin + r % of.per_head(); }

  const float* value(int64_t j) const { return value_row(problem, sequence, plan.head, j, s.rows); }
};

// The columns of a block that some row of the span sees.
static Window seen_by_some(const Span& span, int64_t keys) {
  Window all{keys, 0};
  for (int64_t tile = 0; tile * kTileRows < span.rows(); ++tile) {
    all.begin = smaller(all.begin, span.s.windows[tile].begin);
    all.end = larger(all.end, span.s.windows[tile].end);
  }
  return all;
}

}  // namespace fa::FA_ISA
