// A span of query rows against one block of keys after another: the tile of flash attention.
#pragma once

#include "skinny_tile.hpp"
#include "merge.hpp"
#include "microkernel.hpp"
#include "results.hpp"
#include "softmax_panel.hpp"

namespace fa::FA_ISA {

// kLanes rows of `numbers` numbers become columns of a panel of queries.
template <class Stored>
static void lay_queries(const typename Stored::Number* const* from, int64_t numbers, float* panel) {
  Vec rows[kLanes];
  int64_t n = 0;
  for (; n + Stored::kStep <= numbers; n += Stored::kStep, panel += kLanes * kPanel) {
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) rows[j] = Stored::load(from[j] + n);
    transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(panel + i * kPanel, rows[i]);
  }
  if (n == numbers) return;
  for (int j = 0; j < kLanes; ++j) rows[j] = Stored::load_some(from[j] + n, numbers - n);
  transpose_step<kLanes / 2>(rows);
  const int64_t left = blocks_of(numbers - n, Stored::kStep / kLanes);
  for (int64_t i = 0; i < left; ++i) store(panel + i * kPanel, rows[i]);
}

static void read_queries(const Span& span) {
  const int64_t rows = span.rows();
  const Problem& problem = span.problem;
  const bool announced = span.upcoming.near == &span.plan;  // then the task before has asked for them
  for (int64_t r = 0; !announced && r < rows; ++r) {
    ask_for_row(problem.query, problem.type, span.sequence.query + span.head_of(r) * problem.query.head,
                span.index_of(r), problem.head_size);
  }
  const bool as_they_lie = problem.rope_size == 0 && !may_round(problem);
  for (int64_t first = 0; first < rows; first += kLanes) {
    float* panel = span.s.queries + first / kPanel * kPanel * span.shape.depth + first % kPanel;
    const auto row = [&](int64_t j) { return smaller(first + j, rows - 1); };  // beyond repeats the last; nobody looks at it
    if (as_they_lie) {
      as_stored(problem, [&](auto stored) {
        using Number = typename decltype(stored)::Number;
        const Number* from[kLanes];
        for (int64_t j = 0; j < kLanes; ++j) {
          from[j] = static_cast<const Number*>(problem.query.data) + span.sequence.query +
                    span.head_of(row(j)) * problem.query.head + span.index_of(row(j)) * problem.query.row;
        }
        lay_queries<decltype(stored)>(from, problem.head_size, panel);
      });
    } else {
      const float* from[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        from[j] = query_numbers(problem, span.shape, span.sequence, span.head_of(row(j)), span.index_of(row(j)),
                                span.s.rows + j * span.shape.numbers);
      }
      lay_queries<StoredFloats>(from, span.shape.depth, panel);
    }
  }
}

static void prepare(const Span& span) {
  if (span.direct()) {
    as_stored(span.problem, [&](auto stored) { read_few_queries<decltype(stored)>(span); });
  } else {
    read_queries(span);
  }
}

// The softmax begins with the sink, where there is one, as if it were a score whose value is 0.
static void begin_sums(const Span& span, bool with_sink, float unit = 1.0f) {
  const Scratch& s = span.s;
  const int64_t rows = blocks_of(span.rows(), kPanel) * kPanel;
  for (int64_t r = 0; r < rows; ++r) {
    s.max[r] = -kInfinity;
    s.total[r] = 0;
    s.unit[r] = unit;
  }
  for (int64_t r = 0; with_sink && r < span.rows(); ++r) {
    s.max[r] = span.problem.sink[span.head_of(r)];
    s.total[r] = s.max[r] == -kInfinity ? 0.0f : 1.0f;
  }
  if (span.direct()) {
    __builtin_memset(s.sums, 0, static_cast<size_t>(span.rows() * span.columns()) * sizeof(float));
  } else {
    __builtin_memset(s.begun, 0, static_cast<size_t>(rows / kPanel));
  }
}

static void clear_panel(const Span& span, int64_t panel) {
  const int64_t floats = kPanel * span.columns();
  __builtin_memset(span.s.across + panel * floats, 0, static_cast<size_t>(floats) * sizeof(float));
}

