// The softmax of one panel of scores [keys][kPanel]: scale, bias, mask, online softmax, dropout. The scores become
// probabilities in place. Each lane is a query row, so nothing is summed across a vector.
#pragma once

#include "bias.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"
#include "softcap.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// One number for each row of a panel, or of its first half.
template <int kVectors>
struct PanelVector {
  Vec of[kVectors];
};

// Which keys of a block the rows of a panel see.
struct PanelView {
  int64_t first_row;
  int64_t rows;
  Window window;  // keys that some row sees
  Window common;  // keys that lie between begin and end of every row's view
  bool masked;    // whether the mask hides a key between begin and end of some row's view
};

static PanelView panel_view(const QueryTile& tile, int64_t panel) {
  const Scratch& s = tile.s;
  PanelView view{panel * kPanel, smaller(kPanel, tile.rows() - panel * kPanel), s.windows[panel], {}, false};
  view.common = view.window;
  for (int64_t r = view.first_row; r < view.first_row + view.rows; ++r) {
    view.common.begin = larger(view.common.begin, s.views[r].begin);
    view.common.end = smaller(view.common.end, s.views[r].end);
    view.masked = view.masked || s.views[r].mask != nullptr;
  }
  if (view.common.empty()) view.common = {view.window.end, view.window.end};
  return view;
}

// Fills a panel with numbers of each row for the keys of the window. row(r, buffer) returns those of row r, readable as
// whole vectors; `buffer` has room for them.
template <int kVectors, class Row>
FA_INLINE void transpose_into_panel(const QueryTile& tile, const PanelView& view, float* out, Row row) {
  const int64_t count = view.window.end - view.window.begin;
  out += view.window.begin * kPanel;
  for (int64_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
    const float* from[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t r = view.first_row + smaller(lane + j, view.rows - 1);  // lanes beyond the last row repeat it
      from[j] = row(r, tile.s.row_buffer + j * kBiasStride);
    }
    for (int64_t c = 0; c < count; c += kLanes) transpose_square(from, c, out + c * kPanel + lane);
  }
}

// Fills masked_lanes from the masks of the rows.
template <int kVectors>
static void mask_panel(const QueryTile& tile, const PanelView& view) {
  transpose_into_panel<kVectors>(tile, view, tile.s.masked_lanes, [&](int64_t r, float* buffer) {
    const uint8_t* mask = tile.s.views[r].mask;
    for (int64_t c = view.window.begin; c < view.window.end; ++c) {
      buffer[c - view.window.begin] = mask != nullptr && mask[c] != 0 ? 1.0f : 0.0f;
    }
    return buffer;
  });
}

// Fills keep from the dropout bits of the rows.
template <int kVectors>
static void dropout_panel(const QueryTile& tile, const PanelView& view, int64_t first) {
  transpose_into_panel<kVectors>(tile, view, tile.s.keep, [&](int64_t r, float* buffer) {
    const int64_t count = view.window.end - view.window.begin;
    for (int64_t c = 0; c < count; ++c) buffer[c] = 1.0f;
    drop(buffer, count, tile.problem.drop_mask,
         drop_bit(tile.sequence, tile.head_of(r), tile.index_of(r)) + first + view.window.begin);
    return buffer;
  });
}

// The keys that each lane sees. hide() replaces the score of key c by -inf where it is not among them.
template <int kVectors>
struct VisibleLanes {
  IntVec begin[kVectors];
  IntVec end[kVectors];

  VisibleLanes(const QueryTile& tile, const PanelView& view) {
    for (int64_t lane = 0; lane < kVectors * kLanes; ++lane) {
      const View& row = tile.s.views[view.first_row + smaller(lane, view.rows - 1)];
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(row.begin);
      end[lane / kLanes][lane % kLanes] = static_cast<int32_t>(row.end);
    }
  }
  Vec hide(Vec score, int v, int64_t c) const {
    const int32_t key = static_cast<int32_t>(c);
    return ((begin[v] <= key) & (end[v] > key)) ? score : splat(-kInfinity);
  }
};

// Calls body(c, partial) for every key of the window. `partial`: the key lies outside begin and end of some row's view.
template <class Body>
FA_INLINE void each_key(const PanelView& view, Body body) {
  for (int64_t c = view.window.begin; c < view.common.begin; ++c) body(c, true);
  for (int64_t c = view.common.begin; c < view.common.end; ++c) body(c, false);
  for (int64_t c = view.common.end; c < view.window.end; ++c) body(c, true);
}

