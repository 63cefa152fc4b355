// FlashAttentionScoreGrad as the kernels get it: the problem of the forward pass, and where the gradients go.
//
// With P = exp(S - softmax_max) / softmax_sum, F the factors of dropout (0 or 1 / keep_prob), O = attention_in:
//
//     dV = (P F)^T dO    dP = (dO V^T) F    dS = P (dP - rowsum(dO O))    dQ = scale dS K    dK = scale dS^T Q
//     dsink = -sum over rows of p_sink rowsum(P dP),  p_sink = exp(sink - softmax_max) / softmax_sum
//
// A score counts as softmax_max at most, so that P never exceeds 1 / softmax_sum: the statistics may be rounded in another
// way. P is 0 where a row does not attend. With mask_value it is that of this score there, but dS is 0. dK and dV add up
// over the query heads that share a key head.
#pragma once

#include "attention.hpp"

namespace fa {

struct Gradients {
  // `out` is attention_in; softmax_max and softmax_sum are inputs.
  Problem problem;
  const void* dy = nullptr;  // has the layout of `out`
  // Each has the layout of its operand; null if nobody reads it.
  void* query = nullptr;
  void* key = nullptr;
  void* value = nullptr;
  void* query_rope = nullptr;
  void* key_rope = nullptr;
  float* sink = nullptr;  // [heads]

  bool wants_query() const { return query != nullptr || query_rope != nullptr; }
  bool wants_key() const { return key != nullptr || key_rope != nullptr; }
};

using Gradient = Outcome (*)(const Gradients&, const Runtime&);

}  // namespace fa
