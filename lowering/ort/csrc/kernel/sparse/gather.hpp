// Rows of selected keys brought together, as floats: chunk after chunk, each [kGatherKeys][kChunk]. One copy serves as
// the left operand of scores (key rows) and as the right operand of weighted sums (columns over keys), and being made
// once for all heads of a group it also hides the cost of reading rows that lie anywhere.
#pragma once

#include "../../sparse/problem.hpp"
#include "../convert.hpp"
#include "product.hpp"

namespace fa::FA_ISA {

using sparse::Rows;

// Numbers [first, first + count) of a row into `out`.
FA_INLINE void read_numbers(const Rows& rows, int64_t token, int64_t head, int64_t first, int64_t count, float* out) {
  const int64_t row = token * rows.heads + head;
  const int64_t plain = smaller(larger(rows.size - first, 0), count);
  for (int part = 0; part < 2; ++part) {
    const int64_t n = part == 0 ? plain : count - plain;
    if (n <= 0) continue;
    const void* data = part == 0 ? rows.plain : rows.rope;
    const int64_t index = part == 0 ? row * rows.size + first : row * rows.rope_size + larger(first - rows.size, 0);
    float* to = out + (part == 0 ? 0 : plain);
    const float* from = as_floats(data, index, n, rows.type, to);
    if (from != to) __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
  }
}

FA_INLINE int64_t chunks_of(int64_t numbers) { return blocks_of(numbers, kChunk); }
FA_INLINE int64_t gathered_floats(int64_t numbers) { return chunks_of(numbers) * kChunk * kGatherKeys; }

// One row into place `slot` of the buffer. The end of the last vector is filled with 0, for products along the row.
FA_INLINE void gather_row(const Rows& rows, int64_t token, int64_t head, int64_t slot, float* buffer) {
  const int64_t numbers = rows.numbers();
  for (int64_t first = 0; first < numbers; first += kChunk) {
    const int64_t count = smaller(kChunk, numbers - first);
    float* out = buffer + first * kGatherKeys + slot * kChunk;
    read_numbers(rows, token, head, first, count, out);
    for (int64_t d = count; d % kLanes != 0; ++d) out[d] = 0;
  }
}

// Up to kGatherKeys tokens of one head. The row after the next is fetched ahead: its address is known, its place is not
// one the processor could guess.
static void gather(const Rows& rows, const int64_t* tokens, int64_t count, int64_t head, float* buffer) {
  const int64_t width = rows.type == Type::float32 ? 4 : 2;
  for (int64_t j = 0; j < count; ++j) {
    if (j + 2 < count) {
      const char* next = static_cast<const char*>(rows.plain) + (tokens[j + 2] * rows.heads + head) * rows.size * width;
      for (int64_t byte = 0; byte < rows.size * width; byte += 64) __builtin_prefetch(next + byte);
    }
    gather_row(rows, tokens[j], head, j, buffer);
  }
}

}  // namespace fa::FA_ISA
