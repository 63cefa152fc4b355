// One row of one block: products of Q and K become P F, products of dO and V become dS.
#pragma once

#include "../bias.hpp"
#include "../dropout.hpp"
#include "../exp.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// exp of a score less its row's softmax_max, which is hardly more than 0 if the two belong together; beyond 89 it is
// infinite.
FA_INLINE Vec probability(Vec x) { return exp_nonpositive(x > 89.0f ? splat(89.0f) : x); }

struct Row {
  float* p;
  float* ds;
  int64_t count;
  float max;
  float weight;
  float delta;
  const float* bias = nullptr;      // `count` floats
  const uint8_t* hidden = nullptr;  // `count` bytes, not 0 where the key is not attended
  int64_t drop = 0;                 // the first bit
  bool silent = false;
  float fill = 0;  // P where the key is not attended
};

// Whole vectors are read and written; what lies beyond `count` becomes 0.
FA_INLINE void soften_plain(const Row& row, float scale) {
  for (int64_t c = 0; c < row.count; c += kLanes) {
    Vec p = probability(load(row.p + c) * scale - row.max) * row.weight;
    Vec ds = p * (load(row.ds + c) - row.delta);
    if (c + kLanes > row.count) {
      const IntVec inside = first_lanes(row.count - c);
      p = clear_where(~inside, p);
      ds = clear_where(~inside, ds);
    }
    store(row.p + c, p);
    store(row.ds + c, ds);
  }
}

// The same with whatever there is; gives the sum of P dP.
static float soften_any(const Row& row, const Problem& problem) {
  const bool inside = problem.pse_inside_scale;
  const float before = inside && row.bias != nullptr ? 1.0f : problem.scale;
  const float after = inside && row.bias != nullptr ? problem.scale : 1.0f;
  const float kept = 1.0f / problem.keep_prob;
  BitVec bit;
  for (int i = 0; i < kLanes; ++i) bit[i] = 1u << i;
  Vec dots{};
  for (int64_t c = 0; c < row.count; c += kLanes) {
    const IntVec beyond = ~first_lanes(row.count - c);
    IntVec away = beyond;
    if (row.hidden != nullptr) away |= nonzero_bytes(row.hidden + c);
    const IntVec apart = row.fill == 0 ? away : beyond;
    Vec score = load(row.p + c) * before;
    if (row.bias != nullptr) score = (score + load(row.bias + c)) * after;
    Vec p = clear_where(row.silent ? ~IntVec{} : away, probability(score - row.max) * row.weight);
    if (row.fill != 0) p = away ? clear_where(beyond, splat(row.fill)) : p;
    Vec factor = splat(1.0f);
    if (problem.drop_mask != nullptr) {
      const uint32_t word = bits_from(problem.drop_mask, row.drop + c, smaller(kLanes, row.count - c));
      factor = ((word - BitVec{}) & bit) == 0 ? Vec{} : splat(kept);
    }
    const Vec dp = clear_where(apart, load(row.ds + c) * factor);
    dots += p * dp;
    store(row.p + c, clear_where(apart, p * factor));
    store(row.ds + c, clear_where(away, p * (dp - row.delta)));
  }
  return sum_lanes(dots);
}

// A row without a key whose probabilities are not 0 all the same.
static void soften_empty(const Row& row, const Problem& problem, int64_t key_length) {
  const float p = problem.empty_rows == EmptyRows::mean ? 1.0f / static_cast<float>(key_length) : __builtin_nanf("");
  for (int64_t c = 0; c < row.count; ++c) {
    const bool kept = problem.drop_mask == nullptr || (bits_from(problem.drop_mask, row.drop + c, 1) & 1) != 0;
    row.p[c] = p * (kept ? 1.0f / problem.keep_prob : 0.0f);
    row.ds[c] = 0;
  }
}

}  // namespace fa::FA_ISA::grad
