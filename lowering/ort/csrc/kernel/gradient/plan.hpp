// How the gradient is divided: blocks of keys, spans of blocks, blocks of query rows, chunks of query rows.
//
// A block of keys meets one block of query rows after another. The sums of its dK and dV stay in the caches meanwhile, and
// the sums of dQ are read and written once for each block of keys. A chunk is as many query rows as sums of dQ are kept for.
// It bounds the memory by the length of the sequence, not by its square.
//
// One thread at a time adds up dK and dV of a block of keys, over the query rows in their order. dQ is a sum over the spans of
// the keys, in their order, and each of its terms is a sum over the blocks of a span. So one thread may compute all spans of a
// key head, or several threads some spans each. The spans depend on the problem alone, and so does the order of every sum.
// Only the question of who computes a span depends on the number of threads.
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
inline constexpr int64_t kChunkBlocks = 6;
inline constexpr int64_t kChunkRows = kChunkBlocks * kBlockRows;
static_assert(kBlockRows % kMicroRows == 0 && kMicroRows % 2 == 0 && kBlockKeys % kPanel == 0);

// Floats from one score row to the next: an odd number of cache lines, so that rows do not share a set.
inline constexpr int64_t kScoreStride = kBlockKeys + 16;
inline constexpr int64_t kPairStride = kBlockKeys / 2 + 16;  // rows of pairs of keys

// The most spans of a key head. Where several threads share a key head, each span has sums of dQ of its own.
inline constexpr int64_t kMostSpans = 16;

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

// A sequence and a key head. If several threads share it, its spans are dealt to splits, to and fro: 0 1 2 2 1 0 0 1 2 ... So
// the splits have about the same work under a causal mask, too.
struct KeyHeadPlan {
  const Sequence* sequence;
  int64_t key_head;
  int64_t group;
  int64_t block_keys;
  int64_t blocks;
  int64_t span_blocks;
  int64_t spans;
  int64_t splits = 1;
  int64_t heads;       // of a chunk
  int64_t chunk_rows;  // of one head
  int64_t chunks_per_head;
  int64_t chunks;
  float* dk_sums = nullptr;   // [key_length][columns]
  float* dv_sums = nullptr;   // [key_length][value_columns]
  float* row_sums = nullptr;  // RowSums of each span, if several threads share the key head

  KeyHeadPlan(const Sequence& s, int64_t head, int64_t group_size)
      : sequence(&s), key_head(head), group(group_size), block_keys(even_block(s.key_length, kBlockKeys, kPanel)),
        blocks(ceil_div(s.key_length, larger(1, block_keys))), span_blocks(larger(1, ceil_div(blocks, kMostSpans))),
        spans(ceil_div(blocks, span_blocks)), chunk_rows(even_block(s.query_length, kChunkRows, kMicroRows)) {
    chunks_per_head = ceil_div(s.query_length, chunk_rows);
    heads = chunks_per_head > 1 ? 1 : larger(1, smaller(group, kChunkRows / s.query_length));
    chunks = chunks_per_head * ceil_div(group, heads);
  }

  // The most query rows of a chunk.
  int64_t rows_of_chunk() const { return smaller(heads * chunk_rows, kChunkRows); }

  // The n-th span of a split: `spans` or more if there is none.
  int64_t span_of(int64_t split, int64_t n) const { return n * splits + (n % 2 == 0 ? split : splits - 1 - split); }

  // Calls body(span) for the spans of a split.
  template <class Body>
  void each_span(int64_t split, Body body) const {
    for (int64_t n = 0; n * splits < spans; ++n) {
      if (span_of(split, n) < spans) body(span_of(split, n));
    }
  }
  // Calls body(first, keys) for the blocks of keys of a span.
  template <class Body>
  void each_block(int64_t span, Body body) const {
    for (int64_t block = span * span_blocks; block < smaller(blocks, (span + 1) * span_blocks); ++block) {
      const int64_t first = block * block_keys;
      body(first, smaller(block_keys, sequence->key_length - first));
    }
  }

