// FlashAttention's inner loop: a tile of query rows meets one block of keys after another.
#pragma once

#include "few_rows.hpp"
#include "finite.hpp"
#include "skinny_tile.hpp"
#include "merge.hpp"
#include "results.hpp"
#include "softmax_panel.hpp"
#include "tile_product.hpp"

namespace fa::FA_ISA {

// kLanes query rows of `qk_size` numbers become columns of a panel.
template <class Stored>
static void transpose_queries(const typename Stored::Number* const* from, int64_t qk_size, float* panel) {
  Vec rows[kLanes];
  int64_t n = 0;
  for (; n + Stored::kPerLoad <= qk_size; n += Stored::kPerLoad, panel += kLanes * kPanel) {
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) rows[j] = Stored::load(from[j] + n);
    transpose_step<kLanes / 2>(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(panel + i * kPanel, rows[i]);
  }
  if (n == qk_size) return;
  for (int j = 0; j < kLanes; ++j) rows[j] = Stored::load_partial(from[j] + n, qk_size - n);
  transpose_step<kLanes / 2>(rows);
  const int64_t left = ceil_div(qk_size - n, Stored::kPerLoad / kLanes);
  for (int64_t i = 0; i < left; ++i) store(panel + i * kPanel, rows[i]);
}

// Loads the query rows into panels [depth][kPanel].
static void load_queries(const QueryTile& tile) {
  const int64_t rows = tile.rows();
  const Problem& problem = tile.problem;
  const bool prefetched = tile.prefetches.cached_head == &tile.plan;  // then the task before has prefetched them
  for (int64_t r = 0; !prefetched && r < rows; ++r) {
    prefetch_row(problem.query, problem.type, tile.sequence.query + tile.head_of(r) * problem.query.head,
                 tile.index_of(r), problem.head_size);
  }
  const bool in_place = problem.rope_size == 0 && !rounds_to_bfloat16(problem);
  for (int64_t first = 0; first < rows; first += kLanes) {
    float* panel = tile.s.queries + first / kPanel * kPanel * tile.shape.depth + first % kPanel;
    const auto row = [&](int64_t j) { return smaller(first + j, rows - 1); };  // rows beyond the last repeat it, unused
    if (in_place) {
      with_stored_type(problem, [&](auto stored) {
        using Number = typename decltype(stored)::Number;
        const Number* from[kLanes];
        for (int64_t j = 0; j < kLanes; ++j) {
          from[j] = static_cast<const Number*>(problem.query.data) + tile.sequence.query +
                    tile.head_of(row(j)) * problem.query.head + tile.index_of(row(j)) * problem.query.row;
        }
        transpose_queries<decltype(stored)>(from, problem.head_size, panel);
      });
    } else {
      const float* from[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        from[j] = query_operand(problem, tile.shape, tile.sequence, tile.head_of(row(j)), tile.index_of(row(j)),
                                tile.s.row_buffer + j * tile.shape.qk_size);
      }
      transpose_queries<StoredFloats>(from, tile.shape.depth, panel);
    }
  }
}

// Loads the query rows of the tile in the layout that its products take.
static void prepare(const QueryTile& tile) {
  if (tile.skinny()) {
    with_stored_type(tile.problem, [&](auto stored) { read_skinny_queries<decltype(stored)>(tile); });
  } else {
    load_queries(tile);
  }
}

// Resets max and sum of the rows from `first` to `end`, a multiple of kPanel. With a sink, the softmax begins as if the sink
// were a score whose value is 0.
static void initialise_rows(const QueryTile& tile, int64_t first, int64_t end, bool with_sink, float overflow_scale) {
  const Scratch& s = tile.s;
  for (int64_t r = first; r < end; ++r) {
    s.max[r] = -kInfinity;
    s.sum[r] = 0;
    s.overflow_scale[r] = overflow_scale;
  }
  for (int64_t r = first; with_sink && r < smaller(end, tile.rows()); ++r) {
    s.max[r] = tile.problem.sink[tile.head_of(r)];
    s.sum[r] = s.max[r] == -kInfinity ? 0.0f : 1.0f;
  }
}

// Resets max, sum and accumulators of all rows.
static void initialise(const QueryTile& tile, bool with_sink) {
  const int64_t rows = ceil_div(tile.rows(), kPanel) * kPanel;
  initialise_rows(tile, 0, rows, with_sink, 1.0f);
  if (tile.skinny()) {
    __builtin_memset(tile.s.acc_rows, 0, static_cast<size_t>(tile.rows() * tile.columns()) * sizeof(float));
  } else {
    __builtin_memset(tile.s.initialised, 0, static_cast<size_t>(rows / kPanel));
  }
}

// The sums of a panel are this many floats from sums_of() its first row on.
static int64_t panel_sums(const QueryTile& tile) { return (tile.few_rows() ? tile.rows() : kPanel) * tile.columns(); }

static void clear_panel(const QueryTile& tile, int64_t panel) {
  __builtin_memset(tile.sums_of(panel * kPanel), 0, static_cast<size_t>(panel_sums(tile)) * sizeof(float));
}

// Clears the panels whose rows saw no key.
static void clear_uninitialised(const QueryTile& tile) {
  for (int64_t panel = 0; panel * kPanel < tile.rows(); ++panel) {
    if (tile.s.initialised[panel] == 0) clear_panel(tile, panel);
  }
}

// Fills views and windows for keys [first, first + keys). Returns whether some row sees one of them. If `restricted`, the
// mask and the band apply; otherwise every row sees every key (cpu_empty_rows "unmasked").
static bool find_views(const QueryTile& tile, int64_t first, int64_t keys, bool restricted) {
  const Scratch& s = tile.s;
  const Problem& problem = tile.problem;
  const Sequence& sequence = tile.sequence;
  const int64_t rows = tile.rows();
  const bool shared_mask = !restricted || rows_share_mask(problem, tile.range.head_count);
  const bool band = restricted && has_band(sequence);
  View open{0, keys, nullptr};
  if (restricted && shared_mask && problem.mask != nullptr) {
    open = without_masked(open, problem, sequence, tile.head_of(0), tile.index_of(0), first);
  }
  if (shared_mask && !band) {
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
      s.views[r] = shared_mask ? restricted_to_band(open, problem, sequence, tile.head_of(r), tile.index_of(r), first, keys)
                            : view_of(problem, sequence, tile.head_of(r), tile.index_of(r), first, keys);
      if (s.views[r].empty()) continue;
      window.begin = smaller(window.begin, s.views[r].begin / 2 * 2);
      window.end = larger(window.end, s.views[r].end);
    }
    s.windows[panel] = window;
    seen = seen || !window.empty();
  }
  return seen;
}

