// A span of query rows against one block of keys after another: the tile of flash attention.
#pragma once

#include "microkernel.hpp"
#include "results.hpp"
#include "soften.hpp"

namespace fa::FA_ISA {

FA_INLINE bool is_packed(const Span& span) { return span.packed.data != nullptr; }

// Packed: tile by tile, [depth][kTileRows], so that the micro-kernel finds all rows of a tile at one place for any head
// size. Direct: row by row.
static void read_queries(const Span& span) {
  const int64_t depth = span.shape.depth;
  for (int64_t r = 0; r < span.rows(); ++r) {
    if (!is_packed(span)) {
      float* out = span.s.queries + r * depth;
      const float* q = query_row(span.problem, span.sequence, span.head_of(r), span.index_of(r), out);
      if (q != out) __builtin_memcpy(out, q, static_cast<size_t>(depth) * sizeof(float));
      continue;
    }
    const float* q = query_row(span.problem, span.sequence, span.head_of(r), span.index_of(r), span.s.rows);
    float* out = span.s.queries + r / kTileRows * kTileRows * depth + r % kTileRows;
    for (int64_t d = 0; d < depth; ++d) out[d * kTileRows] = q[d];
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
  const int64_t rows = span.rows();
  const bool all_alike = !masked || same_view_for_all(span.problem, span.sequence, span.of.head_count);
  bool seen = false;
  for (int64_t tile = 0; tile * kTileRows < rows; ++tile) {
    Window window{keys, 0};
    const int64_t end = smaller(rows, (tile + 1) * kTileRows);
    for (int64_t r = tile * kTileRows; r < end; ++r) {
      if (!masked) {
        s.views[r] = {0, keys, nullptr};
      } else if (all_alike && r > 0) {
        s.views[r] = s.views[0];
      } else {
        s.views[r] = view_of(span.problem, span.sequence, span.head_of(r), span.index_of(r), first, keys);
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

static void shrink_sums(const Span& span) {
  const int64_t columns = span.columns();
  for (int64_t r = 0; r < span.rows(); ++r) {
    for (int64_t d = 0; d < columns; ++d) span.s.sums[r * columns + d] *= span.s.shrink[r];
  }
}

// For values that hold inf or NaN: a key that is not attended must not be read, for 0 * inf is NaN.
static void add_values_carefully(const Span& span, int64_t first) {
  shrink_sums(span);
  for (int64_t r = 0; r < span.rows(); ++r) {
    const View& view = span.s.views[r];
    for (int64_t j = view.begin; j < view.end; ++j) {
      if (view.mask != nullptr && view.mask[j] != 0) continue;
      direct_values(span.s.scores + r * kScoreRow + j, 0, 1, span.value(first + j), span.problem.value_size,
                    span.s.sums + r * span.columns(), 0);
    }
  }
}

static void attend_packed(const Span& span, int64_t block, int64_t first, int64_t keys) {
  const Scratch& s = span.s;
  const int64_t rows = span.rows();
  const int64_t columns = span.columns();
  const int64_t depth = span.shape.depth;
  const float* packed_keys = span.packed.data + span.shape.block_offset(block);
  const float* packed_values = packed_keys + span.shape.key_floats(keys);
  for (int64_t c = 0; c < keys; c += kPanel) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const Window window = s.windows[r / kTileRows];
      if (c < window.begin || c >= window.end) continue;
      multiply<1, kTileRows, false>(smaller(kTileRows, rows - r), s.queries + r * depth, packed_keys + c * depth, depth,
                                    s.scores + r * kScoreRow + c, kScoreRow, nullptr);
    }
  }
  soften_rows(span, first);
  if (span.packed.finite[block] == 0) {
    add_values_carefully(span, first);
    return;
  }
  for (int64_t c = 0; c < columns; c += kPanel) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const Window window = s.windows[r / kTileRows];
      if (window.empty()) continue;
      multiply<kScoreRow, 1, true>(smaller(kTileRows, rows - r), s.scores + r * kScoreRow + window.begin,
                                   packed_values + c * keys + window.begin * kPanel, window.end - window.begin,
                                   s.sums + r * columns + c, columns, s.shrink + r);
    }
  }
}

static void attend_directly(const Span& span, int64_t first, int64_t keys) {
  const Scratch& s = span.s;
  const int64_t rows = span.rows();
  const int64_t columns = span.columns();
  Window all{keys, 0};
  for (int64_t tile = 0; tile * kTileRows < rows; ++tile) {
    all.begin = smaller(all.begin, s.windows[tile].begin);
    all.end = larger(all.end, s.windows[tile].end);
  }
  for (int64_t tile = 0; tile * kTileRows < rows; ++tile) s.windows[tile] = all;
  for (int64_t j = all.begin; j < all.end; ++j) {
    direct_scores(s.queries, span.shape.depth, rows, span.key(first + j), span.shape.depth, s.scores + j, kScoreRow);
  }
  soften_rows(span, first);
  // Whether a value is inf or NaN shows only in the sums; then they are made again, carefully.
  __builtin_memcpy(s.kept, s.sums, static_cast<size_t>(rows * columns) * sizeof(float));
  shrink_sums(span);
  for (int64_t j = all.begin; j < all.end; ++j) {
    direct_values(s.scores + j, kScoreRow, rows, span.value(first + j), span.problem.value_size, s.sums, columns);
  }
  float check = 0;
  for (int64_t n = 0; n < rows * columns; ++n) check += s.sums[n] * 0.0f;
  if (check == 0) return;
  __builtin_memcpy(s.sums, s.kept, static_cast<size_t>(rows * columns) * sizeof(float));
  add_values_carefully(span, first);
}

// All rows over all their keys; `masked` false looks at neither the mask nor the band.
static void attend(const Span& span, bool masked) {
  const Sequence& sequence = span.sequence;
  begin_sums(span, masked && span.problem.sink != nullptr);
  KeyRange range{0, sequence.key_length};
  if (masked) range = banded(sequence, span.of.begin, span.of.end - 1);
  for (int64_t block = range.begin / kBlockKeys; block * kBlockKeys < range.end; ++block) {
    const int64_t first = block * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, sequence.key_length - first);
    if (!look(span, first, keys, masked)) continue;
    if (is_packed(span)) {
      attend_packed(span, block, first, keys);
    } else {
      attend_directly(span, first, keys);
    }
  }
}

static void run_span(const Span& span) {
  read_queries(span);
  attend(span, true);
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
  attend(span, false);
  for (int64_t r = 0; r < span.rows(); ++r) {
    if (span.s.empty[r] != 0) write_row(span, r, NanRows::nan);
  }
}

}  // namespace fa::FA_ISA