// Panels whose rows saw no key.
static void clear_unbegun(const Span& span) {
  for (int64_t panel = 0; panel * kPanel < span.rows(); ++panel) {
    if (span.s.begun[panel] == 0) clear_panel(span, panel);
  }
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
  if (one_mask && !band) {
    for (int64_t r = 0; r < rows; ++r) s.views[r] = open;
    const Window window = open.empty() ? Window{keys, 0} : Window{open.begin / 2 * 2, open.end};
    for (int64_t panel = 0; panel * kPanel < rows; ++panel) s.windows[panel] = window;
    return !window.empty();
  }
  bool seen = false;
  for (int64_t panel = 0; panel * kPanel < rows; ++panel) {
    Window window{keys, 0};
    const int64_t end = smaller(rows, (panel + 1) * kPanel);
    for (int64_t r = panel * kPanel; r < end; ++r) {
      s.views[r] = one_mask ? within(open, problem, sequence, span.head_of(r), span.index_of(r), first, keys)
                            : view_of(problem, sequence, span.head_of(r), span.index_of(r), first, keys);
      if (s.views[r].empty()) continue;
      window.begin = smaller(window.begin, s.views[r].begin / 2 * 2);
      window.end = larger(window.end, s.views[r].end);
    }
    s.windows[panel] = window;
    seen = seen || !window.empty();
  }
  return seen;
}

// Keys and values of one block, as far as they are read where they lie.
static void add_block(const Span& span, const HeadPlan& plan, int64_t block) {
  const Problem& problem = span.problem;
  const Sequence& sequence = *plan.sequence;
  const int64_t first = block * kBlockKeys;
  const RowSpan rows{plan.head, 1, first, smaller(first + kBlockKeys, sequence.key_length)};
  if (rows.count() <= 0) return;
  span.upcoming.add(problem.key, problem.type, sequence.key, rows, problem.head_size);
  span.upcoming.add(problem.value, problem.type, sequence.value, rows, problem.value_size);
}

// The bias of some rows for one block.
static void add_bias(const Span& span, const HeadPlan& plan, const RowSpan& rows, int64_t block) {
  const Problem& problem = span.problem;
  const Sequence& sequence = *plan.sequence;
  const int64_t first = block * kBlockKeys;
  const int64_t keys = smaller(kBlockKeys, sequence.key_length - first);
  if (problem.pse == nullptr || problem.pse_column == 0 || problem.pse_compressed || keys <= 0 || rows.count() <= 0) return;
  const Strided bias{const_cast<void*>(problem.pse), sequence.pse_head, sequence.pse_row};
  span.upcoming.add(bias, problem.pse_type, sequence.pse + first, rows, keys);
}

// The rows of a span but its first panel, and these; of several heads, only those of the first one.
static RowSpan later_rows(const RowSpan& rows) { return {rows.first_head, 1, rows.begin + kPanel, rows.end}; }
static RowSpan first_rows(const RowSpan& rows) {
  return {rows.first_head, 1, rows.begin, smaller(rows.end, rows.begin + kPanel)};
}

// What is asked for while block `block` of [.., end) is in work.
static void look_ahead(const Span& span, int64_t block, int64_t end) {
  const Problem& problem = span.problem;
  Upcoming& upcoming = span.upcoming;
  upcoming.clear();
  add_bias(span, span.plan, later_rows(span.of), block);
  if (block + 1 < end) {
    add_bias(span, span.plan, first_rows(span.of), block + 1);
    add_block(span, span.plan, block + 1);
  } else {
    if (span.plan.chunks == 1) {
      upcoming.add(problem.out, problem.type, span.sequence.out, span.of, problem.value_size);
    }
    if (const HeadPlan* next = upcoming.next; next != nullptr) {
      const RowSpan& rows = upcoming.next_rows;
      upcoming.add(problem.query, problem.type, next->sequence->query, rows, problem.head_size);
      const int64_t start = banded(*next->sequence, rows.begin, rows.end - 1).begin / kBlockKeys;
      add_bias(span, *next, first_rows(rows), start);
      if (next != &span.plan) add_block(span, *next, start);
      upcoming.near = next;
    }
  }
  int64_t steps = 0;
  for (int64_t panel = 0; panel * kPanel < span.rows(); ++panel) {
    const int64_t keys = larger(0, span.s.windows[panel].end - span.s.windows[panel].begin);
    steps += blocks_of(keys, kMicroRows) * blocks_of(span.shape.depth, kStepDepth);
    steps += blocks_of(problem.value_size, kMicroRows) * blocks_of(blocks_of(keys, span.shape.unit), kStepDepth);
  }
  upcoming.spread(steps);
}

