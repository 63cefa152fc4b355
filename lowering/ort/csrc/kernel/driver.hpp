// Spreads the work over threads: runs all query rows; whoever ends the last chunk of rows whose keys were cut merges them.
#pragma once

#include "attend_tile.hpp"

namespace fa::FA_ISA {

// Below this many multiplications (about 20 microseconds) waking other threads costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

// Workers take tasks from a common counter, so that each needs its scratch memory once.
inline constexpr int64_t kWorkers = 64;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : problem_(problem), runtime_(runtime), shape_(problem),
        group_(problem.heads / problem.key_heads), pairs_(problem.sequence_count * problem.key_heads) {}

  ~Driver() {
    runtime_.release(runtime_.self, partials_);
    runtime_.release(runtime_.self, memory_);
  }

  Outcome run() {
    // Where the first worker works lies behind the plans: small problems ask for memory once.
    const size_t plan_bytes = static_cast<size_t>(pairs_) * (sizeof(HeadPlan) + sizeof(int64_t)) + kAlignment;
    memory_ = runtime_.allocate(runtime_.self, plan_bytes + Scratch::bytes(shape_));
    if (memory_ == nullptr) return Outcome::out_of_memory;
    plans_ = static_cast<HeadPlan*>(memory_);
    task_ends_ = reinterpret_cast<int64_t*>(plans_ + pairs_);
    first_scratch_ = task_ends_ + pairs_;
    double products = 0;
    int64_t floats = 0;
    HeadPlan* own = plans_;
    for (int64_t n = 0; n < problem_.sequence_count; ++n) {
      const Sequence& s = problem_.sequences[n];
      *own = HeadPlan(s, 0, group_, pairs_, !problem_.keeps_statistics());
      products += static_cast<double>(s.query_length * problem_.heads) *
                  static_cast<double>(s.key_length * (shape_.numbers + shape_.value_size));
      floats += partial_floats_of(*own) * problem_.key_heads;
      const HeadPlan* first = own++;
      for (int64_t head = 1; head < problem_.key_heads; ++head, ++own) {
        *own = *first;
        own->head = head;
      }
    }
    if (floats > 0) {
      partials_ = runtime_.allocate(runtime_.self, static_cast<size_t>(floats) * sizeof(float) + kAlignment);
      if (partials_ == nullptr) return Outcome::out_of_memory;
    }
    float* data = aligned(partials_);
    int64_t tasks = 0;
    for (int64_t n = 0; n < pairs_; ++n) {
      plans_[n].partial = data;
      data += partial_floats_of(plans_[n]);
      task_ends_[n] = tasks += plans_[n].tasks();
    }
    spread(tasks, products < kInlineProducts);
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  int64_t partial_floats_of(const HeadPlan& plan) const {
    return plan.chunks == 1 ? 0 : plan.chunks * partial_floats(shape_, plan.sequence->query_length * group_);
  }

  static constexpr int64_t kNone = -1;

  // A thread knows its next task while it does one, so that it can look ahead; whoever has nothing left takes it away.
  struct Job {
    Driver* driver;
    int64_t count;
    int64_t workers;
    int64_t first_free = 0;
    int64_t reserved[kWorkers];

    Job(Driver* own, int64_t number, int64_t most)
        : driver(own), count(number), workers(smaller(number, most)) {
      for (int64_t n = 0; n < workers; ++n) reserved[n] = kNone;
    }
    int64_t take_free() {
      const int64_t task_number = __atomic_fetch_add(&first_free, 1, __ATOMIC_RELAXED);
      return task_number < count ? task_number : kNone;
    }
    int64_t take_reserved(int64_t worker) {
      // A look first: most have nothing, and an exchange takes twenty times as long.
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

  void spread(int64_t count, bool alone) {
    if (count == 0) return;
    Job job(this, count, alone ? 1 : kWorkers);
    if (job.workers == 1) {
      work(&job, 0);
    } else {
      runtime_.parallel(runtime_.self, work, &job, static_cast<size_t>(job.workers));
    }
  }

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
    Upcoming upcoming;
    while (task != kNone) {
      driver.attend_task(task, job.reserve(worker), scratch, upcoming);
      task = job.take(worker);
    }
    if (worker > 0) driver.runtime_.release(driver.runtime_.self, memory);
  }

  // The head that task number `task` belongs to; turns `task` into the number within the head.
  HeadPlan& locate(int64_t& task) const {
    int64_t first = 0;
    for (int64_t count = pairs_; count > 1;) {
      const int64_t half = count / 2;
      if (task_ends_[first + half - 1] <= task) first += half;
      count -= half;
    }
    if (first > 0) task -= task_ends_[first - 1];
    return plans_[first];
  }

  RowSpan rows_of(const HeadPlan& plan, int64_t index) const {
    return plan.cut.span(index, plan.sequence->query_length, plan.head * group_, group_);
  }

  Span span_of(const HeadPlan& plan, int64_t index, const Scratch& scratch, Upcoming& upcoming) const {
    return {problem_, shape_, plan, *plan.sequence, rows_of(plan, index), scratch, upcoming};
  }

  // `next` is the task that this thread will do after this one, or kNone.
  void attend_task(int64_t task, int64_t next, const Scratch& scratch, Upcoming& upcoming) {
    HeadPlan& plan = locate(task);
    upcoming.next = nullptr;
    if (plan.chunks > 1) {
      const Span span = span_of(plan, 0, scratch, upcoming);
      run_chunk(span, task);
      if (__atomic_sub_fetch(&plan.left, 1, __ATOMIC_ACQ_REL) == 0) run_merge(span);
      return;
    }
    if (next != kNone) {
      upcoming.next = &locate(next);
      upcoming.next_rows = rows_of(*upcoming.next, upcoming.next->chunks > 1 ? 0 : next);
    }
    run_span(span_of(plan, task, scratch, upcoming));
  }

  const Problem& problem_;
  const Runtime& runtime_;
  const Shape shape_;
  const int64_t group_;
  const int64_t pairs_;
  void* memory_ = nullptr;
  void* partials_ = nullptr;
  void* first_scratch_ = nullptr;
  bool failed_ = false;
  HeadPlan* plans_ = nullptr;
  int64_t* task_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
