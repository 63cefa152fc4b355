// How the gradient is cut: blocks of keys, blocks of query rows, waves of query rows.
//
// A block of keys meets one block of query rows after another: the sums of its dK and dV stay near while the sums of dQ
// are read and written once for each block of keys. A wave is as many query rows as sums of dQ are kept at a time; with
// it the memory is bounded by the length, not by its square. All of this depends on the problem alone, never on the
// number of threads, and so does the order of every sum.
#pragma once

#include "../../gradient.hpp"
#include "../view.hpp"

namespace fa::FA_ISA::grad {

// Multiples of every kTileRows; keys also of every kPanel.
inline constexpr int64_t kBlockKeys = 192;
inline constexpr int64_t kBlockRows = 96;
inline constexpr int64_t kWaveRows = 10 * kBlockRows;

// Floats from one score row to the next: an odd number of cache lines, so that rows do not share a set.
inline constexpr int64_t kScoreRow = kBlockKeys + 16;

// Parts that a problem is cut into, at least as far as it has key heads: see Driver.
inline constexpr int64_t kPartsWanted = 16;

struct Shape {
  int64_t depth;  // of the product of query and key: head size and rope part
  int64_t value_size;

  int64_t columns() const { return blocks_of(depth, kPanel) * kPanel; }
  int64_t value_columns() const { return blocks_of(value_size, kPanel) * kPanel; }
};

// Query rows [begin, end) of some heads that share a key head.
struct Wave {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t rows() const { return head_count * per_head(); }
  int64_t head_of(int64_t r) const { return first_head + r / per_head(); }
  int64_t index_of(int64_t r) const { return begin + r % per_head(); }
};

// A sequence and a key head. `parts` share the work: part n has the blocks of keys n, n + parts, n + 2 parts, ..., so
// that a causal mask leaves all of them something in every wave.
struct Pair {
  const Sequence* sequence;
  int64_t key_head;
  int64_t group;
  int64_t blocks;
  int64_t parts;
  int64_t heads;  // of a wave
  int64_t waves_per_head;
  int64_t waves;
  float* key_sums = nullptr;    // [key_length][columns]
  float* value_sums = nullptr;  // [key_length][value_columns]
  float* row_sums = nullptr;    // of each part: see RowSums

  Pair(const Sequence& s, int64_t head, int64_t group_size, int64_t share)
      : sequence(&s), key_head(head), group(group_size), blocks(blocks_of(s.key_length, kBlockKeys)),
        parts(smaller(larger(1, share), blocks)) {
    waves_per_head = blocks_of(s.query_length, kWaveRows);
    heads = waves_per_head > 1 ? 1 : larger(1, smaller(group, kWaveRows / s.query_length));
    waves = waves_per_head * blocks_of(group, heads);
  }

  Wave wave(int64_t n) const {
    const int64_t first = n / waves_per_head * heads;
    const int64_t begin = n % waves_per_head * kWaveRows;
    return {key_head * group + first, smaller(heads, group - first), begin,
            smaller(sequence->query_length, begin + kWaveRows)};
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

// Columns of a block that some row of a tile of kTileRows sees; begins at a panel.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  bool meets(int64_t from, int64_t to) const { return begin < to && from < end; }
};

// The memory of one worker. Query rows and dO lie block by block (kBlockRows), as panels [rows][kPanel].
struct Scratch {
  float* queries;        // of a wave
  float* dys;            // of a wave
  float* max;            // [kWaveRows]
  float* weight;         // [kWaveRows]: 1 / softmax_sum
  float* delta;          // [kWaveRows]: rowsum(dO O)
  float* fill;           // [kWaveRows]: P of a masked key that has a score all the same (cpu_mask_value)
  float* keys;           // a block's K as panels [keys][kPanel]
  float* keys_across;    // K^T as panels [depth][kPanel]
  float* values_across;  // V^T as panels [value_size][kPanel]
  float* p;              // [kBlockRows][kScoreRow]: products of Q and K, then P F
  float* ds;             // [kBlockRows][kScoreRow]: products of dO and V, then dS
  float* rows;           // kLanes converted rows, a bias row
  float* own;            // sums of a pair that is a part on its own: RowSums, dK, dV
  View* views;           // [kBlockRows]
  Window* windows;       // [kBlockRows / kTileRows]
  uint8_t* hidden;       // [kScoreRow]
  uint8_t* empty;        // [kWaveRows]: rows without a key that have probabilities all the same
  uint8_t* silent;       // [kWaveRows]: rows whose probabilities cpu_nan_rows made 0
  uint8_t* finite;       // [2 * kWaveRows / kBlockRows]: blocks of query rows, then of dO

  static int64_t row_floats(const Shape& shape) {
    return cache_lines(larger(larger(shape.columns(), shape.value_columns()) * kLanes, 2 * kScoreRow));
  }

  // `keys_alone`: the longest key_length of a pair that is a part on its own; 0 if there is none.
  static int64_t own_floats(const Shape& shape, int64_t keys_alone) {
    return keys_alone == 0
               ? 0
               : cache_lines(RowSums::floats(shape)) + keys_alone * (shape.columns() + shape.value_columns());
  }

  static size_t bytes(const Shape& shape, int64_t keys_alone) {
    const int64_t floats = (kWaveRows + kBlockKeys) * (shape.columns() + shape.value_columns()) + 4 * kWaveRows +
                           kBlockKeys * shape.columns() + 2 * kBlockRows * kScoreRow + row_floats(shape) +
                           own_floats(shape, keys_alone);
    return kAlignment + static_cast<size_t>(floats) * sizeof(float) + kBlockRows * (sizeof(View) + sizeof(Window)) +
           kScoreRow + 3 * kWaveRows;
  }

  Scratch(void* memory, const Shape& shape, int64_t keys_alone) {
    queries = aligned(memory);
    dys = queries + kWaveRows * shape.columns();
    max = dys + kWaveRows * shape.value_columns();
    weight = max + kWaveRows;
    delta = weight + kWaveRows;
    fill = delta + kWaveRows;
    keys = fill + kWaveRows;
    keys_across = keys + kBlockKeys * shape.columns();
    values_across = keys_across + kBlockKeys * shape.columns();
    p = values_across + kBlockKeys * shape.value_columns();
    ds = p + kBlockRows * kScoreRow;
    rows = ds + kBlockRows * kScoreRow;
    own = rows + row_floats(shape);
    views = reinterpret_cast<View*>(own + own_floats(shape, keys_alone));
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows);
    empty = hidden + kScoreRow;
    silent = empty + kWaveRows;
    finite = silent + kWaveRows;
  }
};

}  // namespace fa::FA_ISA::grad
