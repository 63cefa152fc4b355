// Which worker takes which rows.
//
// Each worker reserves its next task while it computes the present one, so that it can prefetch for it. When little is left it
// does not, because another worker may be free earlier. A worker that finds no free task takes one that another worker has
// reserved.
//
// A task is a whole tile as long as there is much to do. Towards the end it is at most the part of the remaining work that
// falls to one worker, so that all workers end at about the same time (guided self-scheduling, Polychronopoulos and Kuck
// 1987). No result depends on it: see plan.hpp.
//
// Where each worker can have as many whole heads as the others, it begins with those, and goes to the others' heads when none of
// its own is left. So a thread finds the results of the call before, which it overwrites, in its own caches, and it reads K and V
// of a head alone. Measured on two threads: without this, 12 heads of 64 rows and keys take 5 to 40 % longer, 192 heads of 128
// rows 7 to 20 %.
#pragma once

#include "plan.hpp"

namespace fa::FA_ISA {

inline constexpr int64_t kMostWorkers = 256;

class Schedule {
 public:
  static constexpr int64_t kNone = -1;

  // What a worker takes: some units, or a split. They are numbered over all plans.
  static Units units_of(int64_t task) { return {task / kFactor, task % kFactor}; }

  // Counts the tasks of the plans. `task_ends` has room for a number of each plan. At most `workers` take tasks.
  Schedule(HeadPlan* plans, int64_t* task_ends, int64_t plan_count, int64_t group, int64_t workers)
      : plans_(plans), task_ends_(task_ends), plan_count_(plan_count), group_(group) {
    int64_t of_sequence = 0;
    for (int64_t n = 0; n < plan_count; ++n) {
      if (n == 0 || plans[n].sequence != plans[n - 1].sequence) of_sequence = pairs_of(plans[n]);
      pairs_left_ += of_sequence;
      task_ends_[n] = count_ += plans[n].tasks();
      alike_ = alike_ && plans[n].tasks() == plans[0].tasks();
    }
    workers_ = smaller(count_, smaller(kMostWorkers, workers));
    for (int64_t n = 0; n < workers_; ++n) workers_of_[n].reserved = kNone;
    divide(1);
  }

  int64_t workers() const { return workers_; }

  // How many workers the work is divided among. It is more if more arrive.
  void expect(int64_t workers) {
    expected_ = workers;
    if (alike_ && workers > 0 && plan_count_ * group_ % workers == 0) divide(workers);
  }

  // The part of the tasks that the call `index` of a worker's function begins with. ONNX Runtime gives each thread some indices
  // that follow each other, and mostly the same ones in the next call.
  int64_t part_of(size_t index) const { return static_cast<int64_t>(index) * part_count_ / workers_; }

  // A worker that has a task gets its number.
  int64_t arrive() { return __atomic_fetch_add(&arrived_, 1, __ATOMIC_RELAXED); }
  int64_t arrived() const { return __atomic_load_n(&arrived_, __ATOMIC_RELAXED); }

  // A free task, from `part` on, or one that any worker has reserved.
  int64_t take_any(int64_t part) {
    int64_t task = take_free(part, part_count_);
    const int64_t others = task == kNone ? arrived() : 0;
    for (int64_t n = 0; task == kNone && n < others; ++n) task = take_reserved(n);
    return task;
  }

  // The task that the worker has reserved, or any other one.
  int64_t take(int64_t worker, int64_t part) {
    const int64_t task = take_reserved(worker);
    return task == kNone ? take_any(part) : task;
  }

  // The next task of the worker, from its part, or kNone.
  int64_t reserve(int64_t worker, int64_t part) {
    constexpr bool kAhead = true;
    const int64_t task = take_free(part, 1, kAhead);
    __atomic_store_n(&workers_of_[worker].reserved, task, __ATOMIC_RELAXED);
    return task;
  }