// Queues the keys or the values of a block that begins at key `first`, whether they will be read in place or copied. Rope parts
// are not queued.
static void prefetch_keys(const QueryTile& tile, const HeadPlan& plan, int64_t first) {
  const Problem& problem = tile.problem;
  const RowRange rows{plan.head, 1, first, smaller(first + kBlockKeys, plan.sequence->key_length)};
  if (rows.count() > 0) tile.prefetches.enqueue(problem.key, problem.type, plan.sequence->key, rows, problem.head_size);
}
static void prefetch_values(const QueryTile& tile, const HeadPlan& plan, int64_t first) {
  const Problem& problem = tile.problem;
  const RowRange rows{plan.head, 1, first, smaller(first + kBlockKeys, plan.sequence->key_length)};
  if (rows.count() > 0) tile.prefetches.enqueue(problem.value, problem.type, plan.sequence->value, rows, problem.value_size);
}

// Queues the bias of some rows for one block.
static void prefetch_bias(const QueryTile& tile, const HeadPlan& plan, const RowRange& rows, int64_t block) {
  const Problem& problem = tile.problem;
  const Sequence& sequence = *plan.sequence;
  const int64_t first = block * kBlockKeys;
  const int64_t keys = smaller(kBlockKeys, sequence.key_length - first);
  if (problem.pse == nullptr || problem.pse_column == 0 || problem.pse_compressed || keys <= 0 || rows.count() <= 0) return;
  const Strided bias{const_cast<void*>(problem.pse), sequence.pse_head, sequence.pse_row};
  tile.prefetches.enqueue(bias, problem.pse_type, sequence.pse + first, rows, keys);
}

