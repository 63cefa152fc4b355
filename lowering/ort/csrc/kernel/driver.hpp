// Runs FlashAttentionScore: plans the tasks, spreads them over threads, and merges key splits. The thread that finishes the
// last split of a key head merges them.
#pragma once

#include "attend_tile.hpp"
#include "schedule.hpp"

namespace fa::FA_ISA {

// A problem with fewer multiplications (about 20 microseconds) stays on one thread: waking others costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : problem_(problem), runtime_(runtime), shape_(problem),
        group_(problem.heads / problem.key_heads), head_count_(problem.sequence_count * problem.key_heads) {
    for (int64_t n = 0; n < problem.sequence_count && tile_rows_ < kTileRows; ++n) {
      const int64_t rows = problem.sequences[n].query_length * group_;
      tile_rows_ = larger(tile_rows_, smaller(kTileRows, ceil_div(rows, kPanel) * kPanel));
    }
  }

  ~Driver() {
    runtime_.release(runtime_.self, partials_);
    runtime_.release(runtime_.self, memory_);
  }

  Outcome run() {
    // The scratch memory of the first worker follows the plans, so that small problems allocate once.
    const size_t plan_bytes = static_cast<size_t>(head_count_) * (sizeof(HeadPlan) + sizeof(int64_t)) + kAlignment;
    memory_ = runtime_.allocate(runtime_.self, plan_bytes + Scratch::bytes(shape_, tile_rows_));
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
    for (int64_t n = 0; n < head_count_; ++n) {
      plans_[n].partial = data;
      data += partial_floats_of(plans_[n]);
    }
    run_tasks(products < kInlineProducts);
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  int64_t partial_floats_of(const HeadPlan& plan) const {
    return plan.splits == 1 ? 0 : plan.splits * partial_floats(shape_, plan.sequence->query_length * group_);
  }

  struct Job {
    Driver& driver;
    Schedule schedule;
  };

  void run_tasks(bool serial) {
    Job job{*this, {plans_, task_ends_, head_count_, group_, serial ? 1 : runtime_.most_workers}};
    const int64_t workers = job.schedule.workers();
    if (workers == 1) {
      work(&job, 0);
    } else if (workers > 1) {
      const int64_t seen = __atomic_load_n(runtime_.workers_seen, __ATOMIC_RELAXED);
      job.schedule.expect(smaller(workers, seen));
      runtime_.parallel(runtime_.self, work, &job, static_cast<size_t>(workers));
      if (job.schedule.arrived() > seen) __atomic_store_n(runtime_.workers_seen, job.schedule.arrived(), __ATOMIC_RELAXED);
    }
  }

  // One worker: takes tasks until there is none. If there are fewer threads than workers, most workers come too late.
  static void work(void* data, size_t index) {
    auto& [driver, schedule] = *static_cast<Job*>(data);
    const int64_t part = schedule.part_of(index);
    int64_t task = schedule.take_any(part);
    if (task == Schedule::kNone) return;
    const int64_t worker = schedule.arrive();
    void* memory = driver.first_scratch_;
    if (worker > 0) {
      memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(driver.shape_, driver.tile_rows_));
    }
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, driver.shape_, driver.tile_rows_);
    const TilesOfThread tiles;
    PrefetchQueue prefetches;
    while (task != Schedule::kNone) {
      driver.run_task(schedule, task, schedule.reserve(worker, part), scratch, prefetches);
      task = schedule.take(worker, part);
    }
    if (worker > 0) driver.runtime_.release(driver.runtime_.self, memory);
  }

  // `next` is the task that this worker has reserved, or kNone.
  void run_task(const Schedule& schedule, int64_t task, int64_t next, const Scratch& scratch, PrefetchQueue& prefetches) const {
    Units units = Schedule::units_of(task);
    HeadPlan& plan = schedule.plan_of(units.first);
    const QueryTile tile{problem_, shape_, plan, *plan.sequence, plan.rows(units, group_), scratch, prefetches};
    prefetches.next = nullptr;
    if (next != Schedule::kNone) {
      Units next_units = Schedule::units_of(next);
      prefetches.next = &schedule.plan_of(next_units.first);
      prefetches.next_rows = prefetches.next->rows(next_units, group_);
      prefetches.next_key = prefetches.next->first_key(next_units.first, prefetches.next_rows);
    }
    if (plan.splits == 1) {
      run_tile(tile);
      return;
    }
    run_split(tile, units.first);
    if (__atomic_sub_fetch(&plan.splits_left, 1, __ATOMIC_ACQ_REL) == 0) run_merge(tile);
  }

  const Problem& problem_;
  const Runtime& runtime_;
  const Shape shape_;
  const int64_t group_;
  const int64_t head_count_;
  int64_t tile_rows_ = 0;  // the most that a tile has, in whole panels
  void* memory_ = nullptr;
  void* partials_ = nullptr;
  void* first_scratch_ = nullptr;
  bool failed_ = false;
  HeadPlan* plans_ = nullptr;
  int64_t* task_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