// Scales the scores and makes them -inf where a row does not see the key. Returns the largest score of each row.
template <int kVectors, bool kHidden>
static PanelVector<kVectors> mask_scores(const QueryTile& tile, const PanelView& view, float scale) {
  const Scratch& s = tile.s;
  const VisibleLanes<kVectors> edges(tile, view);
  const Vec minus_infinity = splat(-kInfinity);
  PanelVector<kVectors> largest;
  for (Vec& v : largest.of) v = minus_infinity;
  each_key(view, [&](int64_t c, bool partial) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c * kPanel + v * kLanes;
      Vec score = load(s.scores + at) * scale;
      if constexpr (kHidden) score = load(s.masked_lanes + at) != 0.0f ? minus_infinity : score;
      if (partial) score = edges.hide(score, v, c);
      store(s.scores + at, score);
      largest.of[v] = maximum(score, largest.of[v]);
    }
  });
  return largest;
}

// Caps the products of some keys of the window. Raises panel_max to the largest of them, unless a bias is still to be
// added.
template <int kVectors>
static void cap_products(const QueryTile& tile, Window keys, bool biased) {
  const Scratch& s = tile.s;
  const Softcap softcap(tile.problem.softcap, tile.problem.scale);
#pragma GCC unroll 2
  for (int64_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
    Vec largest = load(s.panel_max + lane);
    for (int64_t c = keys.begin; c < keys.end; ++c) {
      float* at = s.scores + c * kPanel + lane;
      const Vec score = softcap.score(load(at));
      store(at, score);
      largest = maximum(score, largest);
    }
    if (!biased) store(s.panel_max + lane, largest);
  }
}

// The bias of each row of a panel from the window's first key on, readable as whole vectors.
struct BiasRows {
  const float* of[kPanel];
};

static BiasRows bias_rows(const QueryTile& tile, const PanelView& view, int64_t first) {
  const Window& window = view.window;
  BiasRows rows;
  for (int64_t j = 0; j < kPanel; ++j) {
    const int64_t r = view.first_row + smaller(j, view.rows - 1);  // lanes beyond the last row repeat it
    rows.of[j] = bias_row(tile.problem, tile.sequence, tile.head_of(r), tile.index_of(r), first + window.begin,
                          window.end - window.begin, tile.s.row_buffer + j * kBiasStride);
  }
  return rows;
}

// Turns products into scores for some keys of the window. The number of keys is a multiple of kLanes except at the window's
// end. The bias rows are transposed in squares of kLanes. Scores are not multiplied by log2(e): a bias of -FLT_MAX would
// overflow.
//
// Measured: called after each micro-tile of products this takes 1.5 % less time than called once for the panel, because the
// processor starts the multiply-adds of the next micro-tile while it shuffles.
template <int kVectors>
static void add_bias(const QueryTile& tile, const PanelView& view, const BiasRows& rows, Window keys) {
  const Scratch& s = tile.s;
#pragma GCC unroll 2
  for (int64_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
    Vec largest = load(s.panel_max + lane);
    for (int64_t c = keys.begin; c < keys.end; c += kLanes) {
      Vec bias[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) bias[j] = load(rows.of[lane + j] + c - view.window.begin);
      transpose_step<kLanes / 2>(bias);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (c + i == keys.end) break;
        float* at = s.scores + (c + i) * kPanel + lane;
        const Vec score = biased_score(tile.problem, load(at), bias[i]);
        store(at, score);
        largest = maximum(score, largest);
      }
    }
    store(s.panel_max + lane, largest);
  }
}

// Whether every row sees every key of the window. panel_max then holds the largest entry already.
FA_INLINE bool all_visible(const PanelView& view) {
  return !view.masked && view.common.begin == view.window.begin && view.common.end == view.window.end;
}

// The largest product q . k of each row. The product becomes -inf where a row does not see the key.
template <int kVectors>
static PanelVector<kVectors> largest_products(const QueryTile& tile, const PanelView& view) {
  float* scores = tile.s.scores;
  const VisibleLanes<kVectors> edges(tile, view);
  PanelVector<kVectors> largest;
  for (Vec& v : largest.of) v = splat(-kInfinity);
  each_key(view, [&](int64_t c, bool partial) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c * kPanel + v * kLanes;
      Vec product = load(scores + at);
      if (partial) store(scores + at, product = edges.hide(product, v, c));
      largest.of[v] = maximum(product, largest.of[v]);
    }
  });
  return largest;
}

// Whether all maxima are below kLargestFusedScore (see there). A lane whose maximum is -inf sees no key and does not matter.
template <int kVectors>
FA_INLINE bool all_fusable(const PanelVector<kVectors>& maxima) {
  for (const Vec& max : maxima.of) {
    const IntVec small = (max < kLargestFusedScore) & ((max > -kLargestFusedScore) | (max == -kInfinity));
    for (int i = 0; i < kLanes; ++i) {
      if (small[i] == 0) return false;
    }
  }
  return true;
}

