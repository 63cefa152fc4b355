// Sums become gradients.
#pragma once

#include "../prefetch.hpp"
#include "../convert.hpp"
#include "../exp.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// Writes `count` sums times a factor.
FA_INLINE void store_scaled(const float* sum, int64_t count, float factor, void* out, int64_t at, Type type,
                            float* buffer) {
  float* to = type == Type::float32 ? static_cast<float*>(out) + at : buffer;
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) store(to + d, load(sum + d) * factor);
  for (; d < count; ++d) to[d] = sum[d] * factor;
  if (type != Type::float32) write_floats(out, at, buffer, count, type);
}

// The tensor of a gradient. It has the layout of its operand.
FA_INLINE Strided gradient_rows(void* data, Strided as) {
  as.data = data;
  return as;
}

// Writes row n of a head of dQ or dK, times the scale. The rope part goes to a tensor of its own. `start` and `rope_start`
// are where the head begins.
FA_INLINE void store_row(const Problem& problem, const float* sum, const Strided& nope, int64_t start,
                         const Strided& rope, int64_t rope_start, int64_t n, float* buffer) {
  if (nope.data != nullptr) {
    prefetch_row(nope, problem.type, start, n + kPrefetchDistance, problem.head_size);
    store_scaled(sum, problem.head_size, problem.scale, nope.data, start + n * nope.row, problem.type, buffer);
  }
  if (rope.data != nullptr) {
    store_scaled(sum + problem.head_size, problem.rope_size, problem.scale, rope.data, rope_start + n * rope.row,
                 problem.type, buffer);
  }
}

static void store_dq(const Gradients& gradients, const Sequence& s, int64_t head, int64_t i, const float* sum,
                     float* buffer) {
  const Problem& p = gradients.problem;
  store_row(p, sum, gradient_rows(gradients.query, p.query), s.query + head * p.query.head,
            gradient_rows(gradients.query_rope, p.query_rope), s.query_rope + head * p.query_rope.head, i, buffer);
}

// Writes dK and dV of the spans of a split.
static void store_dk_dv(const Gradients& gradients, const Shape& shape, const KeyHeadPlan& plan, int64_t split,
                        float* buffer) {
  const Problem& p = gradients.problem;
  const Sequence& s = *plan.sequence;
  const Strided key = gradient_rows(gradients.key, p.key);
  const Strided rope = gradient_rows(gradients.key_rope, p.key_rope);
  const Strided value = gradient_rows(gradients.value, p.value);
  const int64_t key_start = s.key + plan.key_head * key.head;
  const int64_t rope_start = s.key_rope + plan.key_head * rope.head;
  const int64_t value_start = s.value + plan.key_head * value.head;
  const auto store = [&](int64_t first, int64_t keys) {
    for (int64_t j = first; j < first + keys; ++j) {
      store_row(p, plan.dk_sums + j * shape.columns(), key, key_start, rope, rope_start, j, buffer);
      if (value.data == nullptr) continue;
      prefetch_row(value, p.type, value_start, j + kPrefetchDistance, shape.value_size);
      store_scaled(plan.dv_sums + j * shape.value_columns(), shape.value_size, 1.0f, value.data,
                   value_start + j * value.row, p.type, buffer);
    }
  };
  plan.each_span(split, [&](int64_t span) { plan.each_block(span, store); });
}

// Clears the sums of dK and dV of the spans of a split.
static void clear_dk_dv(const Shape& shape, const KeyHeadPlan& plan, int64_t split) {
  const auto clear = [&](int64_t first, int64_t keys) {
    float* key = plan.dk_sums + first * shape.columns();
    float* value = plan.dv_sums + first * shape.value_columns();
    for (int64_t n = 0; n < keys * shape.columns(); ++n) key[n] = 0;
    for (int64_t n = 0; n < keys * shape.value_columns(); ++n) value[n] = 0;
  };
  plan.each_span(split, [&](int64_t span) { plan.each_block(span, clear); });
}

// What a row adds to the gradient of its head's sink.
FA_INLINE float sink_term(const Problem& problem, const Sequence& s, int64_t head, int64_t i, float dot) {
  const int64_t at = s.statistics + head * s.statistics_head + i * s.statistics_row;
  const float p = exp_nonpositive(splat(problem.sink[head] - problem.softmax_max[at]))[0] / problem.softmax_sum[at];
  return -p * dot;
}

}  // namespace fa::FA_ISA::grad
