// One panel of scores, [keys][kPanel], becomes a panel of probabilities: scale, bias, mask, online softmax, dropout. The
// rows lie side by side in the lanes, so nothing is summed across a vector.
#pragma once

#include "bias.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"
#include "transpose.hpp"

namespace fa::FA_ISA {

// kVectors vectors of rows: a panel, or its first half.
template <int kVectors>
struct Lanes {
  Vec of[kVectors];
};

// What the rows of a panel see of a block.
struct PanelView {
  int64_t first_row;
  int64_t rows;
  Window window;  // seen by some row
  Window common;  // seen by all, masks aside
  bool masked;    // some key between is hidden from some row by the mask
};

static PanelView panel_view(const Span& span, int64_t panel) {
  const Scratch& s = span.s;
  PanelView view{panel * kPanel, smaller(kPanel, span.rows() - panel * kPanel), s.windows[panel], {}, false};
  view.common = view.window;
  for (int64_t r = view.first_row; r < view.first_row + view.rows; ++r) {
    view.common.begin = larger(view.common.begin, s.views[r].begin);
    view.common.end = smaller(view.common.end, s.views[r].end);
    view.masked = view.masked || s.views[r].mask != nullptr;
  }
  if (view.common.empty()) view.common = {view.window.end, view.window.end};
  return view;
}

// Numbers of each row for the keys of the window, laid out as the scores are: row(r, buffer) gives a row's, readable as
// whole vectors, and has a buffer for them.
template <int kVectors, class Row>
FA_INLINE void lay_across(const Span& span, const PanelView& view, float* out, Row row) {
  const int64_t count = view.window.end - view.window.begin;
  out += view.window.begin * kPanel;
  for (int64_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
    const float* from[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) {
      const int64_t r = view.first_row + smaller(lane + j, view.rows - 1);  // beyond repeats the last, unseen
      from[j] = row(r, span.s.rows + j * kBiasRow);
    }
    for (int64_t c = 0; c < count; c += kLanes) transpose_square(from, c, out + c * kPanel + lane);
  }
}

template <int kVectors>
static void lay_out_mask(const Span& span, const PanelView& view) {
  lay_across<kVectors>(span, view, span.s.hidden, [&](int64_t r, float* buffer) {
    const uint8_t* mask = span.s.views[r].mask;
    for (int64_t c = view.window.begin; c < view.window.end; ++c) {
      buffer[c - view.window.begin] = mask != nullptr && mask[c] != 0 ? 1.0f : 0.0f;
    }
    return buffer;
  });
}

template <int kVectors>
static void lay_out_kept(const Span& span, const PanelView& view, int64_t first) {
  lay_across<kVectors>(span, view, span.s.aside, [&](int64_t r, float* buffer) {
    const int64_t count = view.window.end - view.window.begin;
    for (int64_t c = 0; c < count; ++c) buffer[c] = 1.0f;
    drop(buffer, count, span.problem.drop_mask,
         drop_bit(span.sequence, span.head_of(r), span.index_of(r)) + first + view.window.begin);
    return buffer;
  });
}

// -inf where a lane does not see key c.
template <int kVectors>
struct Edges {
  IntVec begin[kVectors];
  IntVec end[kVectors];

  Edges(const Span& span, const PanelView& view) {
    for (int64_t lane = 0; lane < kVectors * kLanes; ++lane) {
      const View& row = span.s.views[view.first_row + smaller(lane, view.rows - 1)];
      begin[lane / kLanes][lane % kLanes] = static_cast<int32_t>(row.begin);
      end[lane / kLanes][lane % kLanes] = static_cast<int32_t>(row.end);
    }
  }
  Vec cut(Vec score, int v, int64_t c) const {
    const int32_t key = static_cast<int32_t>(c);
    return ((begin[v] <= key) & (end[v] > key)) ? score : splat(-kInfinity);
  }
};

// Calls body(c, ragged) for every key of the window; at a ragged one some lane does not see it.
template <class Body>
FA_INLINE void each_key(const PanelView& view, Body body) {
  for (int64_t c = view.window.begin; c < view.common.begin; ++c) body(c, true);
  for (int64_t c = view.common.begin; c < view.common.end; ++c) body(c, false);
  for (int64_t c = view.common.end; c < view.window.end; ++c) body(c, true);
}

// Where some lane does not see a key its score becomes -inf. These give the largest.
template <int kVectors, bool kHidden>
static Lanes<kVectors> finish_scores(const Span& span, const PanelView& view, float scale) {
  const Scratch& s = span.s;
  const Edges<kVectors> edges(span, view);
  const Vec nothing = splat(-kInfinity);
  Lanes<kVectors> largest;
  for (Vec& v : largest.of) v = nothing;
  each_key(view, [&](int64_t c, bool ragged) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c * kPanel + v * kLanes;
      Vec score = load(s.scores + at) * scale;
      if constexpr (kHidden) score = load(s.hidden + at) != 0.0f ? nothing : score;
      if (ragged) score = edges.cut(score, v, c);
      store(s.scores + at, score);
      largest.of[v] = greater(score, largest.of[v]);
    }
  });
  return largest;
}

