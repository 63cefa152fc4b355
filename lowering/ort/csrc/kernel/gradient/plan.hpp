// How the gradient is divided: blocks of keys, blocks of query rows, chunks of query rows.
//
// A block of keys meets one block of query rows after another. The sums of its dK and dV stay in the caches meanwhile, and
// the sums of dQ are read and written once for each block of keys. A chunk is as many query rows as sums of dQ are kept for.
// It bounds the memory by the length of the sequence, not by its square. The division depends on the problem alone, never on
// the number of threads, and so does the order of every sum.
//
// In products of pairs (pairs.hpp) two bfloat16 lie in each float along the depth: two numbers of a row of Q, K, V or dO in
// the first two products, two query rows or two keys in the other three.
#pragma once

#include "../../gradient.hpp"
#include "../pairs.hpp"
#include "../view.hpp"

namespace fa::FA_ISA::grad {

// The most that a block has. They are multiples of every kMicroRows and every kPanel. Blocks of rows begin at an even row,
// for pairs.
inline constexpr int64_t kBlockKeys = 128;
inline constexpr int64_t kBlockRows = 192;
inline constexpr int64_t kChunkRows = 6 * kBlockRows;
static_assert(kBlockRows % kMicroRows == 0 && kMicroRows % 2 == 0 && kBlockKeys % kPanel == 0);

// Floats from one score row to the next: an odd number of cache lines, so that rows do not share a set.
inline constexpr int64_t kScoreStride = kBlockKeys + 16;
inline constexpr int64_t kPairStride = kBlockKeys / 2 + 16;  // rows of pairs of keys

// How many splits the whole problem should have, if it has fewer key heads: see Driver.
inline constexpr int64_t kSplitsWanted = 16;

// The size of equal parts of `count`. There are as few parts as hold at most `most` each; the size is rounded up to `step`,
// which divides `most`.
FA_INLINE int64_t even_block(int64_t count, int64_t most, int64_t step) {
  return ceil_div(ceil_div(count, larger(1, ceil_div(count, most))), step) * step;
}

// The distance of rows of so many floats. At a multiple of 8 cache lines, rows would share a few sets.
FA_INLINE int64_t avoid_set_conflicts(int64_t floats) { return floats % 128 == 0 ? floats + 16 : floats; }

// The sizes of the products.
struct Shape {
  int64_t qk_size;  // of a row of query or key: head size and rope part
  int64_t value_size;
  bool pairs;

  explicit Shape(const Problem& problem)
      : qk_size(problem.head_size + problem.rope_size), value_size(problem.value_size),
        pairs(kHasPairs && problem.type == Type::bfloat16) {}

  // Floats of a row of dQ, dK or dV.
  int64_t columns() const { return ceil_div(qk_size, kPanel) * kPanel; }
  int64_t value_columns() const { return ceil_div(value_size, kPanel) * kPanel; }
  // The depth of the products Q K^T and dO V^T, in floats. Their rows are filled up with 0.
  int64_t depth() const { return pairs ? ceil_div(qk_size, 2) : qk_size; }
  int64_t value_depth() const { return pairs ? ceil_div(value_size, 2) : value_size; }
  int64_t row() const { return avoid_set_conflicts(pairs ? columns() / 2 : columns()); }
  int64_t value_row() const { return avoid_set_conflicts(pairs ? value_columns() / 2 : value_columns()); }
  // The distance of interleaved rows.
  int64_t line() const { return avoid_set_conflicts(columns()); }
  int64_t value_line() const { return avoid_set_conflicts(value_columns()); }
  // The depth rounded up to vectors.
  int64_t depth_padded() const { return ceil_div(depth(), kLanes) * kLanes; }
  int64_t value_depth_padded() const { return ceil_div(value_depth(), kLanes) * kLanes; }
};

// Query rows [begin, end) of some heads that share a key head.
struct QueryChunk {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t rows() const { return head_count * per_head(); }
  int64_t block_rows() const { return even_block(rows(), kBlockRows, kMicroRows); }
  int64_t head_of(int64_t r) const { return first_head + r / per_head(); }
  int64_t index_of(int64_t r) const { return begin + r % per_head(); }
};

// A sequence and a key head. If it is split, split n has the blocks of keys n, n + splits, n + 2 splits, ..., so that under
// a causal mask every split has work in every chunk.
struct KeyHeadPlan {
  const Sequence* sequence;
  int64_t key_head;
  int64_t group;
  int64_t block_keys;
  int64_t blocks;
  int64_t splits;
  int64_t heads;       // of a chunk
  int64_t chunk_rows;  // of one head
  int64_t chunks_per_head;
  int64_t chunks;
  float* dk_sums = nullptr;   // [key_length][columns]
  float* dv_sums = nullptr;   // [key_length][value_columns]
  float* row_sums = nullptr;  // of each split: see RowSums

  KeyHeadPlan(const Sequence& s, int64_t head, int64_t group_size, int64_t share)
      : sequence(&s), key_head(head), group(group_size), block_keys(even_block(s.key_length, kBlockKeys, kPanel)),
        blocks(ceil_div(s.key_length, larger(1, block_keys))), splits(smaller(larger(1, share), blocks)),
        chunk_rows(even_block(s.query_length, kChunkRows, kMicroRows)) {
    chunks_per_head = ceil_div(s.query_length, chunk_rows);
    heads = chunks_per_head > 1 ? 1 : larger(1, smaller(group, kChunkRows / s.query_length));
    chunks = chunks_per_head * ceil_div(group, heads);
  }