// The rows of a tile after its first panel, and the rows of the first panel. If the tile has several heads, only those of its
// first head.
static RowRange rows_after_first_panel(const RowRange& rows) { return {rows.first_head, 1, rows.begin + kPanel, rows.end}; }
static RowRange first_panel_rows(const RowRange& rows) {
  return {rows.first_head, 1, rows.begin, smaller(rows.end, rows.begin + kPanel)};
}

// Decides what is prefetched while block `block` of [.., end) is computed.
static void plan_prefetches(const QueryTile& tile, int64_t block, int64_t end) {
  const Problem& problem = tile.problem;
  PrefetchQueue& prefetches = tile.prefetches;
  prefetches.clear();
  // A tile of few rows reads the values of this block in place, after it has multiplied the keys.
  if (tile.few_rows()) prefetch_values(tile, tile.plan, block * kBlockKeys);
  prefetch_bias(tile, tile.plan, rows_after_first_panel(tile.range), block);
  if (block + 1 < end) {
    prefetch_bias(tile, tile.plan, first_panel_rows(tile.range), block + 1);
    prefetch_keys(tile, tile.plan, (block + 1) * kBlockKeys);
    if (!tile.few_rows()) prefetch_values(tile, tile.plan, (block + 1) * kBlockKeys);
  } else {
    if (tile.plan.splits == 1) {
      prefetches.enqueue(problem.out, problem.type, tile.sequence.out, tile.range, problem.value_size);
    }
    if (const HeadPlan* next = prefetches.next; next != nullptr) {
      const RowRange& rows = prefetches.next_rows;
      prefetches.enqueue(problem.query, problem.type, next->sequence->query, rows, problem.head_size);
      const int64_t start = prefetches.next_key / kBlockKeys;
      prefetch_bias(tile, *next, first_panel_rows(rows), start);
      if (next != &tile.plan || next->splits > 1) {
        prefetch_keys(tile, *next, start * kBlockKeys);
        if (rows.count() > kLanes) prefetch_values(tile, *next, start * kBlockKeys);
      }
      prefetches.cached_head = next;
    }
  }
  const int64_t rows_at_once = tile.shape.pairs() ? kProductRows<true> : kProductRows<false>;
  const int64_t columns_at_once = tile.few_rows() ? kLanes : rows_at_once;
  int64_t steps = 0;
  for (int64_t panel = 0; panel * kPanel < tile.rows(); ++panel) {
    const int64_t keys = larger(0, tile.s.windows[panel].end - tile.s.windows[panel].begin);
    steps += ceil_div(keys, rows_at_once) * ceil_div(tile.shape.depth, kPrefetchDepth);
    steps += ceil_div(problem.value_size, columns_at_once) * ceil_div(ceil_div(keys, tile.shape.packing), kPrefetchDepth);
  }
  prefetches.pace(steps);
}

// Called while the first panel of a block runs that nobody has prefetched. For `count` keys from `first` on, it prefetches
// the keys that follow at kPrefetchDistance, and these keys' values.
FA_INLINE void prefetch_panel(const QueryTile& tile, const KvBlock& data, int64_t first, int64_t count) {
  const Problem& problem = tile.problem;
  const int64_t keys = key_start(problem, tile.sequence, tile.plan.head);
  const int64_t values = value_start(problem, tile.sequence, tile.plan.head);
  for (int64_t j = first; j < first + count; ++j) {
    if (data.keys_in_place) prefetch_row(problem.key, problem.type, keys, j + kPrefetchDistance, problem.head_size);
    if (data.values_in_place && !tile.few_rows()) prefetch_row(problem.value, problem.type, values, j, problem.value_size);
  }
}

