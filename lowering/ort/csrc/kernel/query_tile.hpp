// What one task works on: a tile of query rows that share a key head, and the memory of the worker.
#pragma once

#include "prefetch_queue.hpp"

namespace fa::FA_ISA {

// Panels begin on cache lines, so that no vector load crosses from one cache line into the next.
inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

// Floats from one row of scores to the next in a skinny tile: an odd number of cache lines, so that the rows do not share a
// set.
inline constexpr int64_t kScoreStride = kMostSkinnyBlockKeys + 16;

// The same for rows of a bias in a panel.
inline constexpr int64_t kBiasStride = kBlockKeys + 16;

// The keys of a block that some row of a panel sees. The first one is even, because products of pairs
// (pairs.hpp) take two keys at a time.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
};

// The memory of one worker.
//
// Query rows lie in panels of kPanel: a line of a panel holds one number of each row, so that the softmax needs no sums
// across the lanes. In a skinny tile (skinny_tile.hpp) they lie one after the other.
struct Scratch {
  float* queries;         // panels [depth][kPanel]; skinny: [rows][floats]
  float* scores;          // of one panel [kBlockKeys][kPanel], later the probabilities; skinny: [rows][kScoreStride]
  float* keep;            // [kBlockKeys][kPanel]: not 0 where dropout keeps the probability
  float* masked_lanes;    // [kBlockKeys][kPanel]: not 0 where the mask hides a key
  float* acc_panels;      // panels [padded_value_size][kPanel]: O = P V so far
  float* acc_rows;        // [rows][padded_value_size]: the same as rows, at the end; with few rows from the beginning
  float* block;           // copies of K and V
  float* saved_acc;       // [kSkinnyRows][padded_value_size]: acc_rows before the present block
  float* row_buffer;      // kLanes rows of query or mask, or kPanel rows of bias
  float* panel_max;       // [kPanel]: the largest entry of scores for each row of a panel, as multiply_keys leaves it
  float* max;             // [rows]: the largest score so far
  float* sum;             // [rows]: the sum of exp(score - max) so far
  float* block_sum;       // [rows]: the same for this block
  float* rescale;         // [rows]: the factor of the earlier sums; while the softmax runs, first its logarithm
  float* overflow_scale;  // [rows]: a factor of the values, 1 or smaller: see overflow.hpp
  View* views;            // [rows]: the keys of the block that each row sees
  Window* windows;        // [rows / kPanel]: the keys of the block that some row of each panel sees
  uint8_t* mask_bytes;    // [kScoreStride]
  uint8_t* empty;         // [rows]: whether the row attends no key
  uint8_t* initialised;   // [rows / kPanel]: whether acc_panels of the panel holds sums
  uint8_t* guarded;       // [rows / kPanel]: whether the panel is computed again with guards: see overflow.hpp

  static constexpr size_t kPanelFloats = (kBlockKeys + kLanes) * kPanel;
  static constexpr size_t kScoreFloats =
      kPanelFloats > kSkinnyRows * kScoreStride ? kPanelFloats : kSkinnyRows * kScoreStride;

  static size_t row_floats(const Shape& shape) {
    const int64_t rows = larger(shape.qk_size, shape.padded_value_size()) * kLanes;
    return static_cast<size_t>(larger(larger(rows, kPanel * kBiasStride), kScoreStride) + kLanes);
  }
  static size_t query_floats(const Shape& shape, int64_t rows) {
    return static_cast<size_t>(rows * ceil_div(shape.qk_size, 2 * kLanes) * 2 * kLanes);
  }
  // For tiles of up to `rows` rows, a multiple of kPanel.
  static size_t bytes(const Shape& shape, int64_t rows) {
    const size_t columns = static_cast<size_t>(shape.padded_value_size());
    const size_t count = static_cast<size_t>(rows);
    const size_t floats = query_floats(shape, rows) + kScoreFloats + 2 * kPanelFloats + 2 * count * columns +
                          static_cast<size_t>(shape.block_floats()) + kSkinnyRows * columns + row_floats(shape) + kPanel +
                          5 * count;
    return kAlignment + floats * sizeof(float) + count * (sizeof(View) + sizeof(Window) + 3) + kScoreStride;
  }
  Scratch(void* memory, const Shape& shape, int64_t rows) {
    const int64_t columns = shape.padded_value_size();
    queries = aligned(memory);
    scores = queries + query_floats(shape, rows);
    keep = scores + kScoreFloats;
    masked_lanes = keep + kPanelFloats;
    acc_panels = masked_lanes + kPanelFloats;
    acc_rows = acc_panels + rows * columns;
    block = acc_rows + rows * columns;
    saved_acc = block + shape.block_floats();
    row_buffer = saved_acc + kSkinnyRows * columns;
    panel_max = row_buffer + row_floats(shape);
    max = panel_max + kPanel;
    sum = max + rows;
    block_sum = sum + rows;
    rescale = block_sum + rows;
    overflow_scale = rescale + rows;
    views = reinterpret_cast<View*>(overflow_scale + rows);
    windows = reinterpret_cast<Window*>(views + rows);
    mask_bytes = reinterpret_cast<uint8_t*>(windows + rows);
    empty = mask_bytes + kScoreStride;
    initialised = empty + rows;
    guarded = initialised + rows;
  }
};

struct QueryTile {
  const Problem& problem;
  const Shape& shape;
  const HeadPlan& plan;
  const Sequence& sequence;
  const RowRange range;
  const Scratch& s;
  PrefetchQueue& prefetches;

  int64_t rows() const { return range.count(); }
  // A skinny tile has so few rows that both products read K and V directly.
  bool skinny() const { return rows() <= plan.skinny_rows && plan.tiling.is_whole(range); }
  // A tile of few rows has more than half a vector of them, and at most one. Its weighted values are added up by few_rows.hpp.
  static constexpr bool kHasFewRows = kLanes > kSkinnyRows && !Isa::kHasTiles;
  bool few_rows() const {
    return kHasFewRows && rows() <= kLanes && rows() > kLanes / 2 && !rounds_to_bfloat16(problem);
  }
  // Column d of the weighted values of row r is sums_of(r)[d * sum_step()], unless the tile is skinny.
  float* sums_of(int64_t r) const {
    return few_rows() ? s.acc_rows + r * columns() : s.acc_panels + r / kPanel * kPanel * columns() + r % kPanel;
  }
  int64_t sum_step() const { return few_rows() ? 1 : kPanel; }
  int64_t block_keys() const { return skinny() ? plan.skinny_block_keys : kBlockKeys; }
  int64_t columns() const { return shape.padded_value_size(); }
  int64_t head_of(int64_t r) const { return range.head_of(r); }
  int64_t index_of(int64_t r) const { return range.index_of(r); }

  const float* value(int64_t j) const { return value_row(problem, sequence, plan.head, j, s.row_buffer); }
};

// The keys of a block that some row of the tile sees.
static Window visible_to_some(const QueryTile& tile, int64_t keys) {
  Window all{keys, 0};
  for (int64_t panel = 0; panel * kPanel < tile.rows(); ++panel) {
    all.begin = smaller(all.begin, tile.s.windows[panel].begin);
    all.end = larger(all.end, tile.s.windows[panel].end);
  }
  return all;
}

}  // namespace fa::FA_ISA
