// What the kernels ask of an instruction set, written without its instructions. The header of an instruction set derives
// a struct from Portable, adds the two numbers that Portable lacks, and hides each function for which it has a better
// instruction:
//
//   kRegisters  vector registers
//   kMicroRows  rows of a micro-tile of the matrix product (MR of BLIS), which is kMicroRows x 2 vectors of sums; an even
//               number that divides 48 (kGatherKeys and kBlockRows are multiples of it)
//
// simd.hpp includes the header that belongs to FA_ISA and names its struct Isa.
#pragma once

#include "vector.hpp"

namespace fa::FA_ISA {

// Rows of a tile, and the pairs in a row of a tile of A.
inline constexpr int kTileSide = 16;

struct Portable {
  // Whether there is an instruction that multiplies a vector by one lane of another one, as NEON has. Products then read their
  // left operand in vectors, not number by number.
  static constexpr bool kLaneOperands = false;

  // Values whose rows are a multiple of so many bytes apart are copied (kv_block.hpp).
  static constexpr int64_t kCopiedValueRows = 2048;

  // The most query rows of a tile (plan.hpp). Measured: with 96 rows a call takes up to 3 % more time than with 224.
  static constexpr int64_t kTileRows = 224;

  // Whether half a vector takes half the time of a whole one. If so, there is a function widened(LowVec), too.
  static constexpr bool kHalvesPay = false;

  FA_INLINE Vec widened(Vec v) { return v; }

  // The larger (smaller) number. The second operand wins when either is NaN: maximum(x, m) ignores a NaN in x,
  // maximum(m, x) keeps it.
  FA_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
  FA_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

  // Stores a whole vector at an aligned address, past the caches if the processor can. Before other threads read it,
  // finish_streams() has to be called.
  FA_INLINE void stream(float* p, Vec v) { store(p, v); }
  FA_INLINE void finish_streams() {}

  // Whether a comparison holds in all lanes.
  FA_INLINE bool all(IntVec holds) {
    uint64_t words[sizeof(IntVec) / sizeof(uint64_t)];
    __builtin_memcpy(words, &holds, sizeof words);
    uint64_t common = ~uint64_t{0};
    for (uint64_t word : words) common &= word;
    return common == ~uint64_t{0};
  }

  // Exponent and mantissa move to their place and one multiplication corrects the exponent's bias. The multiplication also
  // makes subnormal numbers right. Infinity and NaN get the largest exponent.
  FA_INLINE Vec widen_float16s(HalfVec x) {
    const BitVec bits = __builtin_convertvector(x, BitVec);
    const BitVec magnitude = (bits & 0x7fffu) << 13;
    const BitVec scaled = (BitVec)((Vec)magnitude * 0x1p112f);
    const BitVec wide = magnitude >= (0x1fu << 23) ? magnitude | 0x7f800000u : scaled;
    return (Vec)(wide | (bits & 0x8000u) << 16);
  }

  // Rounds to the nearest, ties to even; see narrow_float16.
  FA_INLINE HalfVec narrow_float16s(Vec x) {
    const auto magnitude = (BitVec)x & 0x7fffffffu;
    const BitVec small = (BitVec)((Vec)magnitude + 0.5f) - to_bits(0.5f);
    const BitVec normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    BitVec bits = magnitude < (113u << 23) ? small : normal;
    bits = magnitude >= to_bits(65520.0f) ? 0x7c00u - BitVec{} : bits;
    bits = magnitude > 0x7f800000u ? 0x7e00u - BitVec{} : bits;
    return __builtin_convertvector(((BitVec)x >> 16 & 0x8000u) | bits, HalfVec);
  }

  FA_INLINE HalfVec narrow_bfloat16s(Vec x) {
    const auto bits = (BitVec)x;
    const BitVec rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return __builtin_convertvector(x != x ? (bits >> 16 | 0x40u) : rounded, HalfVec);
  }

  FA_INLINE Vec widen_int8s(Int8Vec x) { return __builtin_convertvector(x, Vec); }

  // 2^f for f in [-0.5, 0.5]: the polynomial of exp_nonpositive (exp.hpp) in f ln 2.
  FA_INLINE Vec exp2_fraction(Vec f) {
    Vec p = f * 1.534581201e-4f + 1.339993121e-3f;
    p = p * f + 9.618488964e-3f;
    p = p * f + 5.550328787e-2f;
    p = p * f + 2.402264690e-1f;
    p = p * f + 6.931472083e-1f;
    return p * f + 1.0f;
  }

