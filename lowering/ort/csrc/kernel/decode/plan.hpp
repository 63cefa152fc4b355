// How decoding is divided into tasks. The division depends on the problem alone, never on the number of threads, so that the
// same call gives the same bits everywhere.
#pragma once

#include "../../decode.hpp"
#include "../skinny_product.hpp"

namespace fa::FA_ISA {

// The caches that this variant decodes: those that its instructions make faster. FA_OTHERS decodes all others.
template <Cell kCell>
inline constexpr bool kDecodes = Isa::kHasPairs          ? kCell == Cell::bfloat16
                                 : Isa::kHasByteProducts ? kCell == Cell::int8
                                                         : true;

// A call that reads fewer bytes of keys and values stays on one thread: it takes some 30 microseconds.
inline constexpr int64_t kSerialBytes = 1 << 20;

// A task reads at least this much, so that starting it and merging its result does not show.
inline constexpr int64_t kLeastTaskBytes = 256 << 10;

// The number of tasks if there is enough to read. The last task of a thread is then a small part of its work.
inline constexpr int64_t kTasks = 24;

// Tokens of a step. If the rows of a head are contiguous, steps are long: the hardware prefetcher starts slowly, so runs of
// keys, then of values, should be long, as long as the scores stay in the second-level cache. Measured: 512 are 5 % slower
// than 4096. If the rows of all heads alternate, steps are short, so that a token's row is still cached when the last head
// reads it.
inline constexpr int64_t kLeastTokens = 512;
inline constexpr int64_t kMostTokens = 4096;
inline constexpr int64_t kMostScores = 16384;
inline constexpr int64_t kMostInt8Tokens = 128;  // measured: 512 are a tenth slower
inline constexpr int64_t kTokensOfAllHeads = 16;

// Measured on Zen 4: scattered runs of 16, 32 and 64 KB take 1.9, 1.5 and 1.25 times as long to read as the same bytes in
// one run, with any prefetching. So if the heads follow each other within a page, a task has all heads, whose keys are one
// run, and takes about this many tokens at a time.
inline constexpr int64_t kPageTokens = 256;
inline constexpr int64_t kLongPage = 512;  // from here on, one head's part of a page is long enough

// Calls that multiply bytes (byte_products.hpp) take as many tokens at a time as the first-level cache holds. Shorter entries
// are multiplied as floats: what the digits of their queries take would show.
inline constexpr bool kHasByteProducts = Isa::kHasByteProducts && kDecodes<Cell::int8>;
inline constexpr int64_t kByteTokens = 128;        // each digit's sum is exact as a float
inline constexpr int64_t kChunk = 4 * kLanes;      // bytes of a vector
inline constexpr int64_t kMostByteColumns = 1024;  // the sums of a digit's products then fit 32 bits, also times 256

// Whether a call multiplies bytes. Not with one query row for each key head: such keys are read as fast by the products of
// floats, which stream them (streaming_product.hpp).
FA_INLINE bool multiplies_bytes(const Decode& d) {
  return kHasByteProducts && d.cell == Cell::int8 && d.query_cell != Cell::int8 && d.group() > 1 && d.size % kChunk == 0 &&
         d.size <= kMostByteColumns;
}

inline constexpr int64_t kPerLine = 16;  // floats

// Splits are multiples of this, so that pages are divided where splits are.
inline constexpr int64_t kSplitUnit = 128;

// The division of one call.
struct DecodePlan {
  int64_t task_key_heads;   // key heads of a task: all of them if they follow each other in a row or in a page
  int64_t tasks_per_entry;  // groups of task_key_heads
  int64_t task_bytes;       // that a task should read
  int64_t token_bytes;      // that a task reads for a token: key and value of its heads
  int64_t tokens;           // of a step

  explicit DecodePlan(const Decode& d) {
    const int64_t cell = bytes_of(d.cell);
    const bool heads_in_row = d.row_stride != d.size;
    const bool heads_in_page = !heads_in_row && d.block_size > 0 && d.block_size < kLongPage;
    task_key_heads = heads_in_row || heads_in_page ? d.key_heads : 1;
    tasks_per_entry = d.key_heads / task_key_heads;
    token_bytes = 2 * task_key_heads * d.size * cell;
    const int64_t with_scores =
        smaller(kMostTokens, larger(kLeastTokens, kMostScores / d.group() / kSplitUnit * kSplitUnit));
    const int64_t of_one_head = d.cell == Cell::int8 ? kMostInt8Tokens : with_scores;
    const int64_t of_pages = larger(d.block_size, kPageTokens / larger(1, d.block_size) * d.block_size);
    tokens = multiplies_bytes(d) ? kByteTokens : heads_in_row ? kTokensOfAllHeads : heads_in_page ? of_pages : of_one_head;
    task_bytes = larger(kLeastTaskBytes, bytes(d) / kTasks);
  }

  // Floats from one row of scores to the next: an odd number of cache lines, so that rows do not share a set.
  int64_t token_stride() const { return ceil_div(tokens, 2 * kPerLine) * 2 * kPerLine + kPerLine; }

  int64_t bytes(const Decode& d) const {
    int64_t sum = 0;
    for (int64_t i = 0; i < d.entry_count; ++i) sum += d.entries[i].length * token_bytes * tasks_per_entry;
    return sum;
  }

  // Tokens of a split of an entry.
  int64_t split_tokens(const DecodeEntry& entry) const {
    const int64_t wanted = larger(1, entry.length * token_bytes / task_bytes);
    return larger(1, ceil_div(ceil_div(entry.length, wanted), kSplitUnit)) * kSplitUnit;
  }

  int64_t splits(const DecodeEntry& entry) const { return ceil_div(entry.length, split_tokens(entry)); }
};

}  // namespace fa::FA_ISA
