// A span of query rows against one block of keys after another: the tile of flash attention.
#pragma once

#include "few.hpp"
#include "merge.hpp"
#include "microkernel.hpp"
#include "results.hpp"

namespace fa::FA_ISA {

// Tile by tile, [depth][kTileRows], so that the micro-kernel finds all rows of a tile at one place for any head size.
static void read_queries(const Span& span) {
  const int64_t depth = span.shape.depth;
  for (int64_t r = 0; r < span.rows(); ++r) {
    const int64_t head = span.head_of(r);
    const int64_t i = span.index_of(r);
    const float* q = span.shape.pairs() ? query_pairs(span.problem, span.sequence, head, i, span.s.rows)
                                        : query_row(span.problem, span.sequence, head, i, span.s.rows);
    float* out = span.s.queries + r / kTileRows * kTileRows * depth + r % kTileRows;
    for (int64_t d = 0; d < depth; ++d) out[d * kTileRows] = q[d];
  }
}

static void prepare(const Span& span) {
  if (span.plan.source == Source::direct) {
    as_stored(span, [&](auto stored) { read_few_queries<decltype(stored)>(span); });
  } else {
    read_queries(span);
  }
}

// The softmax begins with the sink, where there is one, as if it were a score whose value is 0.
static void begin_sums(const Span& span, bool with_sink) {
  const Scratch& s = span.s;
  for (int64_t r = 0; r < kBlockRows; ++r) {
    s.max[r] = -kInfinity;
    s.total[r] = 0;
  }
  for (int64_t r = 0; with_sink && r < span.rows(); ++r) {
    s.max[r] = span.problem.sink[span.head_of(r)];
    s.total[r] = s.max[r] == -kInfinity ? 0.0f : 1.0f;
  }
  for (int64_t n = 0; n < span.rows() * span.columns(); ++n) s.sums[n] = 0;
}

// Fills views and windows; false if no row sees any of these keys.
static bool look(const Span& span, int64_t first, int64_t keys, bool masked) {
  const Scratch& s = span.s;
  const Problem& problem = span.problem;
  const Sequence& sequence = span.sequence;
  const int64_t rows = span.rows();
  const bool one_mask = !masked || one_mask_row(problem, span.of.head_count);
  const bool band = masked && has_band(sequence);
  View open{0, keys, nullptr};
  if (masked && one_mask && problem.mask != nullptr) {
    open = less_hidden(open, problem, sequence, span.head_of(0), span.index_of(0), first);
  }
  bool seen = false;
  for (int64_t tile = 0; tile * kTileRows < rows; ++tile) {
    Window window{keys, 0};
    const int64_t end = smaller(rows, (tile + 1) * kTileRows);
    for (int64_t r = tile * kTileRows; r < end; ++r) {
      if (!one_mask) {
        s.views[r] = view_of(problem, sequence, span.head_of(r), span.index_of(r), first, keys);
      } else if (band) {
        s.views[r] = within(open, problem, sequence, span.head_of(r), span.index_of(r), first, keys);
      } else {
        s.views[r] = open;
      }
      if (s.views[r].empty()) continue;
      window.begin = smaller(window.begin, s.views[r].begin / kPanel * kPanel);
      window.end = larger(window.end, s.views[r].end);
    }
    s.windows[tile] = window;
    seen = seen || !window.empty();
  }
  return seen;
}

// K and V of one block, or of a part of it, as panels.
struct BlockData {
  const float* keys;
  const float* values;
  int64_t begin;        // the first key in the block
  int64_t count;
  bool finite;  // all values are
};

// Where the block is not shared it is packed here, as far as some row sees it.
static BlockData block_data(const Span& span, int64_t block, int64_t first, int64_t keys) {
  const PackShape& shape = span.shape;
  const HeadPlan& plan = span.plan;
  if (plan.source == Source::shared) {
    const float* packed = plan.packed + shape.block_offset(block);
    return {packed, packed + shape.key_floats(keys), 0, keys, plan.finite[block] != 0};
  }
  const Window all = seen_by_some(span, keys);
  const int64_t count = all.end - all.begin;
  float* packed = span.s.block;
  const bool finite =
      pack_block(span.problem, shape, span.sequence, plan.head, first + all.begin, count, packed, span.s.rows);
  return {packed, packed + shape.key_floats(count), all.begin, count, finite};
}

template <bool kPairs>
static void attend_panels(const Span& span, int64_t block, int64_t first, int64_t keys) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  const Scratch& s = span.s;
  const int64_t rows = span.rows();
  const int64_t columns = span.columns();
  const int64_t depth = span.shape.depth;
  const BlockData data = block_data(span, block, first, keys);
  for (int64_t c = data.begin; c < data.begin + data.count; c += kPanel) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const Window window = s.windows[r / kTileRows];
      if (c < window.begin || c >= window.end) continue;
      multiply<1, kTileRows, false, kPairs>(smaller(kTileRows, rows - r), s.queries + r * depth,
                                            data.keys + (c - data.begin) * depth, depth, s.scores + r * kScoreRow + c,
                                            kScoreRow, nullptr);
    }
  }
  soften_rows(span, first);
  if (!data.finite) {
    shrink_sums(span);
    add_values_carefully(span, first);
    return;
  }
  if constexpr (kPairs) {
    for (int64_t r = 0; r < rows; ++r) {
      const Window window = s.windows[r / kTileRows];
      if (!window.empty()) narrow_to_pairs(s.scores + r * kScoreRow + window.begin, window.end - window.begin);
    }
  }
  const int64_t panel_rows = blocks_of(data.count, kUnit);
  for (int64_t c = 0; c < columns; c += kPanel) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const Window window = s.windows[r / kTileRows];
      if (window.empty()) continue;
      const float* values = data.values + c * panel_rows + (window.begin - data.begin) / kUnit * kPanel;
      multiply<kScoreRow, 1, true, kPairs>(smaller(kTileRows, rows - r), s.scores + r * kScoreRow + window.begin,
                                           values, blocks_of(window.end - window.begin, kUnit),
                                           s.sums + r * columns + c, columns, s.shrink + r);
    }
  }
}

