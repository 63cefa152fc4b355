// The recurrence, token by token, on some vectors of columns of a state.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA::lin {

// One token. The state before it is `from` and the state after it `to`, which may be the same memory. `value` and `out` have
// kVectors vectors; `query` and `out` are null if nobody reads the result.
template <Gate kGate, Correction kCorrection, int kVectors>
FA_INLINE void step(const Shape& shape, const Scratch& s, int64_t t, Lines from, Lines to, const float* value,
                    const float* query, float* out) {
  const float* key = s.keys + t * shape.row;
  const float* factors = kGate == Gate::key ? s.factors + t * shape.row : s.factors + t;
  const float* writes = s.writes + t * shape.row;
  const auto factor = [&](int64_t d) { return kGate == Gate::none ? 1.0f : factors[kGate == Gate::key ? d : 0]; };
  // What is read of the state, and what is written with the key.
  Vec read[kVectors] = {}, added[kVectors];
  if constexpr (kCorrection != Correction::none) {
    const float* reads = s.reads + t * shape.row;
    constexpr int kBeside = 2;  // independent sums, so that none waits for the one before
    Vec sums[kBeside][kVectors] = {};
    const auto add = [&](int64_t d, Vec(&sum)[kVectors]) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] += load(from.data + d * from.stride + v * kLanes) * reads[d];
    };
    int64_t d = 0;
    for (; d + 1 < shape.keys; d += kBeside) {
      add(d, sums[0]);
      add(d + 1, sums[1]);
    }
    if (d < shape.keys) add(d, sums[0]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) read[v] = sums[0][v] + sums[1][v];
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    added[v] = load(value + v * kLanes);
    if constexpr (kCorrection == Correction::delta) added[v] = (added[v] - read[v]) * s.betas[t];
  }
  Vec result[kVectors] = {};
  for (int64_t d = 0; d < shape.keys; ++d) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec x = load(from.data + d * from.stride + v * kLanes);
      if constexpr (kGate != Gate::none) x *= factor(d);
      if constexpr (kCorrection == Correction::general) x += read[v] * writes[d];
      x += added[v] * key[d];
      store(to.data + d * to.stride + v * kLanes, x);
      if (query != nullptr) result[v] += x * query[d];
    }
  }
  if (query == nullptr) return;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

// out = query . state
template <int kVectors>
FA_INLINE void read_state(const Shape& shape, Lines state, const float* query, float* out) {
  Vec result[kVectors] = {};
  for (int64_t d = 0; d < shape.keys; ++d) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) result[v] += load(state.data + d * state.stride + v * kLanes) * query[d];
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

// `count` tokens with the values s.values; the results are s.results. Both have lines of kVectors vectors, and the tokens of
// each query head have room for kChunk of them.
template <Gate kGate, Correction kCorrection, int kVectors>
static void step_tokens(const Shape& shape, const Scratch& s, int64_t count, Lines from, Lines to, bool reads) {
  constexpr int64_t kLine = kVectors * kLanes;
  for (int64_t t = 0; t < count; ++t) {
    const float* query = s.queries + t * shape.row;
    float* out = s.results + t * kLine;
    if (reads) {
      step<kGate, kCorrection, kVectors>(shape, s, t, from, to, s.values + t * kLine, query, out);
    } else {
      step<kGate, kCorrection, kVectors>(shape, s, t, from, to, s.values + t * kLine, nullptr, nullptr);
    }
    for (int64_t n = 1; n < shape.group && reads; ++n) {
      read_state<kVectors>(shape, to, query + n * kChunk * shape.row, out + n * kChunk * kLine);
    }
    from = to;
  }
}

using StepTokens = void (*)(const Shape&, const Scratch&, int64_t count, Lines from, Lines to, bool reads);

template <Gate kGate, int kVectors>
FA_INLINE StepTokens step_tokens_with(Correction correction) {
  switch (correction) {
    case Correction::none: return step_tokens<kGate, Correction::none, kVectors>;
    case Correction::delta: return step_tokens<kGate, Correction::delta, kVectors>;
    case Correction::general: break;
  }
  return step_tokens<kGate, Correction::general, kVectors>;
}

template <int kVectors>
FA_INLINE StepTokens step_tokens_of(const Problem& problem) {
  switch (problem.gate) {
    case Gate::none: return step_tokens_with<Gate::none, kVectors>(problem.correction);
    case Gate::head: return step_tokens_with<Gate::head, kVectors>(problem.correction);
    case Gate::key: break;
  }
  return step_tokens_with<Gate::key, kVectors>(problem.correction);
}

}  // namespace fa::FA_ISA::lin
