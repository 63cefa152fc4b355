// The input of the kernel of FlashAttentionScoreGrad: the problem of the forward pass, and the memory of the gradients.
//
// With P = exp(S - softmax_max) / softmax_sum, F the factors of dropout (0 or 1 / keep_prob), O = attention_in:
//
//     dV = (P F)^T dO    dP = (dO V^T) F    dS = P (dP - rowsum(dO O))    dQ = scale dS K    dK = scale dS^T Q
//     with a soft cap c: dQ = scale (dS (1 - tanh^2(scale A / c))) K, and dK likewise
//     dsink = -sum over rows of p_sink rowsum(P dP),  p_sink = exp(sink - softmax_max) / softmax_sum
//
// A score that exceeds softmax_max, because the statistics were rounded in another way, counts as softmax_max. So P
// never exceeds 1 / softmax_sum. If a row does not attend a key, P is 0, or with a finite mask_value or masked_bias the
// probability of its score; dS is 0 in all cases. dK and dV are sums over the query heads that share a key head.
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
