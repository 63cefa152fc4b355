// Rows of query, key and value as floats, or as pairs of bfloat16.
#pragma once

#include "convert.hpp"

namespace fa::FA_ISA {

// A row of query or key, followed by its rope part: the sum of two dot products is then one dot product of longer rows.
// `nope` is the part without rotary embedding. `buffer` has room for both parts.
FA_INLINE const float* joined_row(const Problem& problem, const Strided& nope, int64_t at, const Strided& rope,
                                  int64_t rope_at, float* buffer) {
  const float* row = as_floats(nope.data, at, problem.head_size, problem.type, buffer);
  if (problem.rope_size == 0) return row;
  float* behind = buffer + problem.head_size;
  if (row != buffer) __builtin_memcpy(buffer, row, static_cast<size_t>(problem.head_size) * sizeof(float));
  const float* tail = as_floats(rope.data, rope_at, problem.rope_size, problem.type, behind);
  if (tail != behind) __builtin_memcpy(behind, tail, static_cast<size_t>(problem.rope_size) * sizeof(float));
  return buffer;
}

FA_INLINE const float* query_row(const Problem& problem, const Sequence& s, int64_t head, int64_t i, float* buffer) {
  return joined_row(problem, problem.query, s.query + head * problem.query.head + i * problem.query.row,
                    problem.query_rope, s.query_rope + head * problem.query_rope.head + i * problem.query_rope.row,
                    buffer);
}

FA_INLINE const float* key_row(const Problem& problem, const Sequence& s, int64_t key_head, int64_t j, float* buffer) {
  return joined_row(problem, problem.key, s.key + key_head * problem.key.head + j * problem.key.row, problem.key_rope,
                    s.key_rope + key_head * problem.key_rope.head + j * problem.key_rope.row, buffer);
}

// `count` bfloat16 numbers as they are, two in each float. An odd count is filled up with 0.
FA_INLINE const float* pairs_at(const void* data, int64_t at, int64_t count, float* buffer) {
  const auto* numbers = static_cast<const uint16_t*>(data) + at;
  if (count % 2 == 0) return reinterpret_cast<const float*>(numbers);
  auto* out = reinterpret_cast<char*>(buffer);
  const size_t size = static_cast<size_t>(count) * sizeof *numbers;
  __builtin_memcpy(out, numbers, size);
  __builtin_memset(out + size, 0, sizeof *numbers);
  return buffer;
}

// The same for a row followed by its rope part.
FA_INLINE const float* joined_pairs(const Problem& problem, const Strided& nope, int64_t at, const Strided& rope,
                                    int64_t rope_at, float* buffer) {
  if (problem.rope_size == 0) return pairs_at(nope.data, at, problem.head_size, buffer);
  auto* out = reinterpret_cast<char*>(buffer);
  const size_t size = static_cast<size_t>(problem.head_size) * sizeof(uint16_t);
  const size_t rope_size = static_cast<size_t>(problem.rope_size) * sizeof(uint16_t);
  __builtin_memcpy(out, static_cast<const uint16_t*>(nope.data) + at, size);
  __builtin_memcpy(out + size, static_cast<const uint16_t*>(rope.data) + rope_at, rope_size);
  __builtin_memset(out + size + rope_size, 0, sizeof(uint16_t));
  return buffer;
}

FA_INLINE const float* query_pairs(const Problem& problem, const Sequence& s, int64_t head, int64_t i, float* buffer) {
  return joined_pairs(problem, problem.query, s.query + head * problem.query.head + i * problem.query.row,
                      problem.query_rope, s.query_rope + head * problem.query_rope.head + i * problem.query_rope.row,
                      buffer);
}

FA_INLINE const float* key_pairs(const Problem& problem, const Sequence& s, int64_t key_head, int64_t j,
                                 float* buffer) {
  return joined_pairs(problem, problem.key, s.key + key_head * problem.key.head + j * problem.key.row,
                      problem.key_rope, s.key_rope + key_head * problem.key_rope.head + j * problem.key_rope.row,
                      buffer);
}

FA_INLINE const float* value_row(const Problem& problem, const Sequence& s, int64_t key_head, int64_t j,
                                 float* buffer) {
  const int64_t at = s.value + key_head * problem.value.head + j * problem.value.row;
  return as_floats(problem.value.data, at, problem.value_size, problem.type, buffer);
}

}  // namespace fa::FA_ISA
