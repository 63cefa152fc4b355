// What one task works on: some query rows of a key head, and the memory it works in.
#pragma once

#include "direct.hpp"
#include "pack.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of one task: a multiple of every kTileRows. Each row tile reads a packed block again, from the second-level
// cache; 48 rows are as fast at 512 x 512 and 5 % slower where few rows meet many keys, 144 and 192 rows are no faster.
inline constexpr int64_t kBlockRows = 96;

// Floats from one score row to the next: an odd number of cache lines, so that the rows of a tile do not share a set.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;

// One key head of one sequence. `data` is null if its query rows are few: then it is not packed.
struct PackedHead {
  const Sequence* sequence;
  int64_t head;
  float* data;
  uint8_t* finite;  // one flag for each block of values
};

// Query rows [begin, end) of some heads that share a key head.
struct RowSpan {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t count() const { return head_count * per_head(); }
};

// Columns of a block that some row of a tile of kTileRows sees; begins at a panel.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
};

// The memory of one worker.
struct Scratch {
  float* queries;   // packed: tiles of [depth][kTileRows]; direct: [kDirectRows][depth]
  float* scores;    // [kBlockRows][kScoreRow], then the probabilities in their place
  float* sums;      // [kBlockRows][value_columns]: sum of P V so far
  float* kept;      // [kDirectRows][value_columns]
  float* rows;      // kLanes converted rows of K, or one of query, value or bias
  float* max;       // [kBlockRows]: the largest score so far
  float* total;     // [kBlockRows]: sum of exp(score - max) so far
  float* part;      // [kBlockRows]: the same of this block
  float* shrink;    // [kBlockRows]: by this block, the factor of what was summed before
  View* views;      // [kBlockRows]
  Window* windows;  // [kBlockRows / kTileRows]
  uint8_t* hidden;  // [kScoreRow]
  uint8_t* empty;   // [kBlockRows]

  static size_t row_floats(const PackShape& shape) {
    return static_cast<size_t>(larger(larger(shape.depth * kLanes, shape.value_columns()), kScoreRow));
  }
  static size_t bytes(const PackShape& shape) {
    const size_t columns = static_cast<size_t>(shape.value_columns());
    const size_t depth = static_cast<size_t>(shape.depth);
    const size_t floats =
        kBlockRows * (depth + kScoreRow + columns + 4) + kDirectRows * columns + row_floats(shape);
    return floats * sizeof(float) + kBlockRows * (sizeof(View) + sizeof(Window) + 1) + kScoreRow;
  }
  Scratch(void* memory, const PackShape& shape) {
    scores = static_cast<float*>(memory);
    sums = scores + kBlockRows * kScoreRow;
    kept = sums + kBlockRows * shape.value_columns();
    max = kept + kDirectRows * shape.value_columns();
    total = max + kBlockRows;
    part = total + kBlockRows;
    shrink = part + kBlockRows;
    queries = shrink + kBlockRows;
    rows = queries + kBlockRows * shape.depth;
    views = reinterpret_cast<View*>(rows + row_floats(shape));
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows);
    empty = hidden + kScoreRow;
  }
};

struct Span {
  const Problem& problem;
  const PackShape& shape;
  const PackedHead& packed;
  const Sequence& sequence;
  const RowSpan of;
  const Scratch& s;

  int64_t rows() const { return of.count(); }
  int64_t columns() const { return shape.value_columns(); }
  int64_t head_of(int64_t r) const { return of.first_head + r / of.per_head(); }
  int64_t index_of(int64_t r) const { return of.begin + r % of.per_head(); }

  const float* key(int64_t j) const { return key_row(problem, sequence, packed.head, j, s.rows); }
  const float* value(int64_t j) const { return value_row(problem, sequence, packed.head, j, s.rows); }
};

}  // namespace fa::FA_ISA
