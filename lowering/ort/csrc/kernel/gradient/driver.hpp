// Runs FlashAttentionScoreGrad. The work is divided by sequence and key head. A key head is one task, which goes through its
// chunks of query rows, as long as enough work is left for the other threads meanwhile. The rest are shared: their keys are
// divided into splits, and the splits of a chunk run side by side. Each span of keys then has sums of dQ of its own, which
// are added up afterwards, as a thread that has the whole key head does it. So the results are the same.
#pragma once

#include "block_pair.hpp"
#include "results.hpp"
#include "schedule.hpp"

namespace fa::FA_ISA::grad {

// A problem with fewer multiplications (about 20 microseconds) stays on one thread: waking others costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

// Rows of one task that adds up the spans' sums of dQ.
inline constexpr int64_t kMergeRows = kBlockRows;

class Driver {
 public:
  Driver(const Gradients& gradients, const Runtime& runtime)
      : gradients_(gradients), problem_(gradients.problem), runtime_(runtime), shape_(problem_),
        group_(problem_.heads / problem_.key_heads), head_count_(problem_.sequence_count * problem_.key_heads),
        schedule_(problem_.sequences, problem_.sequence_count, problem_.key_heads, group_) {}

  ~Driver() { runtime_.release(runtime_.self, memory_); }

  Outcome run() {
    serial_ = schedule_.scores() * static_cast<double>(group_ * (shape_.qk_size + shape_.value_size)) < kInlineProducts;
    schedule_.expect(serial_ ? 1 : expected_workers(head_count_, runtime_));
    if (!prepare()) return Outcome::out_of_memory;
    for (step_ = 0; step_ < schedule_.steps(); ++step_) {
      run_parallel(schedule_.tasks(step_), &Driver::run_task);
      run_parallel(schedule_.shared_count() * kChunkRows / kMergeRows, &Driver::merge_rows);
      for (int64_t n = 0; n < schedule_.shared_count() && !failed_; ++n) {
        const KeyHeadPlan& plan = schedule_.shared(n);
        const int64_t chunk = schedule_.chunk_of(plan, step_);
        if (chunk >= 0) count_sink(plan, plan.chunk(chunk), sums_of_span(plan, 0, shape_));
      }
    }
    if (gradients_.sink != nullptr && !failed_) add_sinks();
    const int64_t seen = __atomic_load_n(runtime_.workers_seen, __ATOMIC_RELAXED);
    if (arrived_ > seen) __atomic_store_n(runtime_.workers_seen, arrived_, __ATOMIC_RELAXED);
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  // Plans the tasks, and allocates the sums of the shared key heads.
  bool prepare() {
    const auto floats_of = [&](const KeyHeadPlan& plan) {
      return plan.sequence->key_length * (shape_.columns() + shape_.value_columns()) +
             plan.spans * RowSums::floats(shape_, plan.rows_of_chunk());
    };
    int64_t shared_count = 0;
    int64_t floats = 0;
    schedule_.each([&](const KeyHeadPlan& plan, bool shared) {
      if (shared) {
        floats += cache_lines(floats_of(plan));
        ++shared_count;
      } else {
        own_keys_ = larger(own_keys_, plan.sequence->key_length);
      }
    });
    const int64_t sinks = gradients_.sink == nullptr ? 0 : problem_.sequence_count * problem_.heads;
    const size_t bytes = kAlignment + static_cast<size_t>(floats) * sizeof(float) +
                         static_cast<size_t>(Schedule::bytes(shared_count, head_count_)) +
                         static_cast<size_t>(sinks) * sizeof(double);
    memory_ = runtime_.allocate(runtime_.self, bytes);
    if (memory_ == nullptr) return false;
    float* data = aligned(memory_);
    sinks_ = reinterpret_cast<double*>(data + floats);
    for (int64_t n = 0; n < sinks; ++n) sinks_[n] = 0;
    schedule_.plan_tasks(sinks_ + sinks, shared_count);
    for (int64_t n = 0; n < shared_count; ++n) {
      KeyHeadPlan& plan = schedule_.shared(n);
      plan.dk_sums = data;
      plan.dv_sums = plan.dk_sums + plan.sequence->key_length * shape_.columns();
      plan.row_sums = plan.dv_sums + plan.sequence->key_length * shape_.value_columns();
      data += cache_lines(floats_of(plan));
    }
    return true;
  }

  using Task = void (Driver::*)(int64_t task, const Scratch& scratch);

  struct Job {
    Driver* driver;
    Task task;
    int64_t count;
    int64_t next;
    int64_t arrived;  // workers that have had a task
  };

  // Workers take tasks from a common counter, so that each needs its scratch memory only once.
  void run_parallel(int64_t count, Task task) {
    if (count == 0 || failed_) return;
    Job job{this, task, count, 0, 0};
    if (serial_ || count == 1) {
      work(&job, 0);
    } else {
      runtime_.parallel(runtime_.self, work, &job, static_cast<size_t>(smaller(count, runtime_.most_workers)));
    }
    arrived_ = larger(arrived_, job.arrived);
  }

  static void work(void* data, size_t) {
    Job& job = *static_cast<Job*>(data);
    int64_t index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (index >= job.count) return;
    Driver& driver = *job.driver;
    __atomic_add_fetch(&job.arrived, 1, __ATOMIC_RELAXED);
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(driver.shape_, driver.own_keys_));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, driver.shape_, driver.own_keys_);
    const TilesOfThread tiles;
    while (index < job.count) {
      (driver.*job.task)(index, scratch);
      index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    }
    driver.runtime_.release(driver.runtime_.self, memory);
  }

