// How decoding is cut into tasks. It depends on the problem alone, never on the number of threads: the same question
// gives the same bits everywhere.
#pragma once

#include "../../decode.hpp"
#include "../direct.hpp"

namespace fa::FA_ISA {

// Bytes of keys and values below which a call stays on its thread: some 30 microseconds of reading.
inline constexpr int64_t kSerialBytes = 1 << 20;

// A task reads at least this much, so that what it costs to begin and to merge it does not show.
inline constexpr int64_t kLeastTaskBytes = 256 << 10;

// With enough to read, so many tasks: the last one of a thread is then a small part of its work.
inline constexpr int64_t kTasks = 24;

// Tokens taken at a time where the rows of a head lie side by side: long runs of keys, then of values, for the processor
// begins slowly to fetch ahead. Where the rows of all heads do, few, so that they stay near until the last head has had them.
inline constexpr int64_t kMostTokens = 512;
inline constexpr int64_t kMostInt8Tokens = 128;  // 512 are a tenth slower
inline constexpr int64_t kTokensOfAllHeads = 16;

// Chunks are whole multiples of this, so that pages are cut where chunks are.
inline constexpr int64_t kChunkUnit = 128;

struct Plan {
  int64_t heads_at_once;  // key heads of a task: all where they lie side by side in a row
  int64_t head_tasks;     // of an entry
  int64_t grain;          // bytes of a task
  int64_t token_bytes;    // that a task reads for a token: key and value of its heads
  int64_t tokens;         // taken at a time

  explicit Plan(const Decode& d) {
    const int64_t cell = bytes_of(d.cell);
    const bool apart = d.row_stride == d.size;
    heads_at_once = apart ? 1 : d.key_heads;
    head_tasks = d.key_heads / heads_at_once;
    token_bytes = 2 * heads_at_once * d.size * cell;
    const int64_t of_one_head = d.cell == Cell::int8 ? kMostInt8Tokens : kMostTokens;
    tokens = apart ? of_one_head : kTokensOfAllHeads;
    grain = larger(kLeastTaskBytes, bytes(d) / kTasks);
  }

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
