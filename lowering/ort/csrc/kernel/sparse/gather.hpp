// Rows of selected keys brought together, as floats: chunk after chunk, each [kGatherKeys][kChunk]. One copy serves as
// the left operand of scores (key rows) and as the right operand of weighted sums (columns over keys), and being made
// once for all heads of a group it also hides the cost of reading rows that lie anywhere.
#pragma once

#include "../../sparse/problem.hpp"
#include "../convert.hpp"
#include "product.hpp"

namespace fa::FA_ISA {

using sparse::Rows;

// By vectors: a copy that the compiler turns into one string instruction waits for each miss of the cache in turn.
FA_INLINE void copy_floats(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

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
    if (from != to) copy_floats(from, n, to);
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

// Up to kGatherKeys tokens of one head.
static void gather(const Rows& rows, const int64_t* tokens, int64_t count, int64_t head, float* buffer) {
  for (int64_t j = 0; j < count; ++j) gather_row(rows, tokens[j], head, j, buffer);
}

// Fetches the rows of the next block while the products of this one are computed: their addresses are known, but lie
// anywhere, so that nothing else would. First and second are the same where there is one tensor only.
class Ahead {
 public:
  Ahead(const Rows& first, const Rows& second, const int64_t* tokens, int64_t count, int64_t head)
      : first_(first), second_(second), tokens_(tokens), count_(count), head_(head) {}

  // The rows of tokens [begin, end) of the next block.
  void fetch(int64_t begin, int64_t end) const {
    for (int64_t j = begin; j < smaller(end, count_); ++j) {
      fetch_row(first_, tokens_[j]);
      if (&first_ != &second_) fetch_row(second_, tokens_[j]);
    }
  }

 private:
  void fetch_row(const Rows& rows, int64_t token) const {
    const int64_t width = rows.type == Type::float32 ? 4 : 2, row = token * rows.heads + head_;
    fetch_bytes(rows.plain, row * rows.size * width, rows.size * width);
    fetch_bytes(rows.rope, row * rows.rope_size * width, rows.rope_size * width);
  }
  static void fetch_bytes(const void* data, int64_t first, int64_t count) {
    const char* at = static_cast<const char*>(data) + first;
    for (int64_t byte = 0; byte < count; byte += 64) __builtin_prefetch(at + byte, 0, 2);
  }

  const Rows& first_;
  const Rows& second_;
  const int64_t* tokens_;
  int64_t count_, head_;
};

}  // namespace fa::FA_ISA