  // Calls body with the ChunkGradient of a chunk.
  template <class Body>
  void with_chunk(const KeyHeadPlan& plan, const QueryChunk& chunk, const Scratch& scratch, Body body) {
    if (shape_.pairs) {
      if constexpr (kHasPairs) {
        ChunkGradient<true> part(gradients_, shape_, plan, chunk, scratch);
        body(part);
      }
    } else if constexpr (!kHasPairs) {
      ChunkGradient<false> part(gradients_, shape_, plan, chunk, scratch);
      body(part);
    }
  }

  // Task: a key head, or one split of a shared one with the chunk of this step.
  void run_task(int64_t task, const Scratch& scratch) {
    if (schedule_.is_whole(task, step_)) {
      if (!schedule_.is_shared(task)) run_whole(schedule_.plan_of(task), scratch);
      return;
    }
    int64_t split = 0;
    const KeyHeadPlan& plan = schedule_.split_of(task, step_, split);
    const int64_t n = schedule_.chunk_of(plan, step_);
    if (n < 0 || split >= plan.splits) return;
    if (n == 0) clear_dk_dv(shape_, plan, split);
    const QueryChunk chunk = plan.chunk(n);
    with_chunk(plan, chunk, scratch, [&](auto& part) { part.run(split); });
    if (n == plan.chunks - 1) store_dk_dv(gradients_, shape_, plan, split, scratch.row_buffer);
  }

  void run_whole(KeyHeadPlan plan, const Scratch& scratch) {
    plan.dk_sums = scratch.key_sums;
    plan.dv_sums = plan.dk_sums + plan.sequence->key_length * shape_.columns();
    clear_dk_dv(shape_, plan, 0);
    const RowSums sums(scratch.total_sums, shape_, kChunkRows);
    for (int64_t n = 0; n < plan.chunks; ++n) {
      const QueryChunk chunk = plan.chunk(n);
      with_chunk(plan, chunk, scratch, [](auto& part) { part.run(); });
      for (int64_t r = 0; r < chunk.rows(); ++r) store_row_sums(plan, chunk, r, sums, scratch.row_buffer);
      count_sink(plan, chunk, sums);
    }
    store_dk_dv(gradients_, shape_, plan, 0, scratch.row_buffer);
  }

  // Task: adds up the spans' sums of dQ for some rows of the present chunk.
  void merge_rows(int64_t task, const Scratch& scratch) {
    constexpr int64_t kTasks = kChunkRows / kMergeRows;
    const KeyHeadPlan& plan = schedule_.shared(task / kTasks);
    const int64_t n = schedule_.chunk_of(plan, step_);
    if (n < 0) return;
    const QueryChunk chunk = plan.chunk(n);
    const RowSums total = sums_of_span(plan, 0, shape_);
    const int64_t begin = task % kTasks * kMergeRows;
    for (int64_t r = begin; r < smaller(chunk.rows(), begin + kMergeRows); ++r) {
      if (*total.used == 0) total.clear(r, r + 1, shape_.columns());
      for (int64_t span = 1; span < plan.spans; ++span) {
        const RowSums sums = sums_of_span(plan, span, shape_);
        if (*sums.used != 0) total.add(sums, r, r + 1, shape_.columns());
      }
      store_row_sums(plan, chunk, r, total, scratch.row_buffer);
    }
  }

  void store_row_sums(const KeyHeadPlan& plan, const QueryChunk& chunk, int64_t r, const RowSums& sums, float* buffer) {
    if (!gradients_.wants_query()) return;
    store_dq(gradients_, *plan.sequence, chunk.head_of(r), chunk.index_of(r), sums.dq + r * shape_.columns(),
             buffer);
  }

  // The rows of a head are added by one task at a time, so that the sum has one order.
  void count_sink(const KeyHeadPlan& plan, const QueryChunk& chunk, const RowSums& sums) {
    if (gradients_.sink == nullptr) return;
    double* of = sinks_ + (plan.sequence - problem_.sequences) * problem_.heads;
    for (int64_t r = 0; r < chunk.rows(); ++r) {
      const int64_t head = chunk.head_of(r);
      of[head] += sink_term(problem_, *plan.sequence, head, chunk.index_of(r), sums.sink_dots[r]);
    }
  }

  void add_sinks() {
    for (int64_t head = 0; head < problem_.heads; ++head) {
      double sum = 0;
      for (int64_t n = 0; n < problem_.sequence_count; ++n) sum += sinks_[n * problem_.heads + head];
      gradients_.sink[head] = static_cast<float>(sum);
    }
  }

  const Gradients& gradients_;
  const Problem& problem_;
  const Runtime& runtime_;
  const Shape shape_;
  const int64_t group_;
  const int64_t head_count_;
  Schedule schedule_;
  int64_t own_keys_ = 0;
  int64_t step_ = 0;
  int64_t arrived_ = 0;  // the most workers of a step
  bool serial_ = false;
  bool failed_ = false;
  void* memory_ = nullptr;
  double* sinks_ = nullptr;  // [sequence_count][heads]
};

}  // namespace fa::FA_ISA::grad
