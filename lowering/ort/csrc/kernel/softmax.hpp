// One row of one block in the online softmax: scores in, exp(score - largest so far) out.
#pragma once

#include "exp.hpp"

namespace fa::FA_ISA {

// What has been seen of a row: the largest score, and the sum of exp(score - largest).
struct RowState {
  float max = -kInfinity;
  float sum = 0;
};

// While every score was -inf the row has no largest one; any finite number then makes exp(-inf) = 0.
FA_INLINE float exp_origin(float max) { return max == -kInfinity ? 0.0f : max; }

// Turns `count` scores (a multiple of kLanes) into probabilities in place, updates the state, and gives
// the factor by which what was summed before must shrink. `bias` is null or holds `count` floats, `hidden`
// is null or holds `count` bytes, not 0 where the key is not attended. Scores stay in natural units: a
// bias of -FLT_MAX times log2(e) would overflow.
template <bool kBias, bool kHidden>
FA_INLINE float soften(float* scores, int64_t count, float scale, const float* bias, bool bias_inside,
                       const uint8_t* hidden, RowState& state) {
  Vec max = splat(state.max);
  const float before = bias_inside ? 1.0f : scale;
  const float after = bias_inside ? scale : 1.0f;
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec s = load(scores + c);
    if constexpr (kBias) {
      s = (s * before + load(bias + c)) * after;
    } else {
      s = s * scale;
    }
    if constexpr (kHidden) s = nonzero_bytes(hidden + c) ? splat(-kInfinity) : s;
    store(scores + c, s);
    max = greater(s, max);
  }
  const float largest = max_lanes(max);
  const Vec origin = splat(exp_origin(largest));
  Vec sum{};
  for (int64_t c = 0; c < count; c += kLanes) {
    const Vec p = exp_nonpositive(load(scores + c) - origin);
    store(scores + c, p);
    sum += p;
  }
  const float shrink = exp_nonpositive(splat(state.max) - origin)[0];
  state.sum = state.sum * shrink + sum_lanes(sum);
  state.max = largest;
  return shrink;
}

}  // namespace fa::FA_ISA
