// Spreads the work over threads: runs all query rows, then merges those whose keys were cut into chunks.
#pragma once

#include "tile.hpp"

namespace fa::FA_ISA {

// Below this many multiplications (about 20 microseconds) waking other threads costs more than it gives.
inline constexpr int64_t kInlineProducts = int64_t{1} << 20;

// Workers take tasks from a common counter, so that each needs its scratch memory once.
inline constexpr int64_t kWorkers = 64;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : problem_(problem), runtime_(runtime), shape_(problem),
        group_(problem.heads / problem.key_heads), pairs_(problem.sequence_count * problem.key_heads) {}

  ~Driver() { runtime_.release(runtime_.self, memory_); }

  Outcome run() {
    int64_t floats = 0;
    int64_t products = 0;
    for (int64_t n = 0; n < pairs_; ++n) {
      const HeadPlan own = plan(n);
      const Sequence& s = *own.sequence;
      floats += partial_floats_of(own);
      products += s.query_length * group_ * s.key_length * (shape_.numbers + shape_.value_size);
    }
    memory_ = runtime_.allocate(runtime_.self, static_cast<size_t>(pairs_) * (sizeof(HeadPlan) + 2 * sizeof(int64_t)) +
                                                   static_cast<size_t>(floats) * sizeof(float) + kAlignment);
    if (memory_ == nullptr) return Outcome::out_of_memory;
    plans_ = static_cast<HeadPlan*>(memory_);
    task_ends_ = reinterpret_cast<int64_t*>(plans_ + pairs_);
    merge_ends_ = task_ends_ + pairs_;
    float* data = aligned(merge_ends_ + pairs_);
    int64_t tasks = 0;
    int64_t merges = 0;
    for (int64_t n = 0; n < pairs_; ++n) {
      HeadPlan& own = plans_[n];
      own = plan(n);
      own.partial = data;
      data += partial_floats_of(own);
      task_ends_[n] = tasks += own.tasks();
      merge_ends_[n] = merges += own.chunks > 1 ? 1 : 0;
    }
    const bool alone = products < kInlineProducts;
    spread(tasks, alone, &Driver::attend_task);
    spread(merges, alone, &Driver::merge_task);
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  // Pairs of a sequence and a key head.
  HeadPlan plan(int64_t pair) const {
    return HeadPlan(problem_.sequences[pair / problem_.key_heads], pair % problem_.key_heads, group_, pairs_);
  }

  int64_t partial_floats_of(const HeadPlan& plan) const {
    return plan.chunks == 1 ? 0 : plan.chunks * partial_floats(shape_, plan.sequence->query_length * group_);
  }

  using Task = void (Driver::*)(int64_t task, const Scratch& scratch);

  struct Job {
    Driver* driver;
    Task task;
    int64_t count;
    int64_t next;
  };

  void spread(int64_t count, bool alone, Task task) {
    if (count == 0 || failed_) return;
    Job job{this, task, count, 0};
    if (alone || count == 1) {
      work(&job, 0);
    } else {
      runtime_.parallel(runtime_.self, work, &job, static_cast<size_t>(smaller(count, kWorkers)));
    }
  }

  static void work(void* data, size_t) {
    Job& job = *static_cast<Job*>(data);
    int64_t index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (index >= job.count) return;
    Driver& driver = *job.driver;
    const Shape& shape = driver.shape_;
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(shape));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, shape);
    while (index < job.count) {
      (driver.*job.task)(index, scratch);
      index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    }
    driver.runtime_.release(driver.runtime_.self, memory);
  }

  // The head that task number `task` belongs to, given where each head's tasks end; turns `task` into the
  // number within the head.
  const HeadPlan& locate(const int64_t* ends, int64_t& task) const {
    const int64_t* end = ends;
    while (*end <= task) ++end;
    if (end != ends) task -= end[-1];
    return plans_[end - ends];
  }

  Span span_of(const HeadPlan& plan, int64_t index, const Scratch& scratch) const {
    const Sequence& s = *plan.sequence;
    return {problem_, shape_, plan, s, plan.cut.span(index, s.query_length, plan.head * group_, group_), scratch};
  }

  void attend_task(int64_t task, const Scratch& scratch) {
    const HeadPlan& plan = locate(task_ends_, task);
    if (plan.chunks > 1) {
      run_chunk(span_of(plan, 0, scratch), task);
    } else {
      run_span(span_of(plan, task, scratch));
    }
  }

  void merge_task(int64_t task, const Scratch& scratch) {
    const HeadPlan& plan = locate(merge_ends_, task);
    run_merge(span_of(plan, 0, scratch));
  }

  const Problem& problem_;
  const Runtime& runtime_;
  const Shape shape_;
  const int64_t group_;
  const int64_t pairs_;
  void* memory_ = nullptr;
  bool failed_ = false;
  HeadPlan* plans_ = nullptr;
  int64_t* task_ends_ = nullptr;
  int64_t* merge_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
