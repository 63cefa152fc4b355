// Which key heads threads share, and in which order the tasks are taken. No result depends on it: see plan.hpp.
//
// The tasks are taken from a common counter. Key heads are tasks of their own in rounds, one for each worker. A round begins
// if its first key head has at most the part of the remaining work that falls to one worker. The splits of the other key heads
// come after them, one chunk of query rows in a step; the key heads with fewer chunks join later. The whole key heads belong
// to the last step, which has the most work under a causal mask.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA::grad {

// Each split of a key head copies the query rows that it meets, and clears and adds up their sums. For each row that takes as
// long as the products with so many keys. Measured with AVX-512: 12 keys, and a causal mask hides half of all keys.
inline constexpr double kCopiedKeys = 24;

// How long the last task of a step makes others wait, on average, as a part of it.
inline constexpr double kWait = 0.25;

// How many workers a call may have. As many as key heads have been seen if there may be more.
FA_INLINE int64_t expected_workers(int64_t head_count, const Runtime& runtime) {
  const int64_t seen = __atomic_load_n(runtime.workers_seen, __ATOMIC_RELAXED);
  return smaller(runtime.most_workers, seen < head_count ? seen : 2 * seen);
}

class Schedule {
 public:
  Schedule(const Sequence* sequences, int64_t sequence_count, int64_t key_heads, int64_t group)
      : sequences_(sequences), key_heads_(key_heads), group_(group), head_count_(sequence_count * key_heads) {
    for (int64_t n = 0; n < sequence_count; ++n) scores_ += area(sequences[n]) * static_cast<double>(key_heads);
  }

  // The scores of the whole problem, for one query head of each group.
  double scores() const { return scores_; }

  // Called first: among how many workers the work is divided.
  void expect(int64_t workers) { workers_ = workers; }

  KeyHeadPlan plan_of(int64_t head) const {
    return KeyHeadPlan(sequences_[head / key_heads_], head % key_heads_, group_);
  }

  // Calls body(plan, shared) for all key heads in their order.
  template <class Body>
  void each(Body body) const {
    double left = scores_;  // scores of the key heads that are no tasks yet
    double most = 0;        // scores of the first key head of the round
    int64_t free = 0;       // workers that have no key head of the round yet
    for (int64_t n = 0; n < head_count_; ++n) {
      const KeyHeadPlan plan = plan_of(n);
      const double scores = area(*plan.sequence);
      if (free == 0 || scores > most) {
        free = scores * static_cast<double>(workers_) <= left ? workers_ : 0;
        most = scores;
      }
      const bool shared = plan.spans > 1 && free == 0;
      if (!shared) left -= scores;
      if (free > 0) --free;
      body(plan, shared);
    }
  }

  static int64_t bytes(int64_t shared_count, int64_t head_count) {
    return shared_count * static_cast<int64_t>(sizeof(KeyHeadPlan)) + head_count;
  }

  // `memory` has room for bytes().
  void plan_tasks(void* memory, int64_t shared_count) {
    shared_ = static_cast<KeyHeadPlan*>(memory);
    is_shared_ = reinterpret_cast<uint8_t*>(shared_ + shared_count);
    const KeyHeadPlan* longest = nullptr;
    int64_t head = 0;
    each([&](const KeyHeadPlan& plan, bool shared) {
      is_shared_[head++] = shared ? 1 : 0;
      if (!shared) return;
      shared_[shared_count_++] = plan;
      if (longest == nullptr || plan.blocks > longest->blocks) longest = &shared_[shared_count_ - 1];
      steps_ = larger(steps_, plan.chunks);
    });
    splits_ = longest == nullptr ? 0 : best_splits(*longest);
    for (int64_t n = 0; n < shared_count_; ++n) shared_[n].splits = smaller(shared_[n].spans, splits_);
  }

  int64_t steps() const { return steps_; }
  int64_t tasks(int64_t step) const {
    return (is_last(step) ? head_count_ : 0) + shared_count_ * splits_;
  }
  // Whether the task is key head `task`, if that is not shared, and otherwise nothing.
  bool is_whole(int64_t task, int64_t step) const { return is_last(step) && task < head_count_; }
  bool is_shared(int64_t head) const { return is_shared_[head] != 0; }

  int64_t shared_count() const { return shared_count_; }
  KeyHeadPlan& shared(int64_t n) const { return shared_[n]; }
  // The chunk of a shared key head in a step; negative if there is none yet.
  int64_t chunk_of(const KeyHeadPlan& plan, int64_t step) const { return step - (steps_ - plan.chunks); }
  // The plan of a task that is a split, and its split. The first splits of all key heads come first: under a causal mask they
  // take longest where a chunk sees few spans. A short key head may have no such split.
  const KeyHeadPlan& split_of(int64_t task, int64_t step, int64_t& split) const {
    const int64_t n = task - (is_last(step) ? head_count_ : 0);
    split = n / shared_count_;
    return shared_[n % shared_count_];
  }

 private:
  static double area(const Sequence& s) { return static_cast<double>(s.query_length) * static_cast<double>(s.key_length); }
  // The number of splits for which a step takes the least time, if all shared key heads are as this one. Few splits leave
  // workers idle, and many copy much.
  int64_t best_splits(const KeyHeadPlan& plan) const {
    const auto time = [&](int64_t splits) {
      const auto rounds = static_cast<double>(ceil_div(shared_count_ * splits, workers_));
      const auto parts = static_cast<double>(splits);
      return (rounds + kWait) / parts * (1 + parts * kCopiedKeys / static_cast<double>(plan.sequence->key_length));
    };
    int64_t best = 1;
    for (int64_t splits = 2; splits <= plan.spans; ++splits) {
      if (time(splits) < time(best)) best = splits;
    }
    return best;
  }

  bool is_last(int64_t step) const { return step == steps_ - 1; }

  const Sequence* sequences_;
  int64_t key_heads_;
  int64_t group_;
  int64_t head_count_;
  double scores_ = 0;
  int64_t workers_ = 1;
  int64_t steps_ = 1;
  KeyHeadPlan* shared_ = nullptr;
  int64_t shared_count_ = 0;
  int64_t splits_ = 0;            // the most splits of a shared key head
  uint8_t* is_shared_ = nullptr;  // [head_count]
};

}  // namespace fa::FA_ISA::grad