// One panel of query rows and the block of keys from `first` on. `data` begins at the block's key `data_begin`.
struct PanelBlock {
  const QueryTile& tile;
  const PanelView& view;
  int64_t panel;
  int64_t first;
  int64_t data_begin;
  const KvBlock& data;
};

// Copies `count` keys of the block from `key` on. (noinline: so that products of keys in place are compiled as if there were no
// copies)
[[gnu::noinline]] static const float* copy_some_keys(const PanelBlock& b, int64_t key, int64_t count) {
  const QueryTile& tile = b.tile;
  copy_keys(tile.problem, tile.shape, tile.sequence, tile.plan.head, b.first + key, count, tile.s.block, tile.s.row_buffer);
  return tile.s.block;
}

// Computes scores [keys][kPanel] from K Q^T. Without cap and bias these are products that are not scaled yet. With a soft
// cap they are capped scores. With a bias they are final scores. softmax_panel applies what is left of the scale.
// Micro-tiles take kProductRows keys. `cold`: nobody has prefetched the block.
template <int kVectors, bool kPairs, bool kCapped = false>
FA_INLINE void multiply_keys(const PanelBlock& b, bool cold) {
  const QueryTile& tile = b.tile;
  const Scratch& s = tile.s;
  const Window window = b.view.window;
  const int64_t depth = tile.shape.depth;
  const float* queries = s.queries + b.panel * kPanel * depth;
  for (int64_t v = 0; v < kPanel; v += kLanes) store(s.panel_max + v, splat(-kInfinity));
  const bool biased = has_bias(tile.problem);
  const BiasRows bias = biased ? bias_rows(tile, b.view, b.first) : BiasRows{};
  constexpr int64_t kRows = kProductRows<kPairs>;
  int64_t scored = window.begin;  // the bias is added up to here
  float* column_max = all_visible(b.view) && !biased && !kCapped ? s.panel_max : nullptr;
  for (int64_t c = window.begin; c < window.end; c += kRows) {
    if (cold) prefetch_panel(tile, b.data, b.first + c, smaller(kRows, window.end - c));
    tile.prefetches.refill();
    const int64_t count = smaller(kRows, window.end - c);
    const int64_t at = c - b.data_begin;
    const float* rows = b.data.keys_follow ? copy_some_keys(b, c, count) : b.data.keys + at * b.data.key_stride;
    const RowMajor keys{rows, b.data.key_stride};
    multiply_operands<kVectors, Beta::zero, kPairs>(count, keys, PanelB{queries}, depth,
                                                    Output{s.scores + c * kPanel, kPanel, nullptr, column_max}, tile.prefetches);
    if constexpr (kCapped) {
      cap_products<Width<kVectors>::kParts>(tile, {c, smaller(c + kRows, window.end)}, biased);
    }
    if (biased) {
      const int64_t end = c + kRows;
      const Window next{scored, end < window.end ? end - (end - window.begin) % kLanes : window.end};
      add_bias<Width<kVectors>::kParts>(tile, b.view, bias, next);
      scored = next.end;
    }
  }
}

// The same with a soft cap. (noinline: so that the function without a cap is compiled as if there were none)
template <int kVectors, bool kPairs>
[[gnu::noinline]] static void multiply_keys_capped(const PanelBlock& b, bool cold) {
  multiply_keys<kVectors, kPairs, true>(b, cold);
}

// The values as an operand A whose rows are columns of V, from key `first` of the block (or pair of keys) and column `d` on.
template <bool kPairs>
FA_INLINE auto columns_of(const KvBlock& data, int64_t first, int64_t d) {
  if constexpr (kPairs && Isa::kHasTiles) {
    return RowMajor{data.values + d * data.value_stride + first, data.value_stride};
  } else {
    return ColumnMajor{data.values + first * data.value_stride + d, data.value_stride};
  }
}

