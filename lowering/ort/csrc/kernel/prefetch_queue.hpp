// Prefetches what a thread reads next while the products of its query tile run: keys and values of the next block. During
// the last block it prefetches the output rows, which are written next, and what the thread's next task reads first.
//
// The products prefetch one row after every few steps. Many prefetches at once would fill the queue of outstanding reads.
//
// Rows that are wanted soon, or that lie apart, go into the second-level cache. In the first level they would evict what the
// products read, and fill the queue of its misses: with 16 query rows for a key head, float32 took up to twice the time. But such
// a prefetch needs a page whose address is known. So a line some rows ahead is prefetched into the first level, which finds its
// page.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA {

// How far ahead the address of a page is looked up: a page, or some rows if these are longer.
inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kPageRows = 8;

// Rows of `bytes` bytes at equal distances.
struct PrefetchRows {
  const char* from = nullptr;
  int64_t stride = 0;
  int64_t bytes = 0;
  int64_t count = 0;
  int64_t ahead = 0;  // bytes from a row to the page that is looked up with it; 0: the rows go into the first-level cache

  [[gnu::always_inline]] inline void issue(int64_t most) {
    for (; most > 0 && count > 0; --most, --count) {
      if (ahead == 0) {
        prefetch_row(from, bytes);
      } else {
        __builtin_prefetch(from + ahead, 0, 3);
        prefetch_lines(from, bytes);
      }
      from += stride;
    }
  }
};

class PrefetchQueue {
 public:
  // The task that this thread does next, if it is known: its rows, and the first key that one of them sees.
  const HeadPlan* next = nullptr;
  RowRange next_rows{};
  int64_t next_key = 0;
  // The key head whose K and V are in the caches: that of the task before, or one that was prefetched. If the keys are split,
  // it is one whose next split was prefetched.
  const HeadPlan* cached_head = nullptr;
  // What the products prefetch now, and how many rows after each kPrefetchDepth steps.
  PrefetchRows current;
  int64_t rows_per_step = 1;

  void clear() {
    queued_ = 0;
    taken_ = 0;
    queued_rows_ = 0;
    current.count = 0;
  }
  // Queues the rows of a range, head after head, as far as the queue has room.
  void enqueue(const Strided& rows, Type type, int64_t start, const RowRange& of, int64_t size) {
    const int64_t bytes = type == Type::float32 ? 4 : 2;
    for (int64_t n = 0; n < of.head_count && queued_ < kCapacity; ++n) {
      const int64_t at = start + (of.first_head + n) * rows.head + of.begin * rows.row;
      queue_[queued_++] = {static_cast<const char*>(rows.data) + at * bytes, rows.row * bytes, size * bytes, of.per_head(), 0};
      queued_rows_ += of.per_head();
    }
  }
  // Spreads the queued rows over `steps` steps of the products, with at most kMostRowsPerStep rows at a step.
  void pace(int64_t steps) { rows_per_step = smaller(kMostRowsPerStep, ceil_div(queued_rows_, larger(1, steps))); }

  // Called between micro-tiles, because the products themselves look at one entry only.
  void refill() {
    if (current.count > 0 || taken_ == queued_) return;
    current = queue_[taken_++];
    if (rows_per_step > 1 || current.stride > current.bytes) current.ahead = larger(kPageBytes, kPageRows * current.stride);
  }

 private:
  static constexpr int64_t kMostRowsPerStep = 4;
  static constexpr int64_t kCapacity = 12;

  PrefetchRows queue_[kCapacity];
  int64_t queued_ = 0;
  int64_t taken_ = 0;
  int64_t queued_rows_ = 0;
};

}  // namespace fa::FA_ISA
