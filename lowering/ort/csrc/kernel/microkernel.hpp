// The matrix product of attention and its gradient: C = A B, C += A B or C = C diag(beta) + A B. A micro-tile of kMicroRows
// x kVectors vectors of C stays in registers while the depth runs (a GEMM micro-kernel as in BLIS).
//
// A row of B or C is a line of one or two vectors. A is read one number at a time and broadcast; it is read by rows or by
// columns.
//
// In the forward pass B and C are panels of query rows: a line holds one number of kPanel query rows. A is K or V as it lies
// in memory, so neither is packed: a micro-tile takes rows of K, or columns of V. B takes 8 KB at a head size of 64 and
// stays in the first-level cache while K goes by. The probabilities (32 KB) come from the first or second level, each step
// along the depth loads two vectors of them for 2 kMicroRows vector multiply-adds.
//
// With kPairs each 32-bit number of A or B is two bfloat16 that follow each other along the depth. The depth is then half as
// long, and the products are added as floats.
#pragma once

#include "prefetch_queue.hpp"

namespace fa::FA_ISA {

// Number (r, k) of A is data[r * stride + k].
struct RowMajor {
  const float* data;
  int64_t stride;
};

// Number (r, k) of A is data[k * stride + r].
struct ColumnMajor {
  const float* data;
  int64_t stride;
};

// Reads kRows numbers of A: at(r) for the present k. next() goes to the next k.
//
// Instruction sets that multiply a vector by one lane of another one (Isa::kLaneOperands) read A in vectors, too:
// load_lanes() reads the numbers of the next kSteps, lane(r, step) is one of them. kVectors vectors hold them; 0 means that
// they cannot be read so.
template <class A, int kRows>
struct Reader;

// Every third row has a pointer. base + stride and base + 2 stride are addresses that an instruction can form.
template <int kRows>
struct Reader<RowMajor, kRows> {
  const float* base[(kRows + 2) / 3];
  int64_t stride;

  explicit Reader(RowMajor a) : stride(a.stride) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r += 3) base[r / 3] = a.data + r * a.stride;
  }
  const float& at(int r) const { return base[r / 3][r % 3 * stride]; }
  void next(int steps = 1) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r += 3) base[r / 3] += steps;
  }

  static constexpr int kSteps = kLanes;
  static constexpr int kVectors = kRows;
  void load_lanes(Vec* numbers) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) numbers[r] = load(base[r / 3] + r % 3 * stride);
  }
  static float lane(const Vec* numbers, int r, int step) { return numbers[r][step]; }
};

template <int kRows>
struct Reader<ColumnMajor, kRows> {
  const float* data;
  int64_t stride;

  explicit Reader(ColumnMajor a) : data(a.data), stride(a.stride) {}
  const float& at(int r) const { return data[r]; }
  void next(int steps = 1) { data += steps * stride; }

  static constexpr int kSteps = 1;
  static constexpr int kVectors = kRows % kLanes == 0 ? kRows / kLanes : 0;
  void load_lanes(Vec* numbers) const {
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) numbers[n] = load(data + n * kLanes);
  }
  static float lane(const Vec* numbers, int r, int) { return numbers[r / kLanes][r % kLanes]; }
};

// A value of kVectors that means half a vector: only the lower half is computed, and the upper lanes of C become 0. Not with
// kPairs.
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

// Steps along the depth between two prefetches.
inline constexpr int64_t kPrefetchDepth = 16;

// A packed panel of B (BLIS), whose lines are `stride` floats apart.
struct PanelB {
  const float* data;
  int64_t stride = kPanel;
};

// The factor of C, as in BLAS. With `diagonal` each column has its own: C = C diag(beta) + A B. `added` is a factor of 1, too,
// but A B is added up by itself before it is added to C, as if it had been stored in between.
enum class Beta { zero, one, added, diagonal };

// C. If `column_max` is given, it is raised to the largest number in each column of A B.
struct Output {
  float* data;
  int64_t stride = kPanel;
  const float* beta = nullptr;
  float* column_max = nullptr;
};

