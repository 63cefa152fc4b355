// How decoding is cut into tasks. It depends on the problem alone, never on the number of threads: the same question
// gives the same bits everywhere.
#pragma once

#include "../../decode.hpp"
#include "../skinny_product.hpp"

namespace fa::FA_ISA {

// Bytes of keys and values below which a call stays on its thread: some 30 microseconds of reading.
inline constexpr int64_t kSerialBytes = 1 << 20;

// A task reads at least this much, so that what it costs to begin and to merge it does not show.
inline constexpr int64_t kLeastTaskBytes = 256 << 10;

// With enough to read, so many tasks: the last one of a thread is then a small part of its work.
inline constexpr int64_t kTasks = 24;

// Tokens taken at a time where the rows of a head lie side by side: long runs of keys, then of values, for the processor
// begins slowly to fetch ahead, as long as their scores stay in the second-level cache. 512 are 5 % slower than 4096. Where
// the rows of all heads do, few, so that they stay near until the last head has had them.
inline constexpr int64_t kLeastTokens = 512;
inline constexpr int64_t kMostTokens = 4096;
inline constexpr int64_t kMostScores = 16384;
inline constexpr int64_t kMostInt8Tokens = 128;  // 512 are a tenth slower
inline constexpr int64_t kTokensOfAllHeads = 16;

// Scattered runs of 16, 32 and 64 KB take 1.9, 1.5 and 1.25 times as long to read as the same bytes in a row (Zen 4),
// whatever is asked for ahead. So where a page holds one head behind the other, a task has all heads, whose keys are one
// run, and takes about so many tokens at a time.
inline constexpr int64_t kPageTokens = 256;
inline constexpr int64_t kLongPage = 512;  // from here on a head's part of a page is long enough

inline constexpr int64_t kPerLine = 16;  // floats

// Chunks are whole multiples of this, so that pages are cut where chunks are.
inline constexpr int64_t kChunkUnit = 128;

struct Plan {
  int64_t heads_at_once;  // key heads of a task: all where they lie side by side in a row or a page
  int64_t head_tasks;     // of an entry
  int64_t grain;          // bytes of a task
  int64_t token_bytes;    // that a task reads for a token: key and value of its heads
  int64_t tokens;         // taken at a time

  explicit Plan(const Decode& d) {
    const int64_t cell = bytes_of(d.cell);
    const bool by_token = d.row_stride != d.size;
    const bool by_page = !by_token && d.block_size > 0 && d.block_size < kLongPage;
    heads_at_once = by_token || by_page ? d.key_heads : 1;
    head_tasks = d.key_heads / heads_at_once;
    token_bytes = 2 * heads_at_once * d.size * cell;
    const int64_t with_scores = smaller(kMostTokens, larger(kLeastTokens, kMostScores / d.group() / kChunkUnit * kChunkUnit));
    const int64_t of_one_head = d.cell == Cell::int8 ? kMostInt8Tokens : with_scores;
    const int64_t of_pages = larger(d.block_size, kPageTokens / larger(1, d.block_size) * d.block_size);
    tokens = by_token ? kTokensOfAllHeads : by_page ? of_pages : of_one_head;
    grain = larger(kLeastTaskBytes, bytes(d) / kTasks);
  }

  // Floats from one row of scores to the next: an odd number of cache lines, so that rows do not share a set.
  int64_t token_row() const { return blocks_of(tokens, 2 * kPerLine) * 2 * kPerLine + kPerLine; }

  int64_t bytes(const Decode& d) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < d.entry_count; ++i) sum += d.entries[i].length * token_bytes * head_tasks;
    return sum;
  }

  // Tokens of a chunk of an entry.
  int64_t chunk_tokens(const DecodeEntry& entry) const {
    const int64_t wanted = larger(1, entry.length * token_bytes / grain);
    return larger(1, blocks_of(blocks_of(entry.length, wanted), kChunkUnit)) * kChunkUnit;
  }

  int64_t chunks(const DecodeEntry& entry) const { return blocks_of(entry.length, chunk_tokens(entry)); }
};

}  // namespace fa::FA_ISA