// acc_panels [value column][kPanel] = acc_panels diag(rescale) + V^T P. Micro-tiles take kProductRows columns of V. The
// accumulators are not read unless they are `initialised`.
template <int kVectors, bool kPairs>
FA_INLINE void multiply_values(const PanelBlock& b, float* acc_panels, const float* rescale, bool initialised) {
  constexpr int64_t kUnit = kPairs ? 2 : 1;
  constexpr int64_t kRows = kProductRows<kPairs>;
  const QueryTile& tile = b.tile;
  const Window window = b.view.window;
  const int64_t value_size = tile.problem.value_size;
  const int64_t first = (window.begin - b.data_begin) / kUnit;
  const PanelB weights{tile.s.scores + window.begin / kUnit * kPanel};
  const int64_t count = ceil_div(window.end - window.begin, kUnit);
  for (int64_t d = 0; d < value_size; d += kRows) {
    tile.prefetches.refill();
    const int64_t columns = smaller(kRows, value_size - d);
    const auto some = columns_of<kPairs>(b.data, first, d);
    const Output sums{acc_panels + d * kPanel, kPanel, rescale};
    if (initialised) {
      multiply_operands<kVectors, Beta::diagonal, kPairs>(columns, some, weights, count, sums, tile.prefetches);
    } else {
      multiply_operands<kVectors, Beta::zero, kPairs>(columns, some, weights, count, sums, tile.prefetches);
    }
  }
}

// The same for a tile of few rows. Without `rescale` there are no sums yet.
template <bool kPairs>
FA_INLINE void multiply_few_rows(const QueryTile& tile, Window window, int64_t first, const float* rescale) {
  const float* weights = tile.s.scores + window.begin / (kPairs ? 2 : 1) * kPanel;
  with_stored_type(tile.problem, [&](auto stored) {
    if constexpr (decltype(stored)::kPairs == kPairs) {
      add_values_to_rows<decltype(stored)>(tile, weights, first + window.begin, window.end - window.begin, rescale);
    }
  });
}

// Scores, online softmax and weighted values of one panel and one block. kVectors vectors of the panel hold query rows.
// `guarded`: values may be inf or NaN, or their sums may overflow (overflow.hpp).
template <int kVectors, bool kPairs>
static void attend_panel(const QueryTile& tile, int64_t panel, int64_t first, int64_t data_begin, const KvBlock& data,
                         bool guarded, bool cold) {
  constexpr int kSoftmaxVectors = Width<kVectors>::kParts;
  const Scratch& s = tile.s;
  const PanelView view = panel_view(tile, panel);
  const PanelBlock b{tile, view, panel, first, data_begin, data};
  if (tile.problem.softcap != 0) {
    multiply_keys_capped<kVectors, kPairs>(b, cold);
  } else {
    multiply_keys<kVectors, kPairs>(b, cold);
  }
  const float* rescale = s.rescale + view.first_row;
  const int64_t value_size = tile.problem.value_size;
  const bool initialised = s.initialised[panel] != 0;
  s.initialised[panel] = 1;
  // The products write only the rows and columns of the problem. The rest of the panel is read but not used.
  if (!initialised && (guarded || kSoftmaxVectors == 1 || value_size < tile.columns())) clear_panel(tile, panel);
  if (guarded) {
    softmax_panel<kSoftmaxVectors, false>(tile, view, first);
    const int64_t step = tile.sum_step();
    for (int64_t r = 0; r < view.rows; ++r) {
      float* sums = tile.sums_of(view.first_row + r);
      for (int64_t d = 0; d < value_size; ++d) sums[d * step] *= rescale[r];
      add_values_guarded(tile, view.first_row + r, first, s.scores + r, kPanel, sums, step);
    }
    return;
  }
  softmax_panel<kSoftmaxVectors, kPairs>(tile, view, first);
  if constexpr (kVectors == 1 && QueryTile::kHasFewRows) {
    if (tile.few_rows()) {
      multiply_few_rows<kPairs>(tile, view.window, first, initialised ? rescale : nullptr);
      return;
    }
  }
  multiply_values<kVectors, kPairs>(b, tile.sums_of(view.first_row), rescale, initialised);
}

