// Rows of selected keys, a block of them at a time: where products can read the tensor as it is, they get its addresses;
// else the rows are copied as floats.
#pragma once

#include "../../sparse/problem.hpp"
#include "../prefetch.hpp"
#include "../pairs.hpp"

namespace fa::FA_ISA {

using sparse::Rows;

// Keys of a block, whole tiles of them: 576 floats each are 108 KB, and those of the next block as much.
inline constexpr int kGatherKeys = 48;

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

// The bits of a bfloat16 row, two numbers in each float; the sizes of its parts are even.
FA_INLINE void read_pairs(const Rows& rows, int64_t token, int64_t head, float* out) {
  const int64_t row = token * rows.heads + head;
  const auto bytes = [](int64_t numbers) { return static_cast<size_t>(numbers) * sizeof(uint16_t); };
  __builtin_memcpy(out, static_cast<const uint16_t*>(rows.plain) + row * rows.size, bytes(rows.size));
  if (rows.rope_size == 0) return;
  __builtin_memcpy(out + rows.size / 2, static_cast<const uint16_t*>(rows.rope) + row * rows.rope_size, bytes(rows.rope_size));
}

// Floats, or with kPairs pairs of bfloat16, of a row.
template <bool kPairs>
FA_INLINE void read_words(const Rows& rows, int64_t token, int64_t head, float* out) {
  if constexpr (kPairs) return read_pairs(rows, token, head, out);
  read_numbers(rows, token, head, 0, rows.numbers(), out);
}

FA_INLINE int64_t columns_of(int64_t numbers) { return blocks_of(numbers, kPanel) * kPanel; }

// Whether rows are whole panels, which products read where they lie.
FA_INLINE bool whole_panels(const Rows& rows, Type type) {
  return rows.type == type && rows.size % kPanel == 0 && rows.rope_size % kPanel == 0;
}

// The rows of up to kGatherKeys keys, in one or two parts that continue each other. A part is a whole number of panels:
// copies are filled up with 0. With kPairs rows are read in place, two bfloat16 in each float.
template <bool kPairs>
class Listed {
 public:
  // Floats of take()'s buffer; none where rows are read in place.
  static int64_t floats(const Rows& rows) { return in_place(rows) ? 0 : columns_of(rows.numbers()) * kGatherKeys; }

  static bool in_place(const Rows& rows) { return kPairs || whole_panels(rows, Type::float32); }

  explicit Listed(const Rows& rows) : rows_(rows) {
    parts_ = in_place(rows) && rows.rope_size > 0 ? 2 : 1;
    numbers_[0] = in_place(rows) ? rows.size : columns_of(rows.numbers());
    numbers_[1] = rows.rope_size;
  }

  void take(const int64_t* tokens, int64_t count, int64_t head, float* buffer) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = tokens[j] * rows_.heads + head;
      if (in_place(rows_)) {
        at_[0][j] = static_cast<const float*>(rows_.plain) + words(row * rows_.size);
        at_[1][j] = static_cast<const float*>(rows_.rope) + words(row * rows_.rope_size);
      } else {
        float* copy = buffer + j * numbers_[0];
        read_numbers(rows_, tokens[j], head, 0, rows_.numbers(), copy);
        for (int64_t d = rows_.numbers(); d < numbers_[0]; ++d) copy[d] = 0;
        at_[0][j] = copy;
      }
    }
    // A last tile that is not full repeats the last row.
    for (int64_t j = count; j < kGatherKeys; ++j) {
      at_[0][j] = at_[0][count - 1];
      at_[1][j] = at_[1][count - 1];
    }
  }

  int parts() const { return parts_; }
  int64_t numbers(int part) const { return numbers_[part]; }
  const float* const* rows(int part) const { return at_[part]; }
  // Floats that hold so many numbers.
  static constexpr int64_t words(int64_t numbers) { return kPairs ? numbers / 2 : numbers; }

 private:
  const Rows& rows_;
  int parts_;
  int64_t numbers_[2];
  const float* at_[2][kGatherKeys];
};

inline constexpr int64_t kFirstBytes = 2 * kCacheLine;

// Asks memory for the rows of the next block, all at once: their addresses are known, but they lie anywhere, mostly each in a
// page of its own, which takes longer to find than a line. Several pages are looked for at a time, but one that is asked for
// while a product runs holds it up: rows asked for along the way of the products took longer than rows not asked for. Of
// rows that score_tile reads first only the beginnings and ends: it asks for the rest itself, not long before it gets there.
FA_INLINE void ask_for(const Rows& rows, const int64_t* tokens, int64_t count, int64_t head, bool whole) {
  const int64_t width = rows.type == Type::float32 ? 4 : 2;
  for (int part = 0; part < 2; ++part) {
    const int64_t bytes = (part == 0 ? rows.size : rows.rope_size) * width;
    if (bytes == 0) continue;
    const char* data = static_cast<const char*>(part == 0 ? rows.plain : rows.rope) + head * bytes;
    for (const int64_t* token = tokens; token < tokens + count; ++token) {
      const char* row = data + *token * rows.heads * bytes;
      ask_for_lines(row, whole ? bytes : smaller(kFirstBytes, bytes));
      if (!whole) ask_for(row + bytes - 1);
    }
  }
}

}  // namespace fa::FA_ISA
