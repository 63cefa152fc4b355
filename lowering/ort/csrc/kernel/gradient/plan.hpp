// How the gradient is cut: blocks of keys, blocks of query rows, waves of query rows.
//
// A block of keys meets one block of query rows after another: the sums of its dK and dV stay near while the sums of dQ
// are read and written once for each block of keys. A wave is as many query rows as sums of dQ are kept at a time; with
// it the memory is bounded by the length, not by its square. All of this depends on the problem alone, never on the
// number of threads, and so does the order of every sum.
//
// Where the products are made of pairs (pairs.hpp), two bfloat16 lie in each float along the depth of a product: the
// numbers of a row of Q, K, V or dO for the first two, two query rows or two keys for the other three.
#pragma once

#include "../../gradient.hpp"
#include "../pairs.hpp"
#include "../view.hpp"

namespace fa::FA_ISA::grad {

// At most. Multiples of every kMicroRows and every kPanel; blocks of rows begin at an even row, for pairs.
inline constexpr int64_t kBlockKeys = 128;
inline constexpr int64_t kBlockRows = 192;
inline constexpr int64_t kWaveRows = 6 * kBlockRows;

// Floats from one score row to the next: an odd number of cache lines, so that rows do not share a set.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;
inline constexpr int64_t kPairRow = kBlockKeys / 2 + 16;  // of a row of pairs of keys

// Parts that a problem is cut into, at least as far as it has key heads: see Driver.
inline constexpr int64_t kPartsWanted = 16;

// The size of equal parts of `count`, as few as hold at most `most` each, rounded up to `step`; `step` divides `most`.
FA_INLINE int64_t even_part(int64_t count, int64_t most, int64_t step) {
  return blocks_of(blocks_of(count, larger(1, blocks_of(count, most))), step) * step;
}

// Floats from one row of so many to the next: rows of a multiple of 8 cache lines would share a few sets.
FA_INLINE int64_t spaced(int64_t floats) { return floats % 128 == 0 ? floats + 16 : floats; }

struct Shape {
  int64_t numbers;  // of a row of query or key: head size and rope part
  int64_t value_size;
  bool pairs;

  explicit Shape(const Problem& problem)
      : numbers(problem.head_size + problem.rope_size), value_size(problem.value_size),
        pairs(kHasPairs && problem.type == Type::bfloat16) {}

  // Of sums.
  int64_t columns() const { return blocks_of(numbers, kPanel) * kPanel; }
  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
  // The depth of the products of Q and K, and of dO and V, in floats; their rows are filled up with 0.
  int64_t depth() const { return pairs ? blocks_of(numbers, 2) : numbers; }
  int64_t value_depth() const { return pairs ? blocks_of(value_size, 2) : value_size; }
  int64_t row() const { return spaced(pairs ? columns() / 2 : columns()); }
  int64_t value_row() const { return spaced(pairs ? value_columns() / 2 : value_columns()); }
  // Of lines of two rows.
  int64_t line() const { return spaced(columns()); }
  int64_t value_line() const { return spaced(value_columns()); }
  // Panels of rows turned into columns.
  int64_t across() const { return blocks_of(depth(), kLanes) * kLanes; }
  int64_t value_across() const { return blocks_of(value_depth(), kLanes) * kLanes; }
};

// Query rows [begin, end) of some heads that share a key head.
struct Wave {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t rows() const { return head_count * per_head(); }
  int64_t block_rows() const { return even_part(rows(), kBlockRows, kMicroRows); }
  int64_t head_of(int64_t r) const { return first_head + r / per_head(); }
  int64_t index_of(int64_t r) const { return begin + r % per_head(); }
};

// A sequence and a key head. `parts` share the work: part n has the blocks of keys n, n + parts, n + 2 parts, ..., so
// that a causal mask leaves all of them something in every wave.
struct Pair {
  const Sequence* sequence;
  int64_t key_head;
  int64_t group;
  int64_t block_keys;
  int64_t blocks;
  int64_t parts;
  int64_t heads;      // of a wave
  int64_t wave_rows;  // of a head
  int64_t waves_per_head;
  int64_t waves;
  float* key_sums = nullptr;    // [key_length][columns]
  float* value_sums = nullptr;  // [key_length][value_columns]
  float* row_sums = nullptr;    // of each part: see RowSums

  Pair(const Sequence& s, int64_t head, int64_t group_size, int64_t share)
      : sequence(&s), key_head(head), group(group_size), block_keys(even_part(s.key_length, kBlockKeys, kPanel)),
        blocks(blocks_of(s.key_length, larger(1, block_keys))), parts(smaller(larger(1, share), blocks)),
        wave_rows(even_part(s.query_length, kWaveRows, kMicroRows)) {
    waves_per_head = blocks_of(s.query_length, wave_rows);
    heads = waves_per_head > 1 ? 1 : larger(1, smaller(group, kWaveRows / s.query_length));
    waves = waves_per_head * blocks_of(group, heads);
  }

