// Sums become gradients.
#pragma once

#include "../convert.hpp"
#include "../exp.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// Rows of dQ or dK: times the scale, the rope part to a tensor of its own.
FA_INLINE void put_scaled(const Problem& problem, const float* sum, int64_t size, float* buffer, void* whole, int64_t at,
                          void* rope, int64_t rope_at) {
  for (int64_t d = 0; d < size; ++d) buffer[d] = sum[d] * problem.scale;
  if (whole != nullptr) write_floats(whole, at, buffer, problem.head_size, problem.type);
  if (rope != nullptr) write_floats(rope, rope_at, buffer + problem.head_size, problem.rope_size, problem.type);
}

static void put_query(const Gradients& gradients, const Sequence& s, const Shape& shape, int64_t head, int64_t i,
                      const float* sum, float* buffer) {
  const Problem& p = gradients.problem;
  put_scaled(p, sum, shape.depth, buffer, gradients.query, s.query + head * p.query.head + i * p.query.row,
             gradients.query_rope, s.query_rope + head * p.query_rope.head + i * p.query_rope.row);
}

// Keys of blocks `part`, `part` + parts, ... of a pair.
static void put_keys(const Gradients& gradients, const Shape& shape, const Pair& pair, int64_t part, float* buffer) {
  const Problem& p = gradients.problem;
  const Sequence& s = *pair.sequence;
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    for (int64_t j = block * kBlockKeys; j < smaller(s.key_length, (block + 1) * kBlockKeys); ++j) {
      if (gradients.wants_key()) {
        put_scaled(p, pair.key_sums + j * shape.columns(), shape.depth, buffer, gradients.key,
                   s.key + pair.key_head * p.key.head + j * p.key.row, gradients.key_rope,
                   s.key_rope + pair.key_head * p.key_rope.head + j * p.key_rope.row);
      }
      if (gradients.value != nullptr) {
        write_floats(gradients.value, s.value + pair.key_head * p.value.head + j * p.value.row,
                     pair.value_sums + j * shape.value_columns(), shape.value_size, p.type);
      }
    }
  }
}

static void clear_keys(const Shape& shape, const Pair& pair, int64_t part) {
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    const int64_t first = block * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, pair.sequence->key_length - first);
    float* key = pair.key_sums + first * shape.columns();
    float* value = pair.value_sums + first * shape.value_columns();
    for (int64_t n = 0; n < keys * shape.columns(); ++n) key[n] = 0;
    for (int64_t n = 0; n < keys * shape.value_columns(); ++n) value[n] = 0;
  }
}

// What a row adds to the gradient of its head's sink.
FA_INLINE float sink_term(const Problem& problem, const Sequence& s, int64_t head, int64_t i, float dot) {
  const int64_t at = s.statistics + head * s.statistics_head + i * s.statistics_row;
  const float p = exp_nonpositive(splat(problem.sink[head] - problem.softmax_max[at]))[0] / problem.softmax_sum[at];
  return -p * dot;
}

}  // namespace fa::FA_ISA::grad