// The bias of the rows of a panel, each from the window's first key on, readable as whole vectors.
struct BiasRows {
  const float* of[kPanel];
};

static BiasRows bias_rows(const Span& span, const PanelView& view, int64_t first) {
  const Window& window = view.window;
  BiasRows rows;
  for (int64_t j = 0; j < kPanel; ++j) {
    const int64_t r = view.first_row + smaller(j, view.rows - 1);  // beyond repeats the last, unseen
    rows.of[j] = bias_row(span.problem, span.sequence, span.head_of(r), span.index_of(r), first + window.begin,
                          window.end - window.begin, span.s.rows + j * kBiasRow);
  }
  return rows;
}

// Products of some keys of the window become scores; their count is a multiple of kLanes but at the window's end. Scores
// are natural numbers: a bias of -FLT_MAX times log2(e) would overflow. The bias is laid across in squares. Right after
// each tile of products this takes 1.5 % less time than for a whole panel at once: the processor goes on to the
// multiply-adds of the next tile while it shuffles.
template <int kVectors>
static void add_bias(const Span& span, const PanelView& view, const BiasRows& rows, Window keys) {
  const Scratch& s = span.s;
#pragma GCC unroll 2
  for (int64_t lane = 0; lane < kVectors * kLanes; lane += kLanes) {
    Vec largest = load(s.top + lane);
    for (int64_t c = keys.begin; c < keys.end; c += kLanes) {
      Vec bias[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) bias[j] = load(rows.of[lane + j] + c - view.window.begin);
      transpose_step<kLanes / 2>(bias);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (c + i == keys.end) break;
        float* at = s.scores + (c + i) * kPanel + lane;
        const Vec score = biased_score(span.problem, load(at), bias[i]);
        store(at, score);
        largest = greater(score, largest);
      }
    }
    store(s.top + lane, largest);
  }
}

// Every row sees every key of the window: the largest product is known when all are made.
FA_INLINE bool all_see_all(const PanelView& view) {
  return !view.masked && view.common.begin == view.window.begin && view.common.end == view.window.end;
}

// The largest product q . k; where a lane does not see a key, the product becomes -inf.
template <int kVectors>
static Lanes<kVectors> largest_products(const Span& span, const PanelView& view) {
  float* scores = span.s.scores;
  const Edges<kVectors> edges(span, view);
  Lanes<kVectors> largest;
  for (Vec& v : largest.of) v = splat(-kInfinity);
  each_key(view, [&](int64_t c, bool ragged) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = c * kPanel + v * kLanes;
      Vec product = load(scores + at);
      if (ragged) store(scores + at, product = edges.cut(product, v, c));
      largest.of[v] = greater(product, largest.of[v]);
    }
  });
  return largest;
}

// score * scale - max in one rounding differs from 0 at the largest score by up to half a unit in its last place, a
// factor common to the whole row. It cancels in the output but shows in softmax_sum; below kLargestFused it is at most
// 1e-6. A lane whose maximum is -inf has no visible key, so it counts as small.
template <int kVectors>
FA_INLINE bool all_small(const Lanes<kVectors>& tops) {
  for (const Vec& top : tops.of) {
    const IntVec small = (top < kLargestFused) & ((top > -kLargestFused) | (top == -kInfinity));
    for (int i = 0; i < kLanes; ++i) {
      if (small[i] == 0) return false;
    }
  }
  return true;
}

