// Sums become gradients.
#pragma once

#include "../prefetch.hpp"
#include "../convert.hpp"
#include "../exp.hpp"
#include "plan.hpp"

namespace fa::FA_ISA::grad {

// `count` sums times a factor.
FA_INLINE void put_numbers(const float* sum, int64_t count, float factor, void* out, int64_t at, Type type,
                           float* buffer) {
  float* to = type == Type::float32 ? static_cast<float*>(out) + at : buffer;
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) store(to + d, load(sum + d) * factor);
  for (; d < count; ++d) to[d] = sum[d] * factor;
  if (type != Type::float32) write_floats(out, at, buffer, count, type);
}

// A tensor of gradients, laid out as its operand.
FA_INLINE Strided laid_out(void* data, Strided as) {
  as.data = data;
  return as;
}

// Row n of a head of dQ or dK: times the scale, the rope part to a tensor of its own. Both start at the head.
FA_INLINE void put_scaled(const Problem& problem, const float* sum, const Strided& whole, int64_t start,
                          const Strided& rope, int64_t rope_start, int64_t n, float* buffer) {
  if (whole.data != nullptr) {
    ask_for_row(whole, problem.type, start, n + kAhead, problem.head_size);
    put_numbers(sum, problem.head_size, problem.scale, whole.data, start + n * whole.row, problem.type, buffer);
  }
  if (rope.data != nullptr) {
    put_numbers(sum + problem.head_size, problem.rope_size, problem.scale, rope.data, rope_start + n * rope.row,
                problem.type, buffer);
  }
}

static void put_query(const Gradients& gradients, const Sequence& s, int64_t head, int64_t i, const float* sum,
                      float* buffer) {
  const Problem& p = gradients.problem;
  put_scaled(p, sum, laid_out(gradients.query, p.query), s.query + head * p.query.head,
             laid_out(gradients.query_rope, p.query_rope), s.query_rope + head * p.query_rope.head, i, buffer);
}

// Keys of blocks `part`, `part` + parts, ... of a pair.
static void put_keys(const Gradients& gradients, const Shape& shape, const Pair& pair, int64_t part, float* buffer) {
  const Problem& p = gradients.problem;
  const Sequence& s = *pair.sequence;
  const Strided key = laid_out(gradients.key, p.key);
  const Strided rope = laid_out(gradients.key_rope, p.key_rope);
  const Strided value = laid_out(gradients.value, p.value);
  const int64_t key_start = s.key + pair.key_head * key.head;
  const int64_t rope_start = s.key_rope + pair.key_head * rope.head;
  const int64_t value_start = s.value + pair.key_head * value.head;
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    for (int64_t j = block * pair.block_keys; j < smaller(s.key_length, (block + 1) * pair.block_keys); ++j) {
      put_scaled(p, pair.key_sums + j * shape.columns(), key, key_start, rope, rope_start, j, buffer);
      if (value.data == nullptr) continue;
      ask_for_row(value, p.type, value_start, j + kAhead, shape.value_size);
      put_numbers(pair.value_sums + j * shape.value_columns(), shape.value_size, 1.0f, value.data,
                  value_start + j * value.row, p.type, buffer);
    }
  }
}

static void clear_keys(const Shape& shape, const Pair& pair, int64_t part) {
  for (int64_t block = part; block < pair.blocks; block += pair.parts) {
    const int64_t first = block * pair.block_keys;
    const int64_t keys = smaller(pair.block_keys, pair.sequence->key_length - first);
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
