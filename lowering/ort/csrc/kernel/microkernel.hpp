// The matrix product that attention and its gradient are made of: a tile of kMicroRows x kVectors vectors of sums held in
// registers while k runs, C = A B, C += A B or C = C diag(alpha) + A B.
//
// B and C are lines of vectors; A is read one number at a time and broadcast, and a tile takes rows or columns of it.
//
// Forward, B and C are panels: vectors of query rows side by side, kPanel floats from one line to the next. A is K or V
// as it lies in memory, so that neither is packed: of K a tile takes rows; of V, columns. B is 8 KB for a head size of 64
// and stays in the first-level cache while K goes by; the probabilities (32 KB) come from there or from the second level,
// two lines for 2 kMicroRows products.
//
// With kPairs the 32 bits of a number of A or B are two bfloat16 that lie one after the other along the depth, which is
// then half as long; their products are added as floats.
#pragma once

#include "prefetch_queue.hpp"

namespace fa::FA_ISA {

// Number (r, k) of A at data[r * row + k].
struct RowsOf {
  const float* data;
  int64_t row;
};

// Number (r, k) of A at data[k * row + r].
struct ColumnsOf {
  const float* data;
  int64_t row;
};

// kRows numbers of A at a time: number r of the present k, and a step to the next k.
template <class A, int kRows>
struct Reader;

// Every third row has a pointer; base + row and base + 2 row are addresses an instruction can form.
template <int kRows>
struct Reader<RowsOf, kRows> {
  const float* base[(kRows + 2) / 3];
  int64_t row;

  explicit Reader(RowsOf a) : row(a.row) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r += 3) base[r / 3] = a.data + r * a.row;
  }
  float at(int r) const { return base[r / 3][r % 3 * row]; }
  void next() {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r += 3) ++base[r / 3];
  }
};

template <int kRows>
struct Reader<ColumnsOf, kRows> {
  const float* data;
  int64_t row;

  explicit Reader(ColumnsOf a) : data(a.data), row(a.row) {}
  float at(int r) const { return data[r]; }
  void next() { data += row; }
};

// Instead of a number of vectors, the lower half of one: the upper lanes of C become 0. Not with kPairs.
inline constexpr int kHalf = 0;

template <int kVectors>
struct Width {
  using Part = Vec;
  static constexpr int kParts = kVectors;
};
template <>
struct Width<kHalf> {
  using Part = LowVec;
  static constexpr int kParts = 1;
};

// Numbers along the depth between two looks ahead.
inline constexpr int64_t kStepDepth = 16;

// Lines of B, `row` floats from one to the next.
struct Lines {
  const float* data;
  int64_t row = kPanel;
};

// What becomes of C; with `scaled`, C diag(alpha) + A B.
enum class Sums { fresh, added, scaled };

// C. With `top`, the largest numbers of each of its columns so far are kept there.
struct Target {
  float* data;
  int64_t row = kPanel;
  const float* alpha = nullptr;
  float* top = nullptr;
};

template <int kRows, int kVectors, Sums kSums, bool kPairs, class A>
FA_INLINE void multiply_rows(A a, Lines b, int64_t depth, Target c, Upcoming& upcoming) {
  using Part = typename Width<kVectors>::Part;
  constexpr int kParts = Width<kVectors>::kParts;
  Part sum[kRows][kParts];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      const float* at = c.data + r * c.row + v * kLanes;
      if constexpr (kSums == Sums::fresh) sum[r][v] = Part{};
      if constexpr (kSums == Sums::added) sum[r][v] = load_as<Part>(at);
      if constexpr (kSums == Sums::scaled) sum[r][v] = load_as<Part>(at) * load_as<Part>(c.alpha + v * kLanes);
    }
  }
  Reader<A, kRows> numbers(a);
  RowsAhead ahead = upcoming.ahead;
  for (int64_t done = 0; done < depth; done += kStepDepth) {
    ahead.ask(upcoming.pace);
    for (int64_t k = smaller(kStepDepth, depth - done); k > 0; --k) {
      Part line[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) line[v] = load_as<Part>(b.data + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const float x = numbers.at(r);
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) {
          if constexpr (kVectors == kHalf) {
            sum[r][v] += line[v] * x;
          } else {
            sum[r][v] = add_products<kPairs>(sum[r][v], x, line[v]);
          }
        }
      }
      numbers.next();
      b.data += b.row;
    }
  }
  upcoming.ahead = ahead;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) store(c.data + r * c.row + v * kLanes, Isa::widened(sum[r][v]));
  }
  if (c.top == nullptr) return;
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    Vec largest = load(c.top + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) largest = greater(Isa::widened(sum[r][v]), largest);
    store(c.top + v * kLanes, largest);
  }
}

// `rows` from 1 to kMicroRows: each count is a loop of its own, so that a short last tile does not pay for the missing
// rows.
template <int kVectors, Sums kSums, bool kPairs, class A, int kRows = kMicroRows>
static void multiply(int64_t rows, A a, Lines b, int64_t depth, Target c, Upcoming& upcoming) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply<kVectors, kSums, kPairs, A, kRows - 1>(rows, a, b, depth, c, upcoming);
      return;
    }
  }
  multiply_rows<kRows, kVectors, kSums, kPairs>(a, b, depth, c, upcoming);
}

}  // namespace fa::FA_ISA
