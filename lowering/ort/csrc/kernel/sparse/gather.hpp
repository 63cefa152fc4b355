// Rows of selected keys, a block of them at a time. Where products can read the tensor directly they get addresses;
// otherwise the rows are copied as floats.
#pragma once

#include "../../sparse/problem.hpp"
#include "../prefetch.hpp"
#include "../pairs.hpp"

namespace fa::FA_ISA {

using sparse::Rows;

// Keys of a block, a multiple of the micro-tile. 48 keys of 576 floats take 108 KB, and those of the next block as much.
inline constexpr int kGatherKeys = 48;
static_assert(kGatherKeys % kMicroRows == 0 && kGatherKeys % kLanes == 0);

// Copies by vectors. GCC would turn a plain loop into a string instruction, which waits for each cache miss in turn.
FA_INLINE void copy_floats(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// Reads numbers [first, first + count) of a row into `out`, as floats.
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

// Copies a bfloat16 row, two numbers in each float. The sizes of its parts are even.
FA_INLINE void read_pairs(const Rows& rows, int64_t token, int64_t head, float* out) {
  const int64_t row = token * rows.heads + head;
  const auto bytes = [](int64_t numbers) { return static_cast<size_t>(numbers) * sizeof(uint16_t); };
  __builtin_memcpy(out, static_cast<const uint16_t*>(rows.plain) + row * rows.size, bytes(rows.size));
  if (rows.rope_size == 0) return;
  __builtin_memcpy(out + rows.size / 2, static_cast<const uint16_t*>(rows.rope) + row * rows.rope_size,
                   bytes(rows.rope_size));
}

// Reads a row as an operand of the products: floats, or with kPairs pairs of bfloat16.
template <bool kPairs>
FA_INLINE void read_operand(const Rows& rows, int64_t token, int64_t head, float* out) {
  if constexpr (kPairs) return read_pairs(rows, token, head, out);
  read_numbers(rows, token, head, 0, rows.numbers(), out);
}

FA_INLINE int64_t columns_of(int64_t numbers) { return ceil_div(numbers, kPanel) * kPanel; }

// Whether rows have the type and are whole panels. Products then read them in place.
FA_INLINE bool is_panel_aligned(const Rows& rows, Type type) {
  return rows.type == type && rows.size % kPanel == 0 && rows.rope_size % kPanel == 0;
}

// The rows of up to kGatherKeys keys, in one or two parts that continue each other. Each part is a whole number of panels;
// copies are filled up with 0. With kPairs rows are always read in place, two bfloat16 in each float.
template <bool kPairs>
class GatheredRows {
 public:
  // Floats of gather()'s buffer; 0 if rows are read in place.
  static int64_t floats(const Rows& rows) { return in_place(rows) ? 0 : columns_of(rows.numbers()) * kGatherKeys; }

  static bool in_place(const Rows& rows) { return kPairs || is_panel_aligned(rows, Type::float32); }

  explicit GatheredRows(const Rows& rows) : rows_(rows) {
    parts_ = in_place(rows) && rows.rope_size > 0 ? 2 : 1;
    numbers_[0] = in_place(rows) ? rows.size : columns_of(rows.numbers());
    numbers_[1] = rows.rope_size;
  }

  // Takes the rows of `count` <= kGatherKeys tokens.
  void gather(const int64_t* tokens, int64_t count, int64_t head, float* buffer) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = tokens[j] * rows_.heads + head;
      if (in_place(rows_)) {
        at_[0][j] = static_cast<const float*>(rows_.plain) + operand_floats(row * rows_.size);
        at_[1][j] = static_cast<const float*>(rows_.rope) + operand_floats(row * rows_.rope_size);
      } else {
        float* copy = buffer + j * numbers_[0];
        read_numbers(rows_, tokens[j], head, 0, rows_.numbers(), copy);
        for (int64_t d = rows_.numbers(); d < numbers_[0]; ++d) copy[d] = 0;
        at_[0][j] = copy;
      }
    }
    // A last micro-tile that is not full repeats the last row.
    for (int64_t j = count; j < kGatherKeys; ++j) {
      at_[0][j] = at_[0][count - 1];
      at_[1][j] = at_[1][count - 1];
    }
  }

  int parts() const { return parts_; }
  int64_t numbers(int part) const { return numbers_[part]; }
  const float* const* rows(int part) const { return at_[part]; }
  // Floats that hold so many numbers.
  static constexpr int64_t operand_floats(int64_t numbers) { return kPairs ? numbers / 2 : numbers; }

 private:
  const Rows& rows_;
  int parts_;
  int64_t numbers_[2];
  const float* at_[2][kGatherKeys];
};

inline constexpr int64_t kPrefetchFirstBytes = 2 * kCacheLine;

// Prefetches the rows of the next block, all at once. Their addresses are known, but each mostly lies in a page of its own,
// whose address takes longer to find than a line. The processor looks for several pages at a time. But a prefetch that has
// to wait for a page while a product runs stalls it: measured, rows prefetched during the products took longer than rows not
// prefetched.
//
// Of rows that score_tile reads first, only the beginnings and ends are prefetched (`entire` false). score_tile prefetches
// the rest itself.
FA_INLINE void prefetch(const Rows& rows, const int64_t* tokens, int64_t count, int64_t head, bool entire) {
  const int64_t width = rows.type == Type::float32 ? 4 : 2;
  for (int part = 0; part < 2; ++part) {
    const int64_t bytes = (part == 0 ? rows.size : rows.rope_size) * width;
    if (bytes == 0) continue;
    const char* data = static_cast<const char*>(part == 0 ? rows.plain : rows.rope) + head * bytes;
    for (const int64_t* token = tokens; token < tokens + count; ++token) {
      const char* row = data + *token * rows.heads * bytes;
      prefetch_lines(row, entire ? bytes : smaller(kPrefetchFirstBytes, bytes));
      if (!entire) prefetch(row + bytes - 1);
    }
  }
}

}  // namespace fa::FA_ISA