// Turns scores into exp(score * scale - origin), rounded to pairs of keys with kPairs, and gives their sums before
// dropout. With kFused the argument is made in one step, of products that are not yet scaled; else scale is 1.
template <int kVectors, bool kPairs, bool kDrop, bool kFused>
static Lanes<kVectors> panel_exponentials(const Span& span, const PanelView& view, float scale,
                                          const Lanes<kVectors>& origins) {
  const Scratch& s = span.s;
  const float factor = scale * kLog2E;
  Lanes<kVectors> shifts;
  for (int v = 0; v < kVectors; ++v) shifts.of[v] = origins.of[v] * kLog2E;
  Lanes<kVectors> sums{};
  const auto probability = [&](int64_t c, int v) {
    const int64_t at = c * kPanel + v * kLanes;
    const Vec score = load(s.scores + at);
    const Vec p = exp2_nonpositive(kFused ? score * factor - shifts.of[v] : (score - origins.of[v]) * kLog2E);
    sums.of[v] += p;
    if constexpr (kDrop) return clear_where(load(s.aside + at) == 0.0f, p);
    return p;
  };
  if constexpr (kPairs) {
    for (int64_t c = view.window.begin; c < view.window.end; c += 2) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Vec even = probability(c, v);
        const Vec odd = c + 1 < view.window.end ? probability(c + 1, v) : Vec{};
        store(s.scores + c / 2 * kPanel + v * kLanes, pair_of(even, odd));
      }
    }
    return sums;
  }
  for (int64_t c = view.window.begin; c < view.window.end; ++c) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(s.scores + c * kPanel + v * kLanes, probability(c, v));
  }
  return sums;
}

template <int kVectors, bool kPairs, bool kDrop>
static Lanes<kVectors> some_exponentials(const Span& span, const PanelView& view, float scale, bool fused,
                                         const Lanes<kVectors>& origins) {
  return fused ? panel_exponentials<kVectors, kPairs, kDrop, true>(span, view, scale, origins)
               : panel_exponentials<kVectors, kPairs, kDrop, false>(span, view, scale, origins);
}

template <int kVectors, bool kPairs>
static void soften_panel(const Span& span, const PanelView& view, int64_t first) {
  const Scratch& s = span.s;
  const float scale = has_bias(span.problem) ? 1.0f : span.problem.scale;  // with a bias they are scores already
  bool fused = false;
  Lanes<kVectors> tops;
  if (view.masked) {
    lay_out_mask<kVectors>(span, view);
    tops = finish_scores<kVectors, true>(span, view, scale);
  } else if (!(scale > 0)) {
    tops = finish_scores<kVectors, false>(span, view, scale);
  } else {
    // The largest product is the largest score, and the scale goes into the exponential.
    if (all_see_all(view)) {
      for (int v = 0; v < kVectors; ++v) tops.of[v] = load(s.top + v * kLanes);
    } else {
      tops = largest_products<kVectors>(span, view);
    }
    for (Vec& top : tops.of) top *= scale;
    fused = all_small(tops);
    if (!fused) tops = finish_scores<kVectors, false>(span, view, scale);
  }
  Lanes<kVectors> origins;
  for (int v = 0; v < kVectors; ++v) {
    const int64_t r = view.first_row + v * kLanes;
    const Vec before = load(s.max + r);
    const Vec max = greater(tops.of[v], before);
    origins.of[v] = max == -kInfinity ? Vec{} : max;
    store(s.max + r, max);
    store(s.shrink + r, before - origins.of[v]);
  }
  // A row that sees nothing here keeps all it has, also a largest score of +inf or a sink that is NaN.
  for (int64_t j = 0; j < view.rows; ++j) {
    if (!s.views[view.first_row + j].empty()) continue;
    s.shrink[view.first_row + j] = 0;
    origins.of[j / kLanes][j % kLanes] = 0;
  }
  if (span.problem.drop_mask != nullptr) lay_out_kept<kVectors>(span, view, first);
  const Lanes<kVectors> sums = span.problem.drop_mask != nullptr
                                   ? some_exponentials<kVectors, kPairs, true>(span, view, scale, fused, origins)
                                   : some_exponentials<kVectors, kPairs, false>(span, view, scale, fused, origins);
  for (int v = 0; v < kVectors; ++v) {
    const int64_t r = view.first_row + v * kLanes;
    const Vec shrink = exp_nonpositive(load(s.shrink + r));
    store(s.shrink + r, shrink);
    store(s.total + r, load(s.total + r) * shrink + sums.of[v]);
  }
}

}  // namespace fa::FA_ISA
