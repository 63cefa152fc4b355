// Rows of one block: products of Q and K become P F, products of dO and V become dS.
#pragma once

#include "../bias.hpp"
#include "../dropout.hpp"
#include "../exp.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// exp of a score less its row's softmax_max. No score exceeds the largest one that the forward pass has found, so that P is
// never more than 1 / softmax_sum; where statistics of another library differ by their rounding, that is kept to.
FA_INLINE Vec probability(Vec score, float max) {
  return exp2_nonpositive(lesser(Vec{}, (score - max) * kLog2E));
}

// One row. Columns count from the block's first key; bias, hidden and drop begin at the vector that holds `begin`.
struct Row {
  const float* p;
  const float* ds;
  int64_t begin = 0;  // columns [begin, end) have a probability
  int64_t end = 0;
  float max = 0;
  float weight = 0;
  float delta = 0;
  const float* bias = nullptr;
  const uint8_t* hidden = nullptr;  // bytes, not 0 where the key is not attended
  int64_t drop = 0;                 // the first bit
  bool silent = false;
  float fill = 0;       // P where the key is not attended
  bool empty = false;   // no key is attended, and all have this P
  float share = 0;
  bool plain = false;   // nothing of all this

  int64_t first() const { return begin / kLanes * kLanes; }
};

struct Weights {
  Vec p;   // P F
  Vec ds;
};

FA_INLINE Weights plain_weights(const Row& row, float scale, int64_t c) {
  const Vec p = probability(rounded(load(row.p + c) * scale), row.max) * row.weight;
  return {p, p * (load(row.ds + c) - row.delta)};
}

// The same with whatever there is; adds P dP to `dots`.
FA_INLINE Weights any_weights(const Row& row, const Problem& problem, int64_t c, Vec& dots) {
  const int64_t at = c - row.first();
  Vec factor = splat(1.0f);
  if (problem.drop_mask != nullptr) {
    BitVec bit;
    for (int i = 0; i < kLanes; ++i) bit[i] = 1u << i;
    const uint32_t word = bits_from(problem.drop_mask, row.drop + at, smaller(kLanes, row.end - c));
    factor = ((word - BitVec{}) & bit) == 0 ? Vec{} : splat(1.0f / problem.keep_prob);
  }
  if (row.empty) return {row.share * factor, Vec{}};
  const IntVec away = row.hidden == nullptr ? IntVec{} : nonzero_bytes(row.hidden + at);
  const Vec product = load(row.p + c);
  const Vec score =
      row.bias == nullptr ? rounded(product * problem.scale) : rounded(biased_score(problem, product, load(row.bias + at)));
  Vec p = clear_where(row.silent ? ~IntVec{} : away, probability(score, row.max) * row.weight);
  if (row.fill != 0) p = away ? splat(row.fill) : p;
  // What lies beyond the row's end must not get into the sum.
  const IntVec apart = (row.fill == 0 ? away : IntVec{}) | ~first_lanes(row.end - c) | first_lanes(row.begin - c);
  const Vec dp = clear_where(apart, load(row.ds + c) * factor);
  dots += clear_where(apart, p) * dp;
  return {p * factor, clear_where(away, p * (dp - row.delta))};
}

template <bool kPlain>
FA_INLINE Weights weights_at(const Row& row, const Problem& problem, int64_t c, Vec& dots) {
  if (c + kLanes <= row.begin || c >= row.end) return {Vec{}, Vec{}};
  Weights w = kPlain ? plain_weights(row, problem.scale, c) : any_weights(row, problem, c, dots);
  if (c < row.begin || c + kLanes > row.end) {
    const IntVec outside = ~first_lanes(row.end - c) | first_lanes(row.begin - c);
    w.p = clear_where(outside, w.p);
    w.ds = clear_where(outside, w.ds);
  }
  return w;
}

// Columns of a window; what the row has no probability for becomes 0.
template <bool kPlain>
static void soften_row(const Row& row, const Problem& problem, Window window, float* p, float* ds, Vec& dots) {
  for (int64_t c = window.begin; c < window.end; c += kLanes) {
    const Weights w = weights_at<kPlain>(row, problem, c, dots);
    store(p + c, w.p);
    store(ds + c, w.ds);
  }
}

// Two rows as pairs of both, and dS of each also as pairs of keys, from `even_pairs` and `odd_pairs` on.
template <bool kPlain>
static void soften_pair(const Row& even, const Row& odd, const Problem& problem, Window window, float* p, float* ds,
                        float* even_pairs, float* odd_pairs, Vec& even_dots, Vec& odd_dots) {
  const auto put = [](Vec first, Vec second, float* out) {
    Vec low;
    Vec high;
    interleave(first, second, low, high);
    store(out, low);
    store(out + kLanes, high);
  };
  for (int64_t c = window.begin / kPanel * kPanel; c < window.end; c += kPanel) {
    const Weights a = weights_at<kPlain>(even, problem, c, even_dots);
    const Weights b = weights_at<kPlain>(even, problem, c + kLanes, even_dots);
    const Weights x = weights_at<kPlain>(odd, problem, c, odd_dots);
    const Weights y = weights_at<kPlain>(odd, problem, c + kLanes, odd_dots);
    put(Isa::narrow_operands(a.p, b.p), Isa::narrow_operands(x.p, y.p), p + c);
    const Vec even_ds = Isa::narrow_operands(a.ds, b.ds);
    const Vec odd_ds = Isa::narrow_operands(x.ds, y.ds);
    put(even_ds, odd_ds, ds + c);
    store(even_pairs + c / 2, even_ds);
    store(odd_pairs + c / 2, odd_ds);
  }
}

}  // namespace fa::FA_ISA::grad