// Blocks [begin, end); `masked` false looks at neither the mask nor the band.
static void attend_blocks(const Span& span, int64_t begin, int64_t end, bool masked) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, span.sequence.key_length - first);
    if (!look(span, first, keys, masked)) continue;
    if (span.plan.source == Source::direct) {
      as_stored(span, [&](auto stored) { attend_directly<decltype(stored)>(span, first, keys); });
    } else if (span.shape.pairs()) {
      if constexpr (kHasPairs) attend_panels<true>(span, block, first, keys);
    } else {
      attend_panels<false>(span, block, first, keys);
    }
  }
}

static void write_results(const Span& span) {
  add_excluded(span);
  bool some_empty = false;
  for (int64_t r = 0; r < span.rows(); ++r) {
    span.s.empty[r] = is_empty(span, r);
    some_empty = some_empty || span.s.empty[r] != 0;
    write_statistics(span, r);
    if (span.s.empty[r] == 0) write_row(span, r, span.problem.nan_rows);
  }
  if (!some_empty) return;
  if (span.problem.empty_rows != EmptyRows::unmasked) {
    write_empty_rows(span);
    return;
  }
  prepare(span);
  begin_sums(span, false);
  attend_blocks(span, 0, blocks_of(span.sequence.key_length, kBlockKeys), false);
  for (int64_t r = 0; r < span.rows(); ++r) {
    if (span.s.empty[r] != 0) write_row(span, r, NanRows::nan);
  }
}

// All rows of the span over all keys they see.
static void run_span(const Span& span) {
  prepare(span);
  begin_sums(span, span.problem.sink != nullptr);
  const KeyRange range = banded(span.sequence, span.of.begin, span.of.end - 1);
  attend_blocks(span, range.begin / kBlockKeys, blocks_of(range.end, kBlockKeys), true);
  write_results(span);
}

// Chunk `n` of the keys; the first one counts the sink.
static void run_chunk(const Span& span, int64_t n) {
  const HeadPlan& plan = span.plan;
  prepare(span);
  begin_sums(span, n == 0 && span.problem.sink != nullptr);
  const int64_t begin = plan.first_block + n * plan.chunk_blocks;
  attend_blocks(span, begin, smaller(begin + plan.chunk_blocks, plan.end_block), true);
  put_partial(span, n);
}

static void run_merge(const Span& span) {
  merge_partials(span);
  write_results(span);
}

}  // namespace fa::FA_ISA