// The first panel of the first block asks for what nobody has asked for: keys to come, and the values of its own keys.
FA_INLINE void ask_for_keys(const Span& span, const BlockData& data, int64_t first, int64_t count) {
  const Problem& problem = span.problem;
  const int64_t keys = key_start(problem, span.sequence, span.plan.head);
  const int64_t values = value_start(problem, span.sequence, span.plan.head);
  for (int64_t j = first; j < first + count; ++j) {
    if (data.keys_in_place) ask_for_row(problem.key, problem.type, keys, j + kAhead, problem.head_size);
    if (data.values_in_place) ask_for_row(problem.value, problem.type, values, j, problem.value_size);
  }
}

template <int kVectors, bool kPairs>
static void attend_panel(const Span& span, int64_t panel, int64_t first, int64_t data_begin, const BlockData& data,
                         bool careful, bool fresh) {
  const Scratch& s = span.s;
  const PanelView view = panel_view(span, panel);
  const Window window = view.window;
  const int64_t depth = span.shape.depth;
  const float* queries = s.queries + panel * kPanel * depth;
  constexpr int kWhole = Width<kVectors>::kParts;
  for (int64_t v = 0; v < kPanel; v += kLanes) store(s.top + v, splat(-kInfinity));
  const bool biased = has_bias(span.problem);
  const BiasRows bias = biased ? bias_rows(span, view, first) : BiasRows{};
  int64_t scored = window.begin;  // up to here the bias is added
  float* top = all_see_all(view) && !biased ? s.top : nullptr;
  for (int64_t c = window.begin; c < window.end; c += kMicroRows) {
    if (fresh) ask_for_keys(span, data, first + c, smaller(kMicroRows, window.end - c));
    span.upcoming.refill();
    const RowsOf keys{data.keys + (c - data_begin) * data.key_row, data.key_row};
    multiply<kVectors, Sums::fresh, kPairs>(smaller(kMicroRows, window.end - c), keys, Lines{queries}, depth,
                                            Target{s.scores + c * kPanel, kPanel, nullptr, top}, span.upcoming);
    if (biased) {
      const int64_t end = c + kMicroRows;
      const Window next{scored, end < window.end ? end - (end - window.begin) % kLanes : window.end};
      add_bias<kWhole>(span, view, bias, next);
      scored = next.end;
    }
  }
  float* across = s.across + panel * kPanel * span.columns();
  const float* shrink = s.shrink + view.first_row;
  const int64_t value_size = span.problem.value_size;
  const bool begun = s.begun[panel] != 0;
  s.begun[panel] = 1;
  // The products write what holds rows and columns of the problem; the rest of a panel is read, but means nothing.
  if (!begun && (careful || kWhole == 1 || value_size < span.columns())) clear_panel(span, panel);
  if (careful) {
    soften_panel<kWhole, false>(span, view, first);
    for (int64_t r = 0; r < view.rows; ++r) {
      for (int64_t d = 0; d < value_size; ++d) across[d * kPanel + r] *= shrink[r];
      add_values_carefully(span, view.first_row + r, first, s.scores + r, kPanel, across + r, kPanel);
    }
    return;
  }
  soften_panel<kWhole, kPairs>(span, view, first);
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  const float* values = data.values + (window.begin - data_begin) / kUnit * data.value_row;
  const Lines weights{s.scores + window.begin / kUnit * kPanel};
  const int64_t count = blocks_of(window.end - window.begin, kUnit);
  for (int64_t d = 0; d < value_size; d += kMicroRows) {
    span.upcoming.refill();
    const int64_t columns = smaller(kMicroRows, value_size - d);
    const ColumnsOf some{values + d, data.value_row};
    const Target sums{across + d * kPanel, kPanel, shrink};
    if (begun) {
      multiply<kVectors, Sums::scaled, kPairs>(columns, some, weights, count, sums, span.upcoming);
    } else {
      multiply<kVectors, Sums::fresh, kPairs>(columns, some, weights, count, sums, span.upcoming);
    }
  }
}

template <bool kPairs>
static void attend_panels(const Span& span, int64_t first, int64_t keys, bool careful, bool fresh) {
  // Images of 196 patches and a class token have 5 rows beyond whole vectors: 2 % less time.
  constexpr int kShort = Isa::kHalvesPay && !kPairs ? kHalf : 1;
  const Window all = seen_by_some(span, keys);
  const BlockData data = block_data(span.problem, span.shape, span.sequence, span.plan.head, first + all.begin,
                                    all.end - all.begin, span.s.block, span.s.rows);
  for (int64_t panel = 0; panel * kPanel < span.rows(); ++panel) {
    if (span.s.windows[panel].empty()) continue;
    const int64_t left = span.rows() - panel * kPanel;
    if (left > kLanes) {
      attend_panel<2, kPairs>(span, panel, first, all.begin, data, careful, fresh);
    } else if (left <= kLanes / 2) {
      attend_panel<kShort, kPairs>(span, panel, first, all.begin, data, careful, fresh);
    } else {
      attend_panel<1, kPairs>(span, panel, first, all.begin, data, careful, fresh);
    }
    fresh = false;
  }
}