  QueryChunk chunk(int64_t n) const {
    const int64_t first = n / chunks_per_head * heads;
    const int64_t begin = n % chunks_per_head * chunk_rows;
    return {key_head * group + first, smaller(heads, group - first), begin,
            smaller(sequence->query_length, begin + chunk_rows)};
  }
};

// The sums of one split for the query rows of a chunk.
struct RowSums {
  float* dq;         // [rows][columns]: dS K
  float* sink_dots;  // [rows]: rowsum(P dP), for the sink

  static int64_t floats(const Shape& shape) { return kChunkRows * (shape.columns() + 1); }
  RowSums(float* memory, const Shape& shape) : dq(memory), sink_dots(memory + kChunkRows * shape.columns()) {}
};

inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

FA_INLINE int64_t cache_lines(int64_t floats) { return ceil_div(floats, 16) * 16; }

// The columns of a block that some row of a micro-tile, or of a block, sees. It begins at a vector.
struct Window {
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  bool meets(int64_t from, int64_t to) const { return begin < to && from < end; }
};

// The memory of one worker.
struct Scratch {
  float* queries;            // of a chunk: [kChunkRows][row]
  float* dys;                // of a chunk: [kChunkRows][value_row]
  float* query_lines;        // queries as lines of dS^T Q; with pairs, two rows in each: [kChunkRows / 2][line]
  float* dy_lines;           // dys as lines of (P F)^T dO, likewise: [kChunkRows / 2][value_line]
  float* max;                // [kChunkRows]
  float* weight;             // [kChunkRows]: 1 / softmax_sum
  float* delta;              // [kChunkRows]: rowsum(dO O)
  float* masked_p;           // [kChunkRows]: at least the largest P of a masked key; 0 if masked keys have no score (cpu_mask_value)
  float* key_lines;          // K of a block: [keys][line], with pairs two keys in each line
  float* keys_transposed;    // K^T as panels [depth_padded][kPanel]
  float* values_transposed;  // V^T as panels [value_depth_padded][kPanel]
  float* p;                  // [kBlockRows][kScoreStride]: Q K^T, then P F; with pairs, two rows in each even row
  float* ds;                 // [kBlockRows][kScoreStride]: dO V^T, then dS, likewise
  float* ds_pairs;           // [kBlockRows][kPairStride]: dS as pairs of keys
  float* row_buffer;         // kLanes rows of K or V and one to convert, or two rows of bias
  float* unsplit_sums;       // sums of a key head that is not split: RowSums, dK, dV
  View* views;               // [kBlockRows]: the keys of the block that each row sees
  Window* windows;           // [kBlockRows / kMicroRows]: the keys of the block that some row of each micro-tile sees
  uint8_t* hidden;           // [2][kScoreStride]: not 0 where the mask or the band hides a key, for two rows
  uint8_t* empty;            // [kChunkRows]: rows that attend no key but have probabilities
  uint8_t* zeroed;           // [kChunkRows]: rows whose probabilities cpu_nan_rows set to 0
  uint8_t* finite;  // [2][kChunkRows]: whether a block of query rows is finite, at its first row; then the same for dO

  // `unsplit_keys`: the longest key_length of a key head that is not split; 0 if there is none.
  Scratch(void* memory, const Shape& shape, int64_t unsplit_keys) { lay(static_cast<char*>(memory), shape, unsplit_keys); }

  static size_t bytes(const Shape& shape, int64_t unsplit_keys) {
    Scratch s;
    return kAlignment + static_cast<size_t>(s.lay(nullptr, shape, unsplit_keys));
  }

 private:
  Scratch() = default;

  // Sets the pointers. Returns how many bytes they take from the first aligned one on.
  int64_t lay(char* memory, const Shape& shape, int64_t unsplit_keys) {
    char* const begin = reinterpret_cast<char*>(aligned(memory));
    char* end = begin;
    const auto floats = [&](int64_t count) {
      auto* of = reinterpret_cast<float*>(end);
      end += cache_lines(count) * static_cast<int64_t>(sizeof(float));
      return of;
    };
    const int64_t two = shape.pairs ? 2 : 1;
    queries = floats(kChunkRows * shape.row());
    dys = floats(kChunkRows * shape.value_row());
    query_lines = shape.pairs ? floats(kChunkRows / two * shape.line()) : queries;
    dy_lines = shape.pairs ? floats(kChunkRows / two * shape.value_line()) : dys;
    max = floats(kChunkRows);
    weight = floats(kChunkRows);
    delta = floats(kChunkRows);
    masked_p = floats(kChunkRows);
    key_lines = floats(kBlockKeys / two * shape.line());
    keys_transposed = floats(kBlockKeys * shape.depth_padded());
    values_transposed = floats(kBlockKeys * shape.value_depth_padded());
    p = floats(kBlockRows * kScoreStride);
    ds = floats(kBlockRows * kScoreStride);
    ds_pairs = shape.pairs ? floats(kBlockRows * kPairStride) : nullptr;
    row_buffer = floats(larger(larger(shape.line(), shape.value_line()) * (kLanes + 1), 2 * kScoreStride) + kLanes);
    unsplit_sums = floats(unsplit_keys == 0 ? 0
                          : cache_lines(RowSums::floats(shape)) +
                                unsplit_keys * (shape.columns() + shape.value_columns()));
    views = reinterpret_cast<View*>(end);
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows / kMicroRows);
    empty = hidden + 2 * kScoreStride;
    zeroed = empty + kChunkRows;
    finite = zeroed + kChunkRows;
    return reinterpret_cast<char*>(finite + 2 * kChunkRows) - begin;
  }
};

}  // namespace fa::FA_ISA::grad