  // 2^x for x at most 0 or NaN. x - n is exact, so that nothing has to be split. Below -126 the result is 0.
  FA_INLINE Vec exp2_nonpositive(Vec x) {
    constexpr float kLowest = -126.0f;
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec low = splat(kLowest);
    const Vec clamped = maximum(low, x);
    const Vec shifted = clamped + kRounder;
    const Vec n = shifted - kRounder;
    const Vec p = exp2_fraction(clamped - n);
    const Vec power = (Vec)(((BitVec)shifted << 23) + 0x3f800000u);
    return clear_where(clamped == low, p * power);
  }

  // Whether products of bfloat16 two at a time are faster than products of floats. The kernels use the next four functions
  // only where they are.
  static constexpr bool kHasPairs = false;

  // sum[l] + a[2 l] b[2 l] + a[2 l + 1] b[2 l + 1]; a and b are bfloat16, two in each lane.
  FA_INLINE Vec add_pair_products(Vec sum, Vec a, Vec b) {
    const Vec even = (Vec)((BitVec)a << 16) * (Vec)((BitVec)b << 16);
    return sum + even + (Vec)((BitVec)a & 0xffff0000u) * (Vec)((BitVec)b & 0xffff0000u);
  }
  // The same with the pair `a` in all lanes.
  FA_INLINE Vec add_products_of_pair(Vec sum, const float& a, Vec b) {
    return add_pair_products(sum, (Vec)(to_bits(a) - BitVec{}), b);
  }
  // Operands of add_pair_products: numbers rounded to bfloat16.
  FA_INLINE HalfVec narrow_operands(Vec x) { return narrow_bfloat16s(x); }
  // The numbers of `first`, then those of `second`.
  FA_INLINE Vec narrow_operands(Vec first, Vec second) {
    const HalfVec both[] = {narrow_bfloat16s(first), narrow_bfloat16s(second)};
    return load_as<Vec>(both);
  }

  // Whether there are tile registers for products of pairs. The kernels use the functions up to add_tile_products() only where
  // there are. Such a variant is used for products of pairs alone, and another one for everything else.
  //
  // There are 8 tiles of kTileSide rows. Tiles 4 and 5 are operands A, with kTileSide pairs in a row. All others have one
  // vector in a row. Rows are `stride` floats apart in memory.
  static constexpr bool kHasTiles = false;

  struct Tile {
    float numbers[kTileSide][kTileSide];
  };
  static inline thread_local Tile tiles[8];
  template <int kTile>
  static constexpr int kTileColumns = kTile == 4 || kTile == 5 ? kTileSide : kLanes;

  // Each thread calls the first one before it uses tiles, and the second one afterwards.
  FA_INLINE void enable_tiles() {}
  FA_INLINE void disable_tiles() {}

  template <int kTile>
  FA_INLINE void clear_tile() {
    tiles[kTile] = {};
  }
  template <int kTile>
  FA_INLINE void load_tile(const float* from, int64_t stride) {
    for (int r = 0; r < kTileSide; ++r) {
      __builtin_memcpy(tiles[kTile].numbers[r], from + r * stride, kTileColumns<kTile> * sizeof(float));
    }
  }
  template <int kTile>
  FA_INLINE void store_tile(float* to, int64_t stride) {
    for (int r = 0; r < kTileSide; ++r) {
      __builtin_memcpy(to + r * stride, tiles[kTile].numbers[r], kTileColumns<kTile> * sizeof(float));
    }
  }
  // Tile C += tile A . tile B.
  template <int kC, int kA, int kB>
  FA_INLINE void add_tile_products() {
    const auto lower = [](float pair) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, pair) << 16); };
    const auto upper = [](float pair) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, pair) & 0xffff0000u); };
    for (int r = 0; r < kTileSide; ++r) {
      for (int k = 0; k < kTileSide; ++k) {
        for (int c = 0; c < kLanes; ++c) {
          const float a = tiles[kA].numbers[r][k], b = tiles[kB].numbers[k][c];
          tiles[kC].numbers[r][c] += lower(a) * lower(b) + upper(a) * upper(b);
        }
      }
    }
  }

  // The first `count` floats of a vector; the other lanes become 0. Reads no memory beyond them.
  FA_INLINE Vec load_first(const float* p, int64_t count) {
    Vec v{};
    __builtin_memcpy(&v, p, static_cast<size_t>(count) * sizeof(float));
    return v;
  }

  // Whether products of bytes four at a time are faster than products of floats. The kernels use the next function only where
  // they are.
  static constexpr bool kHasByteProducts = false;

  // sum[l] + the products of the four unsigned bytes in lane l of a and the four signed bytes in lane l of b.
  FA_INLINE IntVec add_byte_products(IntVec sum, Vec a, Vec b) {
    for (int n = 0; n < 4; ++n) {
      sum += (IntVec)((BitVec)a >> 8 * n & 0xffu) * ((IntVec)((BitVec)b << (24 - 8 * n)) >> 24);
    }
    return sum;
  }
};

}  // namespace fa::FA_ISA
