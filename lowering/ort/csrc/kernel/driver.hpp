// Spreads the work over threads: packs some key heads, runs all their query rows, merges, and goes on.
#pragma once

#include "tile.hpp"

namespace fa::FA_ISA {

// Packed K and V of the heads in flight: a share of the last-level cache, and the bound on memory.
inline constexpr int64_t kPackedBytes = 16 << 20;

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
    int64_t begin = 0;
    while (begin < pairs_ && !failed_) {
      int64_t end = begin;
      Need need;
      while (end < pairs_) {
        Need more = need;
        more.add(*this, plan(end));
        if (end > begin && more.floats * static_cast<int64_t>(sizeof(float)) > kPackedBytes) break;
        need = more;
        ++end;
      }
      run_heads(begin, end, need);
      begin = end;
    }
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  // The memory and the work of some heads.
  struct Need {
    int64_t floats = 0;
    int64_t blocks = 0;
    int64_t products = 0;
    bool no_own = true;

    void add(const Driver& driver, const HeadPlan& plan) {
      floats += driver.shared_floats(plan) + driver.partial_floats_of(plan);
      blocks += plan.packed_blocks();
      const PackShape& shape = driver.shape_;
      const Sequence& s = *plan.sequence;
      products += s.query_length * driver.group_ * s.key_length * (shape.numbers + shape.value_size);
      no_own = no_own && plan.source != Source::own;
    }
  };

  // Pairs of a sequence and a key head.
  HeadPlan plan(int64_t pair) const {
    return HeadPlan(problem_.sequences[pair / problem_.key_heads], pair % problem_.key_heads, group_, pairs_);
  }

  int64_t shared_floats(const HeadPlan& plan) const { return shape_.head_floats(plan.packed_keys()); }
  int64_t partial_floats_of(const HeadPlan& plan) const {
    return plan.chunks == 1 ? 0 : plan.chunks * partial_floats(shape_, plan.sequence->query_length * group_);
  }

  void run_heads(int64_t begin, int64_t end, const Need& need) {
    const int64_t count = end - begin;
    const size_t bytes = static_cast<size_t>(count) * (sizeof(HeadPlan) + 3 * sizeof(int64_t)) +
                         static_cast<size_t>(need.floats) * sizeof(float) + static_cast<size_t>(need.blocks) +
                         kAlignment;
    if (bytes > memory_bytes_) {
      runtime_.release(runtime_.self, memory_);
      memory_ = runtime_.allocate(runtime_.self, bytes);
      memory_bytes_ = memory_ == nullptr ? 0 : bytes;
      if (memory_ == nullptr) {
        failed_ = true;
        return;
      }
    }
    plans_ = static_cast<HeadPlan*>(memory_);
    block_ends_ = reinterpret_cast<int64_t*>(plans_ + count);
    task_ends_ = block_ends_ + count;
    merge_ends_ = task_ends_ + count;
    float* data = aligned(merge_ends_ + count);
    uint8_t* finite = reinterpret_cast<uint8_t*>(data + need.floats);
    int64_t blocks = 0;
    int64_t tasks = 0;
    int64_t merges = 0;
    for (int64_t n = 0; n < count; ++n) {
      HeadPlan& own = plans_[n];
      own = plan(begin + n);
      own.packed = data;
      data += shared_floats(own);
      own.partial = data;
      data += partial_floats_of(own);
      own.finite = finite;
      finite += own.packed_blocks();
      block_ends_[n] = blocks += own.packed_blocks();
      task_ends_[n] = tasks += own.tasks();
      merge_ends_[n] = merges += own.chunks > 1 ? 1 : 0;
    }
    no_own_ = need.no_own;
    const bool alone = need.products < kInlineProducts;
    spread(blocks, alone, &Driver::pack_task);
    spread(tasks, alone, &Driver::attend_task);
    spread(merges, alone, &Driver::merge_task);
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
    const PackShape& shape = driver.shape_;
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(shape, driver.no_own_));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, shape, driver.no_own_);
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

  void pack_task(int64_t task, const Scratch& scratch) {
    const HeadPlan& plan = locate(block_ends_, task);
    const Sequence& s = *plan.sequence;
    const int64_t first = task * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, s.key_length - first);
    float* out = plan.packed + shape_.block_offset(task);
    plan.finite[task] = pack_block(problem_, shape_, s, plan.head, first, keys, out, scratch.rows);
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
  const PackShape shape_;
  const int64_t group_;
  const int64_t pairs_;
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  bool failed_ = false;
  bool no_own_ = true;
  HeadPlan* plans_ = nullptr;
  int64_t* block_ends_ = nullptr;
  int64_t* task_ends_ = nullptr;
  int64_t* merge_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
