// Soft caps of the scores: c * tanh(scale * (q . k) / c), the operator extension `cpu_softcap`. A capped product is a score
// before its bias, so nothing is left to be scaled.
#pragma once

#include "tanh.hpp"

namespace fa::FA_ISA {

struct Softcap {
  float cap;
  float factor;  // scale / cap

  Softcap(float c, float scale) : cap(c), factor(scale / c) {}

  // tanh of the scaled product. It is rounded alike wherever it is computed: the gradient needs the forward pass's scores.
  Vec share(Vec product) const { return tanh(rounded(product * factor)); }
  Vec score_of(Vec share) const { return rounded(share * cap); }
  Vec score(Vec product) const { return score_of(share(product)); }

  // Caps `count` products of a row in place. Whole vectors are read and written. (noinline: so that the softmax of a row
  // without a cap is compiled as if there were none)
  [[gnu::noinline]] void row(float* products, int64_t count) const {
    for (int64_t c = 0; c < count; c += kLanes) store(products + c, score(load(products + c)));
  }
};

// The scale that a product still needs: 1 if it has been capped, because a capped product is already scaled.
FA_INLINE float remaining_scale(float softcap, float scale) { return softcap == 0 ? scale : 1.0f; }

}  // namespace fa::FA_ISA