// Adds `depth` products to the sums of a micro-tile. `numbers` and b.data go on.
template <int kRows, int kVectors, bool kPairs, class A, int kParts = Width<kVectors>::kParts>
FA_INLINE void add_along_depth(Reader<A, kRows>& numbers, PanelB& b, int64_t depth,
                               typename Width<kVectors>::Part (&sum)[kRows][kParts]) {
  using Part = typename Width<kVectors>::Part;
  int64_t k = depth;
  if constexpr (Isa::kLaneOperands && kVectors != kHalf && Reader<A, kRows>::kVectors > 0) {
    constexpr int kSteps = Reader<A, kRows>::kSteps;
    for (; k >= kSteps; k -= kSteps) {
      Vec lanes[Reader<A, kRows>::kVectors];
      numbers.load_lanes(lanes);
#pragma GCC unroll 16
      for (int step = 0; step < kSteps; ++step) {
        Vec line[kParts];
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) line[v] = load(b.data + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kParts; ++v) sum[r][v] += line[v] * numbers.lane(lanes, r, step);
        }
        b.data += b.stride;
      }
      numbers.next(kSteps);
    }
  }
  for (; k > 0; --k) {
    Part line[kParts];
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) line[v] = load_as<Part>(b.data + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float& x = numbers.at(r);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        if constexpr (kVectors == kHalf) {
          sum[r][v] += line[v] * x;
        } else if constexpr (kParts == 1) {
          sum[r][v] = add_products_of<kPairs>(sum[r][v], x, line[v]);
        } else {
          sum[r][v] = add_products<kPairs>(sum[r][v], x, line[v]);
        }
      }
    }
    numbers.next();
    b.data += b.stride;
  }
}

// One micro-tile: kRows x kVectors vectors of C stay in registers while `depth` runs.
template <int kRows, int kVectors, Beta kBeta, bool kPairs, class A>
FA_INLINE void multiply_rows(A a, PanelB b, int64_t depth, Output c, PrefetchQueue& prefetches) {
  using Part = typename Width<kVectors>::Part;
  constexpr int kParts = Width<kVectors>::kParts;
  Part sum[kRows][kParts];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      const float* at = c.data + r * c.stride + v * kLanes;
      if constexpr (kBeta == Beta::zero || kBeta == Beta::added) sum[r][v] = Part{};
      if constexpr (kBeta == Beta::one) sum[r][v] = load_as<Part>(at);
      if constexpr (kBeta == Beta::diagonal) sum[r][v] = load_as<Part>(at) * load_as<Part>(c.beta + v * kLanes);
    }
  }
  Reader<A, kRows> numbers(a);
  PrefetchRows current = prefetches.current;
  for (int64_t done = 0; done < depth; done += kPrefetchDepth) {
    current.issue(prefetches.rows_per_step);
    add_along_depth<kRows, kVectors, kPairs>(numbers, b, smaller(kPrefetchDepth, depth - done), sum);
  }
  prefetches.current = current;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      float* at = c.data + r * c.stride + v * kLanes;
      if constexpr (kBeta == Beta::added) sum[r][v] += load_as<Part>(at);
      store(at, Isa::widened(sum[r][v]));
    }
  }
  if (c.column_max == nullptr) return;
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    Vec largest = load(c.column_max + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) largest = maximum(Isa::widened(sum[r][v]), largest);
    store(c.column_max + v * kLanes, largest);
  }
}

// Computes C [rows][kVectors * kLanes] from A [rows][depth] and B [depth][kVectors * kLanes]. `rows` is 1 to kMicroRows:
// each count is a loop of its own, so that a short last micro-tile does not pay for the missing rows.
template <int kVectors, Beta kBeta, bool kPairs, class A, int kRows = kMicroRows>
static void multiply(int64_t rows, A a, PanelB b, int64_t depth, Output c, PrefetchQueue& prefetches) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply<kVectors, kBeta, kPairs, A, kRows - 1>(rows, a, b, depth, c, prefetches);
      return;
    }
  }
  multiply_rows<kRows, kVectors, kBeta, kPairs>(a, b, depth, c, prefetches);
}

}  // namespace fa::FA_ISA
