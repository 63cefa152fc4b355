// How the attention of one key head of one sequence is divided. A unit is the least number of query rows that a thread takes.
// A tile is what it takes at once: some units that follow each other. The units, and the parts of keys, depend on the problem
// alone. A tile grows and shrinks with the number of threads (driver.hpp). No row's result depends on the tile that it is
// in, so the same call gives the same bits everywhere.
#pragma once

#include "skinny_product.hpp"
#include "kv_block.hpp"
#include "view.hpp"

namespace fa::FA_ISA {

// Query rows of a unit: a multiple of every kPanel.
inline constexpr int64_t kUnitRows = 32;
static_assert(kUnitRows % kPanel == 0);

// The most query rows of a tile (Br of FlashAttention). Each tile reads K and V anew, from the second-level cache or beyond,
// and copies what has to be copied.
inline constexpr int64_t kTileRows = Isa::kTileRows;
static_assert(kTileRows % kUnitRows == 0);

// The same for a tile of several heads, which is never divided, and with fewer tasks than kTasksWanted.
inline constexpr int64_t kGroupTileRows = 224;
inline constexpr int64_t kSmallTileRows = 96;
static_assert(kGroupTileRows <= kTileRows);

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

// Units that follow each other: what a thread takes at once.
struct Units {
  int64_t first;
  int64_t count;
};

// How the query rows that share a key head are divided into units. The units of a head are its tail, if it has one, and the
// body from the last rows to the first: under a causal mask the last rows are the longest task. If a tile holds several heads,
// it is one unit.
struct RowTiling {
  int64_t query_length = 0;
  int64_t body = 0;            // rows of one head without the tail
  int64_t heads = 1;           // of a tile
  int64_t units_per_head = 1;  // 1 if a tile holds several heads
  int64_t units_per_tile = 1;  // at most
  int64_t units = 0;
  bool one_tile = false;  // whether all rows fit one tile

  RowTiling() = default;
  RowTiling(int64_t length, int64_t group, int64_t key_heads_of_all_sequences, bool skinny) : query_length(length) {
    const bool enough_tasks = key_heads_of_all_sequences * group * ceil_div(length, kGroupTileRows) >= kTasksWanted;
    const int64_t most = enough_tasks ? kGroupTileRows : kSmallTileRows;
    const int64_t tail = length % kLanes;
    heads = larger(1, smaller(group, most / length));
    const bool tail_is_own_tile = skinny && tail <= kTailRows && length > kLanes && heads == 1;
    body = tail_is_own_tile ? length - tail : length;
    if (heads > 1) {
      units = ceil_div(group, heads);
      one_tile = units == 1;
      return;
    }
    const int64_t body_units = ceil_div(body, kUnitRows);
    units_per_tile = ceil_div(body_units, ceil_div(body_units, kTileRows / kUnitRows));
    units_per_head = body_units + has_tail();
    units = units_per_head * group;
    one_tile = group == 1 && body <= most && has_tail() == 0;
  }

  int64_t has_tail() const { return body < query_length ? 1 : 0; }

  // The units of a whole tile that begins with unit `first`. It ends where whole tiles from the first row on have a border: a
  // short one comes first, where it takes longest under a causal mask.
  int64_t most_from(int64_t first) const {
    const int64_t in_head = first % units_per_head;
    if (in_head < has_tail()) return 1;
    const int64_t beyond = (units_per_head - in_head) % units_per_tile;
    return beyond == 0 ? units_per_tile : beyond;
  }

  RowRange rows(Units of, int64_t first_head, int64_t group) const {
    if (heads > 1) return {first_head + of.first * heads, smaller(heads, group - of.first * heads), 0, query_length};
    const int64_t head = first_head + of.first / units_per_head;
    const int64_t in_head = of.first % units_per_head;
    if (in_head < has_tail()) return {head, 1, body, query_length};
    const int64_t after = units_per_head - in_head;  // units from the first row to the end of the tile
    return {head, 1, (after - of.count) * kUnitRows, smaller(body, after * kUnitRows)};
  }

  // Whether these are all rows of their heads, or a tail. Only such rows may be a skinny tile: the others may be in a larger
  // tile, too.
  bool is_whole(const RowRange& range) const { return range.begin == body || range.per_head() == query_length; }
};

// The plan for one key head of one sequence. If the query rows fit one tile, the keys are split into parts of whole blocks
// (split-KV of flash decoding), whose results are merged.
struct HeadPlan {
  const Sequence* sequence;
  int64_t head;
  RowTiling tiling;
  int64_t skinny_rows;        // a tile of at most this many rows may be skinny
  int64_t skinny_block_keys;  // keys of a block in a skinny tile
  int64_t block_keys;         // keys of a block in a tile of all rows
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
    block_keys = rows <= skinny_rows ? skinny_block_keys : kBlockKeys;
    first_block = range.begin / block_keys;
    end_block = larger(first_block, ceil_div(range.end, block_keys));
    split_blocks = larger(1, end_block - first_block);
    if (tiling.one_tile) split_blocks = ceil_div(split_blocks, smaller(split_blocks, wanted));
    splits_left = splits = larger(1, ceil_div(end_block - first_block, split_blocks));
  }

  // Splits, each with all rows, or units of rows with all keys.
  int64_t tasks() const { return splits > 1 ? splits : tiling.units; }

  // The rows of some units; of all of them if the keys are split.
  RowRange rows(Units of, int64_t group) const {
    return tiling.rows(splits > 1 ? Units{0, tiling.units} : of, head * group, group);
  }

  // The first key that a task reads. It is a split, or its rows are `range`.
  int64_t first_key(int64_t task, const RowRange& range) const {
    if (splits > 1) return (first_block + task * split_blocks) * block_keys;
    return band_range(*sequence, range.begin, range.end - 1).begin;
  }

  // The pairs of a row and a key that a unit or a split has, those hidden by the band in some of its rows included.
  int64_t pairs(int64_t task, int64_t group) const {
    const RowRange range = rows({task, 1}, group);
    const KeyRange keys = band_range(*sequence, range.begin, range.end - 1);
    return range.count() * larger(1, keys.end - keys.begin) / splits;
  }
};

}  // namespace fa::FA_ISA
