// The softmax of a block in a skinny tile, row by row: scale, soft cap, bias, mask, online softmax, dropout.
#pragma once

#include "bias.hpp"
#include "dropout.hpp"
#include "online_softmax.hpp"
#include "query_tile.hpp"
#include "softcap.hpp"

namespace fa::FA_ISA {

// One byte for each key of the view, not 0 where it is masked, readable as whole vectors. Null if the row sees all of them.
FA_INLINE const uint8_t* hidden_keys(const QueryTile& tile, const View& view) {
  if (view.mask == nullptr) return nullptr;
  const int64_t count = view.end - view.begin;
  if (count % kLanes == 0) return view.mask + view.begin;
  __builtin_memcpy(tile.s.mask_bytes, view.mask + view.begin, static_cast<size_t>(count));
  return tile.s.mask_bytes;
}

// The online softmax of row r for the keys of its view. Returns the sum of the probabilities.
static float online_softmax_view(const QueryTile& tile, int64_t r, int64_t first, const View& view, float* scores) {
  const Problem& problem = tile.problem;
  const int64_t count = view.end - view.begin;
  const float scale = remaining_scale(problem.softcap, problem.scale);
  const bool inside = problem.pse_inside_scale;
  float& max = tile.s.max[r];
  const uint8_t* hidden = hidden_keys(tile, view);
  if (problem.softcap != 0) Softcap(problem.softcap, problem.scale).row(scores, count);
  if (!has_bias(problem)) {
    if (hidden == nullptr) return online_softmax_unmasked(scores, count, scale, max);
    return online_softmax<false, true>(scores, count, scale, nullptr, false, hidden, max);
  }
  const float* bias = bias_row(problem, tile.sequence, tile.head_of(r), tile.index_of(r), first + view.begin, count,
                               tile.s.row_buffer);
  if (hidden == nullptr) return online_softmax<true, false>(scores, count, scale, bias, inside, nullptr, max);
  return online_softmax<true, true>(scores, count, scale, bias, inside, hidden, max);
}

// Scores of row r become probabilities. Returns their sum in this block, before dropout.
static float softmax_row(const QueryTile& tile, int64_t r, int64_t first) {
  const Window window = tile.s.windows[r / kPanel];
  const View& view = tile.s.views[r];
  float* scores = tile.s.scores + r * kScoreStride;
  if (view.empty()) {
    for (int64_t c = window.begin; c < window.end; ++c) scores[c] = 0;
    return 0;
  }
  const float sum = online_softmax_view(tile, r, first, view, scores + view.begin);
  if (tile.problem.drop_mask != nullptr) {
    const int64_t bit = drop_bit(tile.sequence, tile.head_of(r), tile.index_of(r)) + first + view.begin;
    drop(scores + view.begin, view.end - view.begin, tile.problem.drop_mask, bit);
  }
  for (int64_t c = window.begin; c < view.begin; ++c) scores[c] = 0;
  for (int64_t c = view.end; c < window.end; ++c) scores[c] = 0;
  return sum;
}

// The online softmax of all rows and one block: updates max, sum and rescale.
static void softmax_rows(const QueryTile& tile, int64_t first) {
  const Scratch& s = tile.s;
  for (int64_t r = 0; r < tile.rows(); ++r) {
    const float before = s.max[r];
    s.block_sum[r] = softmax_row(tile, r, first);
    // A row that sees no key of this block keeps its sums, so the exponent of its factor is 0. Its largest score may be
    // +inf, and inf - inf would be NaN.
    s.rescale[r] = s.views[r].empty() ? 0.0f : before - softmax_origin(s.max[r]);
  }
  // Whole vectors are computed. The memory has room for them, and nothing beyond the last row is used.
  for (int64_t r = 0; r < tile.rows(); r += kLanes) {
    const Vec rescale = exp_nonpositive(load(s.rescale + r));
    store(s.rescale + r, rescale);
    store(s.sum + r, load(s.sum + r) * rescale + load(s.block_sum + r));
  }
}

}  // namespace fa::FA_ISA