// Turns the panels of sums into rows.
static void lay_out_sums(const Span& span) {
  if (span.direct()) return;
  const int64_t columns = span.columns();
  for (int64_t first = 0; first < span.rows(); first += kLanes) {
    const float* panel = span.s.across + first / kPanel * kPanel * columns + first % kPanel;
    for (int64_t d = 0; d < columns; d += kLanes) {
      const float* from[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) from[j] = panel + (d + j) * kPanel;
      transpose_square(from, 0, span.s.sums + first * columns + d, columns);
    }
  }
}

static void attend_blocks_once(const Span& span, int64_t begin, int64_t end, bool masked, bool careful) {
  bool fresh = span.upcoming.near != &span.plan;
  span.upcoming.near = &span.plan;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * span.block_keys();
    const int64_t keys = smaller(span.block_keys(), span.sequence.key_length - first);
    if (!look(span, first, keys, masked)) continue;
    if (span.direct()) {
      as_stored(span.problem, [&](auto stored) { attend_directly<decltype(stored)>(span, first, keys); });
      continue;
    }
    look_ahead(span, block, end);
    if (span.shape.pairs()) {
      if constexpr (kHasPairs) attend_panels<true>(span, first, keys, careful, fresh);
    } else {
      attend_panels<false>(span, first, keys, careful, fresh);
    }
    fresh = false;
  }
}

// All rows over blocks [begin, end); `masked` false looks at neither the mask nor the band.
static void attend_blocks(const Span& span, int64_t begin, int64_t end, bool masked, bool with_sink) {
  begin_sums(span, with_sink);
  attend_blocks_once(span, begin, end, masked, false);
  if (!span.direct()) clear_unbegun(span);
  // Whether a value is inf or NaN, or some are too large for a sum, shows only in the sums; then all is done again, carefully.
  if (span.direct() || all_finite(span.s.across, blocks_of(span.rows(), kPanel) * kPanel * span.columns())) return;
  const int64_t last = smaller(end * span.block_keys(), span.sequence.key_length);
  bool finite = true;
  for (int64_t j = begin * span.block_keys(); finite && j < last; ++j) {
    finite = all_finite(span.value(j), span.problem.value_size);
  }
  for (int64_t r = 0; finite && r < span.rows(); ++r) {
    finite = !overflowed(span, r, span.s.across + r / kPanel * kPanel * span.columns() + r % kPanel, kPanel);
  }
  if (finite) return;
  begin_sums(span, with_sink, unit_for(span.sequence.key_length));
  attend_blocks_once(span, begin, end, masked, true);
  clear_unbegun(span);
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
  attend_blocks(span, 0, blocks_of(span.sequence.key_length, span.block_keys()), false, false);
  lay_out_sums(span);
  for (int64_t r = 0; r < span.rows(); ++r) {
    if (span.s.empty[r] != 0) write_row(span, r, NanRows::nan);
  }
}

// All rows of the span over all keys they see.
static void run_span(const Span& span) {
  prepare(span);
  const KeyRange range = banded(span.sequence, span.of.begin, span.of.end - 1);
  const int64_t keys = span.block_keys();
  attend_blocks(span, range.begin / keys, blocks_of(range.end, keys), true, span.problem.sink != nullptr);
  if (!span.direct() && all_ordinary(span)) {
    write_panels(span);
    return;
  }
  lay_out_sums(span);
  write_results(span);
}

// Chunk `n` of the keys; the first one counts the sink.
static void run_chunk(const Span& span, int64_t n) {
  const HeadPlan& plan = span.plan;
  prepare(span);
  const int64_t begin = plan.first_block + n * plan.chunk_blocks;
  attend_blocks(span, begin, smaller(begin + plan.chunk_blocks, plan.end_block), true,
                n == 0 && span.problem.sink != nullptr);
  lay_out_sums(span);
  put_partial(span, n);
}

static void run_merge(const Span& span) {
  merge_partials(span);
  write_results(span);
}

}  // namespace fa::FA_ISA