  QueryChunk chunk(int64_t n) const {
    const int64_t first = n / chunks_per_head * heads;
    const int64_t begin = n % chunks_per_head * chunk_rows;
    return {key_head * group + first, smaller(heads, group - first), begin,
            smaller(sequence->query_length, begin + chunk_rows)};
  }
};

// Sums for the query rows of a chunk: those of one span, or of all spans.
struct RowSums {
  float* dq;         // [rows][columns]: dS K
  float* sink_dots;  // [rows]: rowsum(P dP), for the sink
  float* used;       // [1]: 0 if no row of the chunk sees a key of the span; the sums are then not set

  // For `rows` query rows.
  static int64_t floats(const Shape& shape, int64_t rows) { return ceil_div(rows * (shape.columns() + 1) + 1, 16) * 16; }
  RowSums(float* memory, const Shape& shape, int64_t rows)
      : dq(memory), sink_dots(dq + rows * shape.columns()), used(sink_dots + rows) {}

  void clear(int64_t begin, int64_t end, int64_t columns) const {
    for (int64_t n = begin * columns; n < end * columns; ++n) dq[n] = 0;
    for (int64_t r = begin; r < end; ++r) sink_dots[r] = 0;
  }
  void add(const RowSums& other, int64_t begin, int64_t end, int64_t columns) const {
    for (int64_t n = begin * columns; n < end * columns; ++n) dq[n] += other.dq[n];
    for (int64_t r = begin; r < end; ++r) sink_dots[r] += other.sink_dots[r];
  }
};

// The sums of one span of a shared key head.
FA_INLINE RowSums sums_of_span(const KeyHeadPlan& plan, int64_t span, const Shape& shape) {
  const int64_t rows = plan.rows_of_chunk();
  return RowSums(plan.row_sums + span * RowSums::floats(shape, rows), shape, rows);
}

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
  float* total_sums;         // RowSums of a key head that no other thread shares
  float* span_sums;          // RowSums of one of its spans, if a span has several blocks
  float* key_sums;           // its sums of dK and dV
  View* views;               // [kBlockRows]: the keys of the block that each row sees
  Window* windows;           // [kBlockRows / kMicroRows]: the keys of the block that some row of each micro-tile sees
  uint8_t* hidden;           // [2][kScoreStride]: not 0 where the mask or the band hides a key, for two rows
  uint8_t* empty;            // [kChunkRows]: rows that attend no key but have probabilities
  uint8_t* zeroed;           // [kChunkRows]: rows whose probabilities cpu_nan_rows set to 0
  uint8_t* packed;  // [kChunkBlocks]: whether the block of query rows is packed
  uint8_t* finite;  // [2][kChunkRows]: whether a block of query rows is finite, at its first row; then the same for dO

  // `own_keys`: the longest key_length of a key head that no other thread shares; 0 if there is none.
  Scratch(void* memory, const Shape& shape, int64_t own_keys) { lay(static_cast<char*>(memory), shape, own_keys); }

  static size_t bytes(const Shape& shape, int64_t own_keys) {
    Scratch s;
    return kAlignment + static_cast<size_t>(s.lay(nullptr, shape, own_keys));
  }

 private:
  Scratch() = default;

  // Sets the pointers. Returns how many bytes they take from the first aligned one on.
  int64_t lay(char* memory, const Shape& shape, int64_t own_keys) {
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
    total_sums = floats(own_keys == 0 ? 0 : RowSums::floats(shape, kChunkRows));
    span_sums = floats(own_keys <= kMostSpans * kBlockKeys ? 0 : RowSums::floats(shape, kChunkRows));
    key_sums = floats(own_keys * (shape.columns() + shape.value_columns()));
    views = reinterpret_cast<View*>(end);
    windows = reinterpret_cast<Window*>(views + kBlockRows);
    hidden = reinterpret_cast<uint8_t*>(windows + kBlockRows / kMicroRows);
    empty = hidden + 2 * kScoreStride;
    zeroed = empty + kChunkRows;
    packed = zeroed + kChunkRows;
    finite = packed + kChunkBlocks;
    return reinterpret_cast<char*>(finite + 2 * kChunkRows) - begin;
  }
};

}  // namespace fa::FA_ISA::grad
