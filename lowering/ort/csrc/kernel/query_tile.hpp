// What one task works on: some query rows of a key head, and the memory it works in.
#pragma once

#include "prefetch_queue.hpp"

namespace fa::FA_ISA {

// Panels begin on cache lines, so that no vector load touches two.
inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

// Floats from one row of scores to the next where rows are few: an odd number of cache lines, so that the rows of a tile do not share a set.
inline constexpr int64_t kScoreRow = kMostFewBlockKeys + 16;

// The same for rows of a bias in a panel.
inline constexpr int64_t kBiasRow = kBlockKeys + 16;

// Keys of a block that some row of a panel sees; begins at an even one.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
};

// The memory of one worker. Rows lie in panels of kPanel side by side, so that the softmax runs down the lanes; where
// they are few (skinny_tile.hpp), one after the other.
struct Scratch {
  float* queries;   // panels [depth][kPanel]
  float* scores;    // of one panel: [kBlockKeys][kPanel], then the probabilities in their place; few: [rows][kScoreRow]
  float* aside;     // what dropout keeps of these scores
  float* hidden;    // not 0 where a key is not attended
  float* across;    // panels [value_columns][kPanel]: sum of P V so far
  float* sums;      // [kBlockRows][value_columns]: the same at the end; few: from the beginning
  float* block;     // copies of K and V
  float* kept;      // [kDirectRows][value_columns]
  float* rows;      // kLanes rows of query or mask, or kPanel of bias
  float* top;       // [kPanel]: the largest product of each row of a panel
  float* max;       // [kBlockRows]: the largest score so far
  float* total;     // [kBlockRows]: sum of exp(score - max) so far
  float* part;      // [kBlockRows]: the same of this block
  float* shrink;    // [kBlockRows]: by this block, the factor of what was summed before
  float* unit;      // [kBlockRows]: the sums of P V are multiplied by it; 1, or less where they would overflow (overflow.hpp)
  View* views;      // [kBlockRows]
  Window* windows;  // [kBlockRows / kPanel]
  uint8_t* masked;  // [kScoreRow]
  uint8_t* empty;   // [kBlockRows]
  uint8_t* begun;   // [kBlockRows / kPanel]: not 0 if the panel's sums hold something

  static constexpr size_t kPanelFloats = (kBlockKeys + kLanes) * kPanel;
  static constexpr size_t kScoreFloats = kPanelFloats > kDirectRows * kScoreRow ? kPanelFloats : kDirectRows * kScoreRow;

  static size_t row_floats(const Shape& shape) {
    const int64_t rows = larger(shape.numbers, shape.value_columns()) * kLanes;
    return static_cast<size_t>(larger(larger(rows, kPanel * kBiasRow), kScoreRow) + kLanes);
  }
  static size_t query_floats(const Shape& shape) {
    return static_cast<size_t>(kBlockRows * blocks_of(shape.numbers, 2 * kLanes) * 2 * kLanes);
  }
  static size_t bytes(const Shape& shape) {
    const size_t columns = static_cast<size_t>(shape.value_columns());
    const size_t floats = query_floats(shape) + kScoreFloats + 2 * kPanelFloats + 2 * kBlockRows * columns +
                          static_cast<size_t>(shape.block_floats()) + kDirectRows * columns + row_floats(shape) +
                          kPanel + 5 * kBlockRows;
    return kAlignment + floats * sizeof(float) + kBlockRows * (sizeof(View) + sizeof(Window) + 2) + kScoreRow;
  }
  Scratch(void* memory, const Shape& shape) {
    const int64_t columns = shape.value_columns();
    queries = aligned(memory);
    scores = queries + query_floats(shape);
    aside = scores + kScoreFloats;
    hidden = aside + kPanelFloats;
    across = hidden + kPanelFloats;
    sums = across + kBlockRows * columns;
    block = sums + kBlockRows * columns;
    kept = block + shape.block_floats();
    rows = kept + kDirectRows * columns;
    top = rows + row_floats(shape);
    max = top + kPanel;
    total = max + kBlockRows;
    part = total + kBlockRows;
    shrink = part + kBlockRows;
    unit = shrink + kBlockRows;
    views = reinterpret_cast<View*>(unit + kBlockRows);
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    masked = reinterpret_cast<uint8_t*>(windows + kBlockRows);
    empty = masked + kScoreRow;
    begun = empty + kBlockRows;
  }
};

struct Span {
  const Problem& problem;
  const Shape& shape;
  const HeadPlan& plan;
  const Sequence& sequence;
  const RowSpan of;
  const Scratch& s;
  Upcoming& upcoming;

  int64_t rows() const { return of.count(); }
  // Rows are so few that both products come straight from K and V.
  bool direct() const { return rows() <= plan.direct_rows; }
  int64_t block_keys() const { return direct() ? plan.few_block_keys : kBlockKeys; }
  int64_t columns() const { return shape.value_columns(); }
  int64_t head_of(int64_t r) const { return of.head_of(r); }
  int64_t index_of(int64_t r) const { return of.index_of(r); }

  const float* value(int64_t j) const { return value_row(problem, sequence, plan.head, j, s.rows); }
};

// The columns of a block that some row of the span sees.
static Window seen_by_some(const Span& span, int64_t keys) {
  Window all{keys, 0};
  for (int64_t panel = 0; panel * kPanel < span.rows(); ++panel) {
    all.begin = smaller(all.begin, span.s.windows[panel].begin);
    all.end = larger(all.end, span.s.windows[panel].end);
  }
  return all;
}

}  // namespace fa::FA_ISA