  Wave wave(int64_t n) const {
    const int64_t first = n / waves_per_head * heads;
    const int64_t begin = n % waves_per_head * wave_rows;
    return {key_head * group + first, smaller(heads, group - first), begin,
            smaller(sequence->query_length, begin + wave_rows)};
  }
};

// What one part adds up for the query rows of a wave.
struct RowSums {
  float* query;  // [rows][columns]: dS K
  float* dots;   // [rows]: of P and dP, for the sink

  static int64_t floats(const Shape& shape) { return kWaveRows * (shape.columns() + 1); }
  RowSums(float* memory, const Shape& shape) : query(memory), dots(memory + kWaveRows * shape.columns()) {}
};

inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

FA_INLINE int64_t cache_lines(int64_t floats) { return blocks_of(floats, 16) * 16; }

// Columns of a block that some row of a tile, or of a block, sees; begins at a vector.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  bool meets(int64_t from, int64_t to) const { return begin < to && from < end; }
};

// The memory of one worker.
struct Scratch {
  float* queries;        // of a wave: [kWaveRows][row]
  float* dys;            // of a wave: [kWaveRows][value_row]
  float* query_lines;    // the same as lines of a product over rows: with pairs two rows each, [kWaveRows / 2][line]
  float* dy_lines;       // [kWaveRows / 2][value_line]
  float* max;            // [kWaveRows]
  float* weight;         // [kWaveRows]: 1 / softmax_sum
  float* delta;          // [kWaveRows]: rowsum(dO O)
  float* fill;           // [kWaveRows]: P of a masked key that has a score all the same (cpu_mask_value)
  float* key_lines;      // a block's K: [keys][line], with pairs two keys each
  float* keys_across;    // K^T as panels [across][kPanel]
  float* values_across;  // V^T as panels [value_across][kPanel]
  float* p;              // [kBlockRows][kScoreRow]: products of Q and K, then P F; pairs of rows lie in the even ones
  float* ds;             // [kBlockRows][kScoreRow]: products of dO and V, then dS, likewise
  float* ds_pairs;       // [kBlockRows][kPairRow]: dS in pairs of keys
  float* rows;           // kLanes rows of K or V and one on its way, or two bias rows
  float* own;            // sums of a pair that is a part on its own: RowSums, dK, dV
  View* views;           // [kBlockRows]
  Window* windows;       // [kBlockRows / kMicroRows]
  uint8_t* hidden;       // [2][kScoreRow]
  uint8_t* empty;        // [kWaveRows]: rows without a key that have probabilities all the same
  uint8_t* silent;       // [kWaveRows]: rows whose probabilities cpu_nan_rows made 0
  uint8_t* finite;       // [2][kWaveRows]: of a block of query rows (by its first one), then of dO

  // `keys_alone`: the longest key_length of a pair that is a part on its own; 0 if there is none.
  Scratch(void* memory, const Shape& shape, int64_t keys_alone) { lay(static_cast<char*>(memory), shape, keys_alone); }

  static size_t bytes(const Shape& shape, int64_t keys_alone) {
    Scratch s;
    return kAlignment + static_cast<size_t>(s.lay(nullptr, shape, keys_alone));
  }

 private:
  Scratch() = default;

  // Gives the bytes that all of it takes from the first aligned one on.
  int64_t lay(char* memory, const Shape& shape, int64_t keys_alone) {
    char* const begin = reinterpret_cast<char*>(aligned(memory));
    char* end = begin;
    const auto floats = [&](int64_t count) {
      auto* of = reinterpret_cast<float*>(end);
      end += cache_lines(count) * static_cast<int64_t>(sizeof(float));
      return of;
    };
    const int64_t two = shape.pairs ? 2 : 1;
    queries = floats(kWaveRows * shape.row());
    dys = floats(kWaveRows * shape.value_row());
    query_lines = shape.pairs ? floats(kWaveRows / two * shape.line()) : queries;
    dy_lines = shape.pairs ? floats(kWaveRows / two * shape.value_line()) : dys;
    max = floats(kWaveRows);
    weight = floats(kWaveRows);
    delta = floats(kWaveRows);
    fill = floats(kWaveRows);
    key_lines = floats(kBlockKeys / two * shape.line());
    keys_across = floats(kBlockKeys * shape.across());
    values_across = floats(kBlockKeys * shape.value_across());
    p = floats(kBlockRows * kScoreRow);
    ds = floats(kBlockRows * kScoreRow);
    ds_pairs = shape.pairs ? floats(kBlockRows * kPairRow) : nullptr;
    rows = floats(larger(larger(shape.line(), shape.value_line()) * (kLanes + 1), 2 * kScoreRow) + kLanes);
    own = floats(keys_alone == 0 ? 0
                                 : cache_lines(RowSums::floats(shape)) +
                                       keys_alone * (shape.columns() + shape.value_columns()));
    views = reinterpret_cast<View*>(end);
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows / kMicroRows);
    empty = hidden + 2 * kScoreRow;
    silent = empty + kWaveRows;
    finite = silent + kWaveRows;
    return reinterpret_cast<char*>(finite + 2 * kWaveRows) - begin;
  }
};

}  // namespace fa::FA_ISA::grad
