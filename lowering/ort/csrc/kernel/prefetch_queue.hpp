// What lies ahead of a span is asked for while its products run: the keys and values of its next block; at the last block the
// output rows, which would else be fetched when they are written, and what the thread's next task reads first. A row at a
// time, between a few steps of a product: it mostly lies in a page of its own, whose address takes longer to find than the
// processor can work ahead, and many at once would fill the queue of outstanding reads.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA {

// Rows at equal distances.
struct RowsAhead {
  const char* from = nullptr;
  int64_t step = 0;
  int64_t bytes = 0;
  int64_t count = 0;

  [[gnu::always_inline]] inline void ask(int64_t most) {
    for (; most > 0 && count > 0; --most, --count) {
      ask_for_row(from, bytes);
      from += step;
    }
  }
};

class Upcoming {
 public:
  // The task that this thread will do next, where it is known.
  const HeadPlan* next = nullptr;
  RowSpan next_rows{};
  // The head whose keys and values lie near: of the task before, or asked for by it.
  const HeadPlan* near = nullptr;
  // Asked for by the products.
  RowsAhead ahead;
  int64_t pace = 1;

  void clear() {
    listed_ = 0;
    taken_ = 0;
    total_ = 0;
    ahead.count = 0;
  }
  // Of many heads the first ones.
  void add(const Strided& rows, Type type, int64_t start, const RowSpan& of, int64_t size) {
    const int64_t bytes = type == Type::float32 ? 4 : 2;
    for (int64_t n = 0; n < of.head_count && listed_ < kLists; ++n) {
      const int64_t at = start + (of.first_head + n) * rows.head + of.begin * rows.row;
      lists_[listed_++] = {static_cast<const char*>(rows.data) + at * bytes, rows.row * bytes, size * bytes, of.per_head()};
      total_ += of.per_head();
    }
  }
  // All of it in so many steps of the products, unless these are very few.
  void spread(int64_t steps) { pace = smaller(kMost, blocks_of(total_, larger(1, steps))); }

  // Called between tiles: the products themselves look at one list only.
  void refill() {
    if (ahead.count == 0 && taken_ < listed_) ahead = lists_[taken_++];
  }

 private:
  static constexpr int64_t kMost = 4;
  static constexpr int64_t kLists = 12;

  RowsAhead lists_[kLists];
  int64_t listed_ = 0;
  int64_t taken_ = 0;
  int64_t total_ = 0;
};

}  // namespace fa::FA_ISA
