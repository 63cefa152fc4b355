// Few rows: one block of scores becomes one block of probabilities, row by row: scale, bias, mask, online softmax,
// dropout.
#pragma once

#include "bias.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"

namespace fa::FA_ISA {

// One byte for each key of the view, readable as whole vectors; null if the row sees them all.
FA_INLINE const uint8_t* hidden_keys(const Span& span, const View& view) {
  if (view.mask == nullptr) return nullptr;
  const int64_t count = view.end - view.begin;
  if (count % kLanes == 0) return view.mask + view.begin;
  __builtin_memcpy(span.s.masked, view.mask + view.begin, static_cast<size_t>(count));
  return span.s.masked;
}

static float soften_view(const Span& span, int64_t r, int64_t first, const View& view, float* scores) {
  const Problem& problem = span.problem;
  const int64_t count = view.end - view.begin;
  const float scale = problem.scale;
  const bool inside = problem.pse_inside_scale;
  float& max = span.s.max[r];
  const uint8_t* hidden = hidden_keys(span, view);
  if (!has_bias(problem)) {
    if (hidden == nullptr) return soften_plain(scores, count, scale, max);
    return soften<false, true>(scores, count, scale, nullptr, false, hidden, max);
  }
  const float* bias = bias_row(problem, span.sequence, span.head_of(r), span.index_of(r), first + view.begin, count,
                               span.s.rows);
  if (hidden == nullptr) return soften<true, false>(scores, count, scale, bias, inside, nullptr, max);
  return soften<true, true>(scores, count, scale, bias, inside, hidden, max);
}

// Gives the sum of the row's probabilities in this block, before dropout.
static float soften_row(const Span& span, int64_t r, int64_t first) {
  const Window window = span.s.windows[r / kPanel];
  const View& view = span.s.views[r];
  float* scores = span.s.scores + r * kScoreRow;
  if (view.empty()) {
    for (int64_t c = window.begin; c < window.end; ++c) scores[c] = 0;
    return 0;
  }
  const float sum = soften_view(span, r, first, view, scores + view.begin);
  if (span.problem.drop_mask != nullptr) {
    const int64_t bit = drop_bit(span.sequence, span.head_of(r), span.index_of(r)) + first + view.begin;
    drop(scores + view.begin, view.end - view.begin, span.problem.drop_mask, bit);
  }
  for (int64_t c = window.begin; c < view.begin; ++c) scores[c] = 0;
  for (int64_t c = view.end; c < window.end; ++c) scores[c] = 0;
  return sum;
}

static void soften_rows(const Span& span, int64_t first) {
  const Scratch& s = span.s;
  for (int64_t r = 0; r < span.rows(); ++r) {
    const float before = s.max[r];
    s.part[r] = soften_row(span, r, first);
    // A row that sees nothing here keeps all it has, also a largest score of +inf.
    s.shrink[r] = s.views[r].empty() ? 0.0f : before - exp_origin(s.max[r]);
  }
  // Whole vectors: the memory has room, and what is computed beyond the last row is not used.
  for (int64_t r = 0; r < span.rows(); r += kLanes) {
    const Vec shrink = exp_nonpositive(load(s.shrink + r));
    store(s.shrink + r, shrink);
    store(s.total + r, load(s.total + r) * shrink + load(s.part + r));
  }
}

}  // namespace fa::FA_ISA