// All panels of the tile and the block of keys [first, first + keys). K and V are loaded once for all panels.
template <bool kPairs>
static void attend_panels(const QueryTile& tile, int64_t first, int64_t keys, bool guarded, bool cold) {
  // Measured: 2 % less time for images of 196 patches and a class token, which have 5 rows beyond whole vectors.
  constexpr int kShort = Isa::kHalvesPay && !kPairs ? kHalf : 1;
  const Window all = visible_to_some(tile, keys);
  const KvUse use{tile.rows() <= kPanel, !tile.few_rows()};
  const KvBlock data = load_kv_block(tile.problem, tile.shape, tile.sequence, tile.plan.head, first + all.begin,
                                     all.end - all.begin, use, tile.s.block, tile.s.row_buffer);
  for (int64_t panel = 0; panel * kPanel < tile.rows(); ++panel) {
    if (tile.s.windows[panel].empty() || (guarded && tile.s.guarded[panel] == 0)) continue;
    const int64_t left = tile.rows() - panel * kPanel;
    if (left > kLanes) {
      attend_panel<2, kPairs>(tile, panel, first, all.begin, data, guarded, cold);
    } else if (left <= kLanes / 2) {
      attend_panel<kShort, kPairs>(tile, panel, first, all.begin, data, guarded, cold);
    } else {
      attend_panel<1, kPairs>(tile, panel, first, all.begin, data, guarded, cold);
    }
    cold = false;
  }
}

// Transposes acc_panels into acc_rows.
static void transpose_accumulators(const QueryTile& tile) {
  if (tile.skinny() || tile.few_rows()) return;
  const int64_t columns = tile.columns();
  for (int64_t first = 0; first < tile.rows(); first += kLanes) {
    const float* panel = tile.s.acc_panels + first / kPanel * kPanel * columns + first % kPanel;
    for (int64_t d = 0; d < columns; d += kLanes) {
      const float* from[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) from[j] = panel + (d + j) * kPanel;
      transpose_square(from, 0, tile.s.acc_rows + first * columns + d, columns);
    }
  }
}

// One pass over blocks [begin, end): see attend_blocks. With `guarded` only for the panels that need guards.
static void attend_blocks_once(const QueryTile& tile, int64_t begin, int64_t end, bool restricted, bool guarded) {
  bool cold = tile.prefetches.cached_head != &tile.plan;
  tile.prefetches.cached_head = tile.plan.splits > 1 ? nullptr : &tile.plan;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * tile.block_keys();
    const int64_t keys = smaller(tile.block_keys(), tile.sequence.key_length - first);
    if (!find_views(tile, first, keys, restricted)) continue;
    if (tile.skinny()) {
      with_stored_type(tile.problem, [&](auto stored) { attend_skinny<decltype(stored)>(tile, first, keys); });
      continue;
    }
    plan_prefetches(tile, block, end);
    if (tile.shape.pairs()) {
      if constexpr (kHasPairs) attend_panels<true>(tile, first, keys, guarded, cold);
    } else if constexpr (!kHasPairs) {
      attend_panels<false>(tile, first, keys, guarded, cold);
    }
    cold = false;
  }
}

// The keys of blocks [begin, end) that some row of a panel may see.
static KeyRange keys_of_panel(const QueryTile& tile, int64_t panel, int64_t begin, int64_t end, bool restricted) {
  const KeyRange blocks{begin * tile.block_keys(), smaller(end * tile.block_keys(), tile.sequence.key_length)};
  if (!restricted) return blocks;
  RowRange rows = tile.range;
  if (rows.head_count == 1) {
    rows.begin += panel * kPanel;
    rows.end = smaller(rows.end, rows.begin + kPanel);
  }
  const KeyRange band = band_range(tile.sequence, rows.begin, rows.end - 1);
  return {larger(blocks.begin, band.begin), smaller(blocks.end, band.end)};
}

