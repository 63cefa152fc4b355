// How the attention of one key head of one sequence is divided into tasks. The division depends on the problem
// alone, never on the number of threads, so that the same call gives the same bits everywhere.
#pragma once

#include "skinny_product.hpp"
#include "kv_block.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of one tile (Br of FlashAttention): a multiple of every kPanel. Each tile reads K and V anew, from the
// second-level cache or beyond, and copies what has to be copied. Measured: with 96 rows this takes up to 3 % more time.
inline constexpr int64_t kTileRows = 224;
static_assert(kTileRows % kPanel == 0);
inline constexpr int64_t kSmallTileRows = 96;  // with fewer tasks than kTasksWanted

// Tasks that a problem should have, so that no thread waits long for the last one. A problem with fewer tasks is split along
// the keys.
inline constexpr int64_t kTasksWanted = 32;

// Query rows [begin, end) of some heads that share a key head. Prefetching also uses it for rows of K and V; the head is then
// a key head.
struct RowRange {
  int64_t first_head;
  int64_t head_count;
  int64_t begin;
  int64_t end;

  int64_t per_head() const { return end - begin; }
  int64_t count() const { return head_count * per_head(); }
  // There is mostly one head, and a division takes as long as ten products.
  int64_t head_of(int64_t r) const { return head_count == 1 ? first_head : first_head + r / per_head(); }
  int64_t index_of(int64_t r) const { return begin + (head_count == 1 ? r : r % per_head()); }
};

// Keys of a block in a skinny tile of 1 to kSkinnyRows rows. `keys` are divided into `splits` parts.
FA_INLINE int64_t skinny_block_size(int64_t rows, int64_t keys, int64_t splits) {
  const int64_t most = smaller(kMostSkinnyBlockKeys, kSkinnyBlockScores / rows) / kSkinnyBlockUnit;
  const int64_t units = ceil_div(ceil_div(keys, splits), kSkinnyBlockUnit);
  return larger(1, smaller(most, units)) * kSkinnyBlockUnit;
}

// If the query rows of a head exceed a multiple of whole vectors by at most this many, these rows are a skinny tile of their
// own. In a panel they would cost as much as a vector of rows. Image models have one such row, the class token; windows
// often have 49.
inline constexpr int64_t kTailRows = kLanes / 4;

// How the query rows that share a key head are divided into tiles.
struct RowTiling {
  int64_t rows = 0;            // of one head in a tile
  int64_t body = 0;            // rows of one head without the tail
  int64_t heads = 1;           // in a tile
  int64_t tiles_per_head = 1;  // 1 if a tile holds several heads
  int64_t count = 0;

  RowTiling() = default;
  RowTiling(int64_t query_length, int64_t group, int64_t key_heads_of_all_sequences, bool skinny) {
    const bool enough_tasks = key_heads_of_all_sequences * group * ceil_div(query_length, kTileRows) >= kTasksWanted;
    const int64_t most = enough_tasks ? kTileRows : kSmallTileRows;
    const int64_t tail = query_length % kLanes;
    const bool tail_is_own_tile =
        skinny && tail <= kTailRows && query_length > kLanes && smaller(group, most / query_length) < 2;
    body = tail_is_own_tile ? query_length - tail : query_length;
    tiles_per_head = ceil_div(body, most);
    rows = ceil_div(ceil_div(body, tiles_per_head), kPanel) * kPanel;
    rows = smaller(rows, body);
    tiles_per_head = ceil_div(body, rows) + (body < query_length ? 1 : 0);
    if (tiles_per_head == 1) heads = larger(1, smaller(group, most / query_length));
    count = tiles_per_head > 1 ? tiles_per_head * group : ceil_div(group, heads);
  }

  // The last rows come first: under a causal mask they are the longest tasks.
  RowRange tile(int64_t index, int64_t query_length, int64_t first_head, int64_t group) const {
    if (tiles_per_head == 1) {
      const int64_t head = index * heads;
      return {first_head + head, smaller(heads, group - head), 0, query_length};
    }
    const int64_t begin = smaller((tiles_per_head - 1 - index % tiles_per_head) * rows, body);
    const int64_t end = begin == body ? query_length : smaller(body, begin + rows);
    return {first_head + index / tiles_per_head, 1, begin, end};
  }
};

// The plan for one key head of one sequence. If the query rows fit one tile, the keys are split into parts of whole blocks
// (split-KV of flash decoding), whose results are merged.
struct HeadPlan {
  const Sequence* sequence;
  int64_t head;
  RowTiling tiling;
  int64_t skinny_rows;        // a tile of at most this many rows is skinny
  int64_t skinny_block_keys;  // keys of a block in a skinny tile
  int64_t first_block;        // the first block that some row sees
  int64_t end_block;
  int64_t split_blocks;
  int64_t splits;
  int64_t splits_left;       // splits that are not done yet
  float* partial = nullptr;  // the results of the splits: see merge.hpp

  // `skinny`: whether skinny tiles are allowed. They add up products in another order.
  HeadPlan(const Sequence& s, int64_t key_head, int64_t group, int64_t key_heads_of_all_sequences, bool skinny)
      : sequence(&s), head(key_head), tiling(s.query_length, group, key_heads_of_all_sequences, skinny),
        skinny_rows(skinny ? kSkinnyRows : 0) {
    const KeyRange range = band_range(s, 0, s.query_length - 1);
    const int64_t wanted = ceil_div(kTasksWanted, key_heads_of_all_sequences);
    const int64_t rows = s.query_length * group;
    skinny_block_keys = skinny_block_size(larger(1, smaller(rows, kSkinnyRows)), range.end - range.begin, wanted);
    const int64_t block_keys = rows <= skinny_rows ? skinny_block_keys : kBlockKeys;
    first_block = range.begin / block_keys;
    end_block = larger(first_block, ceil_div(range.end, block_keys));
    split_blocks = larger(1, end_block - first_block);
    if (tiling.count == 1) {
      split_blocks = ceil_div(split_blocks, smaller(split_blocks, wanted));
    }
    splits_left = splits = larger(1, ceil_div(end_block - first_block, split_blocks));
  }

  int64_t tasks() const { return splits > 1 ? splits : tiling.count; }
};

}  // namespace fa::FA_ISA
