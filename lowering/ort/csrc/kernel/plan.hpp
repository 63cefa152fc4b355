// How the work on one key head of one sequence is cut into tasks. It depends on the problem alone, never on the number
// of threads: the same question gives the same bits everywhere.
#pragma once

#include "skinny_product.hpp"
#include "kv_block.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of one task: a multiple of every kPanel. K and V come anew for each task, from the second-level cache or
// beyond, and where they are copied that is done anew; with 96 rows this takes up to 3 % more time.
inline constexpr int64_t kBlockRows = 224;
inline constexpr int64_t kFewerRows = 96;  // where there would be fewer than kTasksWanted

// Tasks that a problem should have so that no thread is long without one; with fewer, long rows are cut along the keys.
inline constexpr int64_t kTasksWanted = 32;

// Query rows [begin, end) of some heads that share a key head.
struct RowSpan {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t count() const { return head_count * per_head(); }
  // Mostly there is one head, and a division takes as long as ten products.
  int64_t head_of(int64_t r) const { return head_count == 1 ? first_head : first_head + r / per_head(); }
  int64_t index_of(int64_t r) const { return begin + (head_count == 1 ? r : r % per_head()); }
};

// Keys of a block for 1 to kDirectRows rows and so many keys, which are to be cut into so many chunks.
FA_INLINE int64_t few_keys(int64_t rows, int64_t keys, int64_t chunks) {
  const int64_t most = smaller(kMostFewBlockKeys, kFewBlockScores / rows) / kFewBlockUnit;
  const int64_t units = blocks_of(blocks_of(keys, chunks), kFewBlockUnit);
  return larger(1, smaller(most, units)) * kFewBlockUnit;
}

// Where a head has so few rows more than whole vectors, they are a span of their own, which goes the direct way: in a panel
// they would cost as much as a vector of rows. Image models have one such row, the class token; windows often have 49.
inline constexpr int64_t kTailRows = kLanes / 4;

// How the query rows that share a key head are cut into spans.
struct Cut {
  int64_t rows = 0;            // of one head in a span
  int64_t body = 0;            // rows of one head without the tail
  int64_t heads = 1;           // in a span
  int64_t spans_per_head = 1;  // 1 when a span holds several heads
  int64_t count = 0;

  Cut() = default;
  Cut(int64_t query_length, int64_t group, int64_t heads_in_all, bool direct) {
    const bool many = heads_in_all * group * blocks_of(query_length, kBlockRows) >= kTasksWanted;
    const int64_t most = many ? kBlockRows : kFewerRows;
    const int64_t tail = query_length % kLanes;
    const bool alone = direct && tail <= kTailRows && query_length > kLanes && smaller(group, most / query_length) < 2;
    body = alone ? query_length - tail : query_length;
    spans_per_head = blocks_of(body, most);
    rows = blocks_of(blocks_of(body, spans_per_head), kPanel) * kPanel;
    rows = smaller(rows, body);
    spans_per_head = blocks_of(body, rows) + (body < query_length ? 1 : 0);
    if (spans_per_head == 1) heads = larger(1, smaller(group, most / query_length));
    count = spans_per_head > 1 ? spans_per_head * group : blocks_of(group, heads);
  }

  // Last rows first: under a causal mask they are the longest tasks.
  RowSpan span(int64_t index, int64_t query_length, int64_t first_head, int64_t group) const {
    if (spans_per_head == 1) {
      const int64_t head = index * heads;
      return {first_head + head, smaller(heads, group - head), 0, query_length};
    }
    const int64_t begin = smaller((spans_per_head - 1 - index % spans_per_head) * rows, body);
    const int64_t end = begin == body ? query_length : smaller(body, begin + rows);
    return {first_head + index / spans_per_head, 1, begin, end};
  }
};

// One key head of one sequence. Only with a single span are its keys cut into chunks of whole blocks, whose results
// are merged.
struct HeadPlan {
  const Sequence* sequence;
  int64_t head;
  Cut cut;
  int64_t direct_rows;     // a span of at most so many rows goes the direct way
  int64_t few_block_keys;  // keys of a block where a span has few rows
  int64_t first_block;     // that some row sees
  int64_t end_block;
  int64_t chunk_blocks;
  int64_t chunks;
  int64_t left;  // chunks that are not done yet
  float* partial = nullptr;  // of chunks: see merge.hpp

  // `direct`: the direct way, whose order of sums is its own, may be taken.
  HeadPlan(const Sequence& s, int64_t key_head, int64_t group, int64_t heads_in_all, bool direct)
      : sequence(&s), head(key_head), cut(s.query_length, group, heads_in_all, direct),
        direct_rows(direct ? kDirectRows : 0) {
    const KeyRange range = banded(s, 0, s.query_length - 1);
    const int64_t wanted = blocks_of(kTasksWanted, heads_in_all);
    const int64_t rows = s.query_length * group;
    few_block_keys = few_keys(larger(1, smaller(rows, kDirectRows)), range.end - range.begin, wanted);
    const int64_t block_keys = rows <= direct_rows ? few_block_keys : kBlockKeys;
    first_block = range.begin / block_keys;
    end_block = larger(first_block, blocks_of(range.end, block_keys));
    chunk_blocks = larger(1, end_block - first_block);
    if (cut.count == 1) {
      chunk_blocks = blocks_of(chunk_blocks, smaller(chunk_blocks, wanted));
    }
    left = chunks = larger(1, blocks_of(end_block - first_block, chunk_blocks));
  }

  int64_t tasks() const { return chunks > 1 ? chunks : cut.count; }
};

}  // namespace fa::FA_ISA
