// The gradient of the softmax for the rows of one block: Q K^T becomes P F, and dO V^T becomes dS.
#pragma once

#include "../bias.hpp"
#include "../dropout.hpp"
#include "../exp.hpp"
#include "../softcap.hpp"
#include "pack.hpp"

namespace fa::FA_ISA::grad {

// One row of a block. Columns count from the block's first key. bias, hidden and drop begin at the vector that holds
// `begin`.
struct Row {
  const float* p;
  const float* ds;
  int64_t begin = 0;  // columns [begin, end) have a probability
  int64_t end = 0;
  float max = 0;
  float weight = 0;
  float delta = 0;
  const float* bias = nullptr;
  const uint8_t* hidden = nullptr;  // bytes, not 0 where the key is masked
  int64_t drop = 0;                 // the first bit
  bool zeroed = false;
  float masked_p = 0;  // the largest P of masked keys, which all of them have without cpu_masked_bias
  bool empty = false;  // the row attends no key; all keys have the probability `share`
  float share = 0;
  bool common = false;  // the row has none of bias, mask, dropout, sink, and is neither empty nor zeroed

  int64_t first() const { return begin / kLanes * kLanes; }
};

struct Weights {
  Vec p;  // P F
  Vec ds;
};

// What the weights of a row have to regard: nothing but its scores, everything that a Row has, or a soft cap besides.
enum class Kind { common, general, capped };

FA_INLINE Weights common_weights(const Row& row, float scale, int64_t c) {
  const Vec p = probability(rounded(load(row.p + c) * scale), row.max) * row.weight;
  return {p, p * (load(row.ds + c) - row.delta)};
}

// The same for any row. Adds P dP to `sink_dots`. With a soft cap dS is the gradient of the product before the cap.
template <bool kCapped>
FA_INLINE Weights general_weights(const Row& row, const Problem& problem, int64_t c, Vec& sink_dots) {
  const int64_t at = c - row.first();
  Vec factor = splat(1.0f);
  if (problem.drop_mask != nullptr) {
    BitVec bit;
    for (int i = 0; i < kLanes; ++i) bit[i] = 1u << i;
    const uint32_t bits = bits_from(problem.drop_mask, row.drop + at, smaller(kLanes, row.end - c));
    factor = ((bits - BitVec{}) & bit) == 0 ? Vec{} : splat(1.0f / problem.keep_prob);
  }
  if (row.empty) return {row.share * factor, Vec{}};
  const IntVec masked = row.hidden == nullptr ? IntVec{} : nonzero_bytes(row.hidden + at);
  Vec product = load(row.p + c);
  Vec slope = splat(1.0f);  // of the score
  if constexpr (kCapped) {
    const Softcap softcap(problem.softcap, problem.scale);
    const Vec share = softcap.share(product);
    product = softcap.score_of(share);
    slope -= share * share;
  }
  const float scale = kCapped ? 1.0f : problem.scale;
  const Vec score =
      row.bias == nullptr ? rounded(product * scale) : rounded(biased_score(problem, product, load(row.bias + at)));
  Vec p = clear_where(row.zeroed ? ~IntVec{} : masked, probability(score, row.max) * row.weight);
  if (row.masked_p != 0) {
    Vec masked_p = splat(row.masked_p);
    if (problem.masked_bias) {
      masked_p = probability(rounded(masked_scores(problem, load(row.bias + at))), row.max) * row.weight;
    }
    p = masked ? masked_p : p;
  }
  // Lanes beyond the row's range must not enter the sum.
  const IntVec excluded = (row.masked_p == 0 ? masked : IntVec{}) | ~first_lanes(row.end - c) | first_lanes(row.begin - c);
  const Vec dp = clear_where(excluded, load(row.ds + c) * factor);
  sink_dots += clear_where(excluded, p) * dp;
  Vec ds = p * (dp - row.delta);
  if constexpr (kCapped) ds *= slope;
  return {p * factor, clear_where(masked, ds)};
}

// P F and dS of one vector of columns; 0 outside the row's range.
template <Kind kKind>
FA_INLINE Weights weights_at(const Row& row, const Problem& problem, int64_t c, Vec& sink_dots) {
  if (c + kLanes <= row.begin || c >= row.end) return {Vec{}, Vec{}};
  Weights w = kKind == Kind::common ? common_weights(row, problem.scale, c)
                                    : general_weights<kKind == Kind::capped>(row, problem, c, sink_dots);
  if (c < row.begin || c + kLanes > row.end) {
    const IntVec outside = ~first_lanes(row.end - c) | first_lanes(row.begin - c);
    w.p = clear_where(outside, w.p);
    w.ds = clear_where(outside, w.ds);
  }
  return w;
}

// The columns of a window. Where the row has no probability, P F and dS become 0.
template <Kind kKind>
static void softmax_gradient_row(const Row& row, const Problem& problem, Window window, float* p, float* ds,
                                 Vec& sink_dots) {
  for (int64_t c = window.begin; c < window.end; c += kLanes) {
    const Weights w = weights_at<kKind>(row, problem, c, sink_dots);
    store(p + c, w.p);
    store(ds + c, w.ds);
  }
}

// Two rows, interleaved. dS of each row is also stored as pairs of keys, from `even_pairs` and `odd_pairs` on.
template <Kind kKind>
static void softmax_gradient_pair(const Row& even, const Row& odd, const Problem& problem, Window window, float* p,
                                  float* ds, float* even_pairs, float* odd_pairs, Vec& even_sink_dots, Vec& odd_sink_dots) {
  const auto put = [](Vec first, Vec second, float* out) {
    Vec low;
    Vec high;
    interleave(first, second, low, high);
    store(out, low);
    store(out + kLanes, high);
  };
  for (int64_t c = window.begin / kPanel * kPanel; c < window.end; c += kPanel) {
    const Weights a = weights_at<kKind>(even, problem, c, even_sink_dots);
    const Weights b = weights_at<kKind>(even, problem, c + kLanes, even_sink_dots);
    const Weights x = weights_at<kKind>(odd, problem, c, odd_sink_dots);
    const Weights y = weights_at<kKind>(odd, problem, c + kLanes, odd_sink_dots);
    put(Isa::narrow_operands(a.p, b.p), Isa::narrow_operands(x.p, y.p), p + c);
    const Vec even_ds = Isa::narrow_operands(a.ds, b.ds);
    const Vec odd_ds = Isa::narrow_operands(x.ds, y.ds);
    put(even_ds, odd_ds, ds + c);
    store(even_pairs + c / 2, even_ds);
    store(odd_pairs + c / 2, odd_ds);
  }
}

}  // namespace fa::FA_ISA::grad