  // The plan of a task. `first` becomes the number of its first unit, or its split, within the plan.
  HeadPlan& plan_of(int64_t& first) const {
    int64_t n = 0;
    for (int64_t count = plan_count_; count > 1;) {
      const int64_t half = count / 2;
      if (task_ends_[n + half - 1] <= first) n += half;
      count -= half;
    }
    if (n > 0) first -= task_ends_[n - 1];
    return plans_[n];
  }

 private:
  // An atomic exchange needs one number for both of first and count.
  static constexpr int64_t kFactor = kTileRows / kUnitRows + 1;

  // Each worker has a cache line of its own.
  static constexpr size_t kLine = 64;
  struct alignas(kLine) Worker {
    int64_t reserved;
  };

  // Units or splits [first_free, end) of all plans are free. Each part has a cache line of its own, too.
  struct alignas(kLine) Part {
    int64_t first_free;
    int64_t end;
  };

  int64_t pairs_of(const HeadPlan& plan) const {
    int64_t sum = 0;
    for (int64_t task = 0; task < plan.tasks(); ++task) sum += plan.pairs(task, group_);
    return sum;
  }

  // Divides the tasks into parts. Only whole heads are divided so, because the last tasks of a head are its shortest ones.
  void divide(int64_t parts) {
    part_count_ = parts;
    for (int64_t n = 0; n < parts; ++n) parts_[n] = {count_ * n / parts, count_ * (n + 1) / parts};
  }

  // A task of one of `parts` parts from `part` on. With `ahead` only if at least two such tasks are left for each worker.
  int64_t take_free(int64_t part, int64_t parts, bool ahead = false) {
    for (int64_t n = 0; n < parts; ++n) {
      Part& from = parts_[(part + n) % part_count_];
      int64_t first = __atomic_load_n(&from.first_free, __ATOMIC_RELAXED);
      while (first < from.end) {
        const int64_t share = __atomic_load_n(&pairs_left_, __ATOMIC_RELAXED) / larger(expected_, arrived());
        int64_t pairs;
        const Units units = units_from(first, from.end, share, pairs);
        if (ahead && pairs * 2 > share) return kNone;
        if (__atomic_compare_exchange_n(&from.first_free, &first, first + units.count, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
          __atomic_sub_fetch(&pairs_left_, pairs, __ATOMIC_RELAXED);
          return units.first * kFactor + units.count;
        }
      }
    }
    return kNone;
  }

  int64_t take_reserved(int64_t worker) {
    // A plain load comes first: most workers have nothing reserved, and an exchange takes twenty times as long.
    int64_t& reserved = workers_of_[worker].reserved;
    if (__atomic_load_n(&reserved, __ATOMIC_RELAXED) == kNone) return kNone;
    return __atomic_exchange_n(&reserved, kNone, __ATOMIC_RELAXED);
  }

  // As many units from `first` on as have at most `share` pairs, but at least one and at most a tile, and none from `end` on.
  // `pairs` becomes the number of their pairs.
  Units units_from(int64_t first, int64_t end, int64_t share, int64_t& pairs) const {
    int64_t in_plan = first;
    const HeadPlan& plan = plan_of(in_plan);
    const int64_t most = plan.splits > 1 ? 1 : smaller(end - first, plan.tiling.most_from(in_plan));
    pairs = plan.pairs(in_plan, group_);
    int64_t count = 1;
    for (; count < most; ++count) {
      const int64_t more = pairs + plan.pairs(in_plan + count, group_);
      if (more > share) break;
      pairs = more;
    }
    return {first, count};
  }

  HeadPlan* const plans_;
  int64_t* const task_ends_;
  const int64_t plan_count_;
  const int64_t group_;
  int64_t count_ = 0;  // of all tasks, each of one unit or split
  int64_t workers_ = 0;
  int64_t expected_ = 1;
  bool alike_ = true;  // whether all plans have as many tasks
  int64_t part_count_ = 1;
  alignas(kLine) int64_t pairs_left_ = 0;  // of the free tasks
  alignas(kLine) int64_t arrived_ = 0;
  Worker workers_of_[kMostWorkers];
  Part parts_[kMostWorkers];
};

}  // namespace fa::FA_ISA