// Turns scores into exp(score * scale - origin) and returns their sums before dropout. With kPairs the probabilities are
// rounded to bfloat16 and stored as [pair of keys][kPanel][2]. With kFused the scores are products that are not scaled yet,
// and the argument takes one multiply-add; else scale is 1.
template <int kVectors, bool kPairs, bool kDrop, bool kFused>
static PanelVector<kVectors> panel_exponentials(const QueryTile& tile, const PanelView& view, float scale,
                                                const PanelVector<kVectors>& origins) {
  float* const scores = tile.s.scores;
  const float* const keep = tile.s.keep;
  const Window window = view.window;
  const float factor = scale * kLog2E;
  PanelVector<kVectors> shifts;
  for (int v = 0; v < kVectors; ++v) shifts.of[v] = origins.of[v] * kLog2E;
  PanelVector<kVectors> sums{};
  const auto probability = [&](int64_t c, int v) {
    const int64_t at = c * kPanel + v * kLanes;
    const Vec score = load(scores + at);
    const Vec p = exp2_nonpositive(kFused ? score * factor - shifts.of[v] : (score - origins.of[v]) * kLog2E);
    sums.of[v] += p;
    if constexpr (kDrop) return clear_where(load(keep + at) == 0.0f, p);
    return p;
  };
  int64_t c = window.begin;
  if constexpr (kPairs) {
    for (; c + 1 < window.end; c += 2) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Vec even = probability(c, v);
        store(scores + c / 2 * kPanel + v * kLanes, pair_of(even, probability(c + 1, v)));
      }
    }
    for (int v = 0; c < window.end && v < kVectors; ++v) {
      store(scores + c / 2 * kPanel + v * kLanes, pair_of(probability(c, v), Vec{}));
    }
    return sums;
  }
  for (; c < window.end; ++c) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(scores + c * kPanel + v * kLanes, probability(c, v));
  }
  return sums;
}

template <int kVectors, bool kPairs, bool kDrop>
static PanelVector<kVectors> exponentials_of_panel(const QueryTile& tile, const PanelView& view, float scale, bool fused,
                                                   const PanelVector<kVectors>& origins) {
  return fused ? panel_exponentials<kVectors, kPairs, kDrop, true>(tile, view, scale, origins)
               : panel_exponentials<kVectors, kPairs, kDrop, false>(tile, view, scale, origins);
}

// The online softmax of a panel and a block: updates max, sum and rescale, and turns the scores into probabilities.
template <int kVectors, bool kPairs>
static void softmax_panel(const QueryTile& tile, const PanelView& view, int64_t first) {
  const Scratch& s = tile.s;
  // With a bias, multiply_keys has already applied the scale.
  const float scale = has_bias(tile.problem) ? 1.0f : remaining_scale(tile.problem.softcap, tile.problem.scale);
  bool fused = false;
  PanelVector<kVectors> maxima;
  if (view.masked) {
    mask_panel<kVectors>(tile, view);
    maxima = mask_scores<kVectors, true>(tile, view, scale);
  } else if (!(scale > 0)) {
    maxima = mask_scores<kVectors, false>(tile, view, scale);
  } else {
    // The largest product is the largest score, and the scale moves into the exponential.
    if (all_visible(view)) {
      for (int v = 0; v < kVectors; ++v) maxima.of[v] = load(s.panel_max + v * kLanes);
    } else {
      maxima = largest_products<kVectors>(tile, view);
    }
    for (Vec& max : maxima.of) max *= scale;
    fused = all_fusable(maxima);
    if (!fused) maxima = mask_scores<kVectors, false>(tile, view, scale);
  }
  PanelVector<kVectors> origins;
  for (int v = 0; v < kVectors; ++v) {
    const int64_t r = view.first_row + v * kLanes;
    const Vec before = load(s.max + r);
    const Vec max = maximum(maxima.of[v], before);
    origins.of[v] = max == -kInfinity ? Vec{} : max;
    store(s.max + r, max);
    store(s.rescale + r, before - origins.of[v]);
  }
  // A row that sees no key of this block keeps its sums, so the exponent of its factor is 0. Its largest score may be +inf,
  // or its sink NaN, and inf - inf would be NaN.
  for (int64_t j = 0; j < view.rows; ++j) {
    if (!s.views[view.first_row + j].empty()) continue;
    s.rescale[view.first_row + j] = 0;
    origins.of[j / kLanes][j % kLanes] = 0;
  }
  if (tile.problem.drop_mask != nullptr) dropout_panel<kVectors>(tile, view, first);
  const PanelVector<kVectors> sums = tile.problem.drop_mask != nullptr
                                   ? exponentials_of_panel<kVectors, kPairs, true>(tile, view, scale, fused, origins)
                                   : exponentials_of_panel<kVectors, kPairs, false>(tile, view, scale, fused, origins);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t r = view.first_row + v * kLanes;
    const Vec rescale = exp_nonpositive(load(s.rescale + r));
    store(s.rescale + r, rescale);
    store(s.sum + r, load(s.sum + r) * rescale + sums.of[v]);
  }
}

}  // namespace fa::FA_ISA
