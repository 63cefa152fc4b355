// Runs FlashAttentionScore: plans the tasks, spreads them over threads, and merges key splits. The thread that finishes the
// last split of a key head merges them.
#pragma once

#include "attend_tile.hpp"

namespace fa::FA_ISA {

// A problem with fewer multiplications (about 20 microseconds) stays on one thread: waking others costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

// Workers take tasks from a common counter, so that each needs its scratch memory only once.
inline constexpr int64_t kWorkers = 64;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : problem_(problem), runtime_(runtime), shape_(problem),
        group_(problem.heads / problem.key_heads), head_count_(problem.sequence_count * problem.key_heads) {}

  ~Driver() {
    runtime_.release(runtime_.self, partials_);
    runtime_.release(runtime_.self, memory_);
  }

  Outcome run() {
    // The scratch memory of the first worker follows the plans, so that small problems allocate once.
    const size_t plan_bytes = static_cast<size_t>(head_count_) * (sizeof(HeadPlan) + sizeof(int64_t)) + kAlignment;
    memory_ = runtime_.allocate(runtime_.self, plan_bytes + Scratch::bytes(shape_));
    if (memory_ == nullptr) return Outcome::out_of_memory;
    plans_ = static_cast<HeadPlan*>(memory_);
    task_ends_ = reinterpret_cast<int64_t*>(plans_ + head_count_);
    first_scratch_ = task_ends_ + head_count_;
    double products = 0;
    int64_t floats = 0;
    HeadPlan* plan = plans_;
    for (int64_t n = 0; n < problem_.sequence_count; ++n) {
      const Sequence& s = problem_.sequences[n];
      *plan = HeadPlan(s, 0, group_, head_count_, !problem_.keeps_statistics());
      products += static_cast<double>(s.query_length * problem_.heads) *
                  static_cast<double>(s.key_length * (shape_.qk_size + shape_.value_size));
      floats += partial_floats_of(*plan) * problem_.key_heads;
      const HeadPlan* first = plan++;
      for (int64_t head = 1; head < problem_.key_heads; ++head, ++plan) {
        *plan = *first;
        plan->head = head;
      }
    }
    if (floats > 0) {
      partials_ = runtime_.allocate(runtime_.self, static_cast<size_t>(floats) * sizeof(float) + kAlignment);
      if (partials_ == nullptr) return Outcome::out_of_memory;
    }
    float* data = aligned(partials_);
    int64_t tasks = 0;
    for (int64_t n = 0; n < head_count_; ++n) {
      plans_[n].partial = data;
      data += partial_floats_of(plans_[n]);
      task_ends_[n] = tasks += plans_[n].tasks();
    }
    run_parallel(tasks, products < kInlineProducts);
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  int64_t partial_floats_of(const HeadPlan& plan) const {
    return plan.splits == 1 ? 0 : plan.splits * partial_floats(shape_, plan.sequence->query_length * group_);
  }

  static constexpr int64_t kNone = -1;

  // Each worker reserves its next task while it computes the present one, so that it can prefetch for it. A worker that
  // finds no free task takes one that another worker has reserved.
  struct Job {
    Driver* driver;
    int64_t count;
    int64_t workers;
    int64_t first_free = 0;
    int64_t reserved[kWorkers];

    Job(Driver* of, int64_t number, int64_t most)
        : driver(of), count(number), workers(smaller(number, most)) {
      for (int64_t n = 0; n < workers; ++n) reserved[n] = kNone;
    }
    int64_t take_free() {
      const int64_t task_number = __atomic_fetch_add(&first_free, 1, __ATOMIC_RELAXED);
      return task_number < count ? task_number : kNone;
    }
    int64_t take_reserved(int64_t worker) {
      // A plain load comes first: most workers have nothing reserved, and an exchange takes twenty times as long.
      if (__atomic_load_n(&reserved[worker], __ATOMIC_RELAXED) == kNone) return kNone;
      return __atomic_exchange_n(&reserved[worker], kNone, __ATOMIC_RELAXED);
    }
    int64_t take(int64_t worker) {
      int64_t task_number = take_reserved(worker);
      if (task_number == kNone) task_number = take_free();
      for (int64_t other = 0; task_number == kNone && other < workers; ++other) task_number = take_reserved(other);
      return task_number;
    }
    int64_t reserve(int64_t worker) {
      const int64_t task_number = take_free();
      __atomic_store_n(&reserved[worker], task_number, __ATOMIC_RELAXED);
      return task_number;
    }
  };

  void run_parallel(int64_t count, bool serial) {
    if (count == 0) return;
    Job job(this, count, serial ? 1 : kWorkers);
    if (job.workers == 1) {
      work(&job, 0);
    } else {
      runtime_.parallel(runtime_.self, work, &job, static_cast<size_t>(job.workers));
    }
  }

  // One worker: takes tasks until there is none.
  static void work(void* data, size_t number) {
    Job& job = *static_cast<Job*>(data);
    const auto worker = static_cast<int64_t>(number);
    int64_t task = job.take(worker);
    if (task == kNone) return;
    Driver& driver = *job.driver;
    const Shape& shape = driver.shape_;
    void* memory = driver.first_scratch_;
    if (worker > 0) memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(shape));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, shape);
    PrefetchQueue prefetches;
    while (task != kNone) {
      driver.run_task(task, job.reserve(worker), scratch, prefetches);
      task = job.take(worker);
    }
    if (worker > 0) driver.runtime_.release(driver.runtime_.self, memory);
  }

  // The plan that task number `task` belongs to. `task` becomes its number within the plan.
  HeadPlan& locate(int64_t& task) const {
    int64_t first = 0;
    for (int64_t count = head_count_; count > 1;) {
      const int64_t half = count / 2;
      if (task_ends_[first + half - 1] <= task) first += half;
      count -= half;
    }
    if (first > 0) task -= task_ends_[first - 1];
    return plans_[first];
  }

  RowRange rows_of(const HeadPlan& plan, int64_t index) const {
    return plan.tiling.tile(index, plan.sequence->query_length, plan.head * group_, group_);
  }

  QueryTile tile_of(const HeadPlan& plan, int64_t index, const Scratch& scratch, PrefetchQueue& prefetches) const {
    return {problem_, shape_, plan, *plan.sequence, rows_of(plan, index), scratch, prefetches};
  }

  // `next` is the task that this worker has reserved, or kNone.
  void run_task(int64_t task, int64_t next, const Scratch& scratch, PrefetchQueue& prefetches) {
    HeadPlan& plan = locate(task);
    prefetches.next = nullptr;
    if (plan.splits > 1) {
      const QueryTile tile = tile_of(plan, 0, scratch, prefetches);
      run_split(tile, task);
      if (__atomic_sub_fetch(&plan.splits_left, 1, __ATOMIC_ACQ_REL) == 0) run_merge(tile);
      return;
    }
    if (next != kNone) {
      prefetches.next = &locate(next);
      prefetches.next_rows = rows_of(*prefetches.next, prefetches.next->splits > 1 ? 0 : next);
    }
    run_tile(tile_of(plan, task, scratch, prefetches));
  }

  const Problem& problem_;
  const Runtime& runtime_;
  const Shape shape_;
  const int64_t group_;
  const int64_t head_count_;
  void* memory_ = nullptr;
  void* partials_ = nullptr;
  void* first_scratch_ = nullptr;
  bool failed_ = false;
  HeadPlan* plans_ = nullptr;
  int64_t* task_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