// Whether a panel has to be computed again with guards. Only its sums show whether one of its values is inf or NaN, or whether
// they overflow. The other panels of the tile do not count, because they may be in another tile.
static bool needs_guards(const QueryTile& tile, int64_t panel, const KeyRange& keys) {
  if (all_finite(tile.sums_of(panel * kPanel), panel_sums(tile))) return false;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (!all_finite(tile.value(j), tile.problem.value_size)) return true;
  }
  const int64_t first = panel * kPanel;
  for (int64_t r = first; r < smaller(first + kPanel, tile.rows()); ++r) {
    if (overflowed(tile, r, tile.sums_of(r), tile.sum_step())) return true;
  }
  return false;
}

// All rows over blocks [begin, end). With `restricted` false neither the mask nor the band counts.
static void attend_blocks(const QueryTile& tile, int64_t begin, int64_t end, bool restricted, bool with_sink) {
  initialise(tile, with_sink);
  attend_blocks_once(tile, begin, end, restricted, false);
  if (tile.skinny()) return;
  clear_uninitialised(tile);
  const int64_t panels = ceil_div(tile.rows(), kPanel);
  if (all_finite(tile.sums_of(0), panels * panel_sums(tile))) return;
  bool guarded = false;
  for (int64_t panel = 0; panel < panels; ++panel) {
    tile.s.guarded[panel] = needs_guards(tile, panel, keys_of_panel(tile, panel, begin, end, restricted));
    if (tile.s.guarded[panel] == 0) continue;
    guarded = true;
    const int64_t first = panel * kPanel;
    initialise_rows(tile, first, first + kPanel, with_sink, overflow_scale_for(tile.sequence.key_length));
    tile.s.initialised[panel] = 0;
  }
  if (!guarded) return;
  attend_blocks_once(tile, begin, end, restricted, true);
  clear_uninitialised(tile);
}

// Writes outputs and statistics from acc_rows, row by row. Rows that attend no key get what cpu_empty_rows says.
static void write_results(const QueryTile& tile) {
  add_masked_keys(tile);
  bool some_empty = false;
  Values values = Values::unknown;
  for (int64_t r = 0; r < tile.rows(); ++r) {
    tile.s.empty[r] = is_empty(tile, r);
    some_empty = some_empty || tile.s.empty[r] != 0;
    write_statistics(tile, r);
    if (tile.s.empty[r] == 0) write_row(tile, r, tile.problem.nan_rows, values);
  }
  if (!some_empty) return;
  if (tile.problem.empty_rows != EmptyRows::unmasked) {
    write_empty_rows(tile);
    return;
  }
  prepare(tile);
  attend_blocks(tile, 0, ceil_div(tile.sequence.key_length, tile.block_keys()), false, false);
  transpose_accumulators(tile);
  for (int64_t r = 0; r < tile.rows(); ++r) {
    if (tile.s.empty[r] != 0) write_row(tile, r, NanRows::nan, values);
  }
}

// All rows of the tile over all keys that they see.
static void run_tile(const QueryTile& tile) {
  prepare(tile);
  const KeyRange range = band_range(tile.sequence, tile.range.begin, tile.range.end - 1);
  const int64_t keys = tile.block_keys();
  attend_blocks(tile, range.begin / keys, ceil_div(range.end, keys), true, tile.problem.sink != nullptr);
  if (!tile.skinny() && !tile.few_rows() && all_rows_ordinary(tile)) {
    write_panels(tile);
    return;
  }
  transpose_accumulators(tile);
  write_results(tile);
}

// Split `n` of the keys. The first split counts the sink.
static void run_split(const QueryTile& tile, int64_t n) {
  const HeadPlan& plan = tile.plan;
  prepare(tile);
  const int64_t begin = plan.first_block + n * plan.split_blocks;
  attend_blocks(tile, begin, smaller(begin + plan.split_blocks, plan.end_block), true,
                n == 0 && tile.problem.sink != nullptr);
  transpose_accumulators(tile);
  store_partial(tile, n);
}

// The results of all splits of the keys.
static void run_merge(const QueryTile& tile) {
  merge_partials(tile);
  write_results(tile);
}

}  // namespace fa::FA_ISA
