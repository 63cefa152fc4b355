// Runs FlashAttentionScoreGrad. The work is divided by sequence and key head. A key head that is a small share of the whole
// is one task, which goes through its chunks of query rows. The keys of larger ones are divided into splits: the splits of a
// chunk run side by side, each with sums of dQ of its own, which are then added up in the order of the splits.
#pragma once

#include "results.hpp"
#include "block_pair.hpp"

namespace fa::FA_ISA::grad {

// A problem with fewer multiplications (about 20 microseconds) stays on one thread: waking others costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

inline constexpr int64_t kWorkers = 64;

// Rows of one task that adds up the splits' sums of dQ.
inline constexpr int64_t kMergeRows = kBlockRows;

class Driver {
 public:
  Driver(const Gradients& gradients, const Runtime& runtime)
      : gradients_(gradients), problem_(gradients.problem), runtime_(runtime), shape_(problem_),
        group_(problem_.heads / problem_.key_heads), head_count_(problem_.sequence_count * problem_.key_heads) {
    const auto key_heads = static_cast<double>(problem_.key_heads);
    for (int64_t n = 0; n < problem_.sequence_count; ++n) score_count_ += area(problem_.sequences[n]) * key_heads;
  }

  ~Driver() { runtime_.release(runtime_.self, memory_); }

  Outcome run() {
    if (!prepare()) return Outcome::out_of_memory;
    serial_ = score_count_ * static_cast<double>(group_ * (shape_.qk_size + shape_.value_size)) < kInlineProducts;
    run_parallel(head_count_, &Driver::unsplit_head);
    int64_t chunks = 0;
    for (int64_t n = 0; n < split_head_count_; ++n) chunks = larger(chunks, split_heads_[n].chunks);
    for (chunk_ = 0; chunk_ < chunks; ++chunk_) {
      run_parallel(split_ends_[split_head_count_], &Driver::split_of_chunk);
      run_parallel(split_head_count_ * kChunkRows / kMergeRows, &Driver::merge_rows);
      for (int64_t n = 0; n < split_head_count_ && !failed_; ++n) {
        const KeyHeadPlan& plan = split_heads_[n];
        if (chunk_ < plan.chunks) count_sink(plan, plan.chunk(chunk_), sums_of(plan, 0));
      }
    }
    if (gradients_.sink != nullptr && !failed_) add_sinks();
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  static double area(const Sequence& s) { return static_cast<double>(s.query_length) * static_cast<double>(s.key_length); }

  KeyHeadPlan plan_of(int64_t n) const {
    const Sequence& s = problem_.sequences[n / problem_.key_heads];
    return KeyHeadPlan(s, n % problem_.key_heads, group_, share(s));
  }

  // How many of kSplitsWanted splits belong to a key head of the sequence.
  int64_t share(const Sequence& s) const { return static_cast<int64_t>(kSplitsWanted * area(s) / score_count_); }

  // Lists the key heads that are split, and allocates their sums. There are at most kSplitsWanted / 2 of them.
  bool prepare() {
    constexpr int64_t kMost = kSplitsWanted;
    int64_t floats = 0;
    const int64_t rows = cache_lines(RowSums::floats(shape_));
    for (int64_t n = 0; n < head_count_; ++n) {
      const KeyHeadPlan plan = plan_of(n);
      const int64_t keys = plan.sequence->key_length;
      if (plan.splits == 1) {
        unsplit_keys_ = larger(unsplit_keys_, keys);
      } else {
        floats += keys * (shape_.columns() + shape_.value_columns()) + plan.splits * rows;
        ++split_head_count_;
      }
    }
    floats = cache_lines(floats);
    const int64_t sinks = gradients_.sink == nullptr ? 0 : problem_.sequence_count * problem_.heads;
    const size_t bytes = kAlignment + static_cast<size_t>(floats) * sizeof(float) +
                         static_cast<size_t>(split_head_count_) * sizeof(KeyHeadPlan) + (kMost + 1) * sizeof(int64_t) +
                         static_cast<size_t>(sinks) * sizeof(double);
    memory_ = runtime_.allocate(runtime_.self, bytes);
    if (memory_ == nullptr) return false;
    float* data = aligned(memory_);
    split_heads_ = reinterpret_cast<KeyHeadPlan*>(data + floats);
    split_ends_ = reinterpret_cast<int64_t*>(split_heads_ + split_head_count_);
    sinks_ = reinterpret_cast<double*>(split_ends_ + kMost + 1);
    for (int64_t n = 0; n < sinks; ++n) sinks_[n] = 0;
    int64_t count = 0;
    int64_t splits = 0;
    for (int64_t n = 0; n < head_count_; ++n) {
      KeyHeadPlan plan = plan_of(n);
      if (plan.splits == 1) continue;
      const int64_t keys = plan.sequence->key_length;
      plan.dk_sums = data;
      plan.dv_sums = plan.dk_sums + keys * shape_.columns();
      plan.row_sums = plan.dv_sums + keys * shape_.value_columns();
      data = plan.row_sums + plan.splits * rows;
      split_heads_[count] = plan;
      split_ends_[count++] = splits;
      splits += plan.splits;
    }
    split_ends_[count] = splits;
    return true;
  }

  using Task = void (Driver::*)(int64_t task, const Scratch& scratch);

  struct Job {
    Driver* driver;
    Task task;
    int64_t count;
    int64_t next;
  };

  // Workers take tasks from a common counter, so that each needs its scratch memory only once.
  void run_parallel(int64_t count, Task task) {
    if (count == 0 || failed_) return;
    Job job{this, task, count, 0};
    if (serial_ || count == 1) {
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
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(driver.shape_, driver.unsplit_keys_));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, driver.shape_, driver.unsplit_keys_);
    while (index < job.count) {
      (driver.*job.task)(index, scratch);
      index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    }
    driver.runtime_.release(driver.runtime_.self, memory);
  }

  void run(const KeyHeadPlan& plan, int64_t split, const QueryChunk& chunk, const Scratch& scratch, const RowSums& sums) {
    if (!shape_.pairs) {
      run_split<false>(gradients_, shape_, plan, split, chunk, scratch, sums);
    } else if constexpr (kHasPairs) {
      run_split<true>(gradients_, shape_, plan, split, chunk, scratch, sums);
    }
  }

  // Task: a key head that is not split.
  void unsplit_head(int64_t task, const Scratch& scratch) {
    KeyHeadPlan plan = plan_of(task);
    if (plan.splits > 1) return;
    const RowSums sums(scratch.unsplit_sums, shape_);
    plan.dk_sums = scratch.unsplit_sums + cache_lines(RowSums::floats(shape_));
    plan.dv_sums = plan.dk_sums + plan.sequence->key_length * shape_.columns();
    clear_dk_dv(shape_, plan, 0);
    for (int64_t n = 0; n < plan.chunks; ++n) {
      const QueryChunk chunk = plan.chunk(n);
      run(plan, 0, chunk, scratch, sums);
      for (int64_t r = 0; r < chunk.rows(); ++r) store_row_sums(plan, chunk, r, sums, scratch.row_buffer);
      count_sink(plan, chunk, sums);
    }
    store_dk_dv(gradients_, shape_, plan, 0, scratch.row_buffer);
  }

  RowSums sums_of(const KeyHeadPlan& plan, int64_t split) const {
    return RowSums(plan.row_sums + split * cache_lines(RowSums::floats(shape_)), shape_);
  }

  // Task: one split of a key head with the present chunk of query rows.
  void split_of_chunk(int64_t task, const Scratch& scratch) {
    int64_t n = 0;
    while (split_ends_[n + 1] <= task) ++n;
    const KeyHeadPlan& plan = split_heads_[n];
    const int64_t split = task - split_ends_[n];
    if (chunk_ >= plan.chunks) return;
    if (chunk_ == 0) clear_dk_dv(shape_, plan, split);
    run(plan, split, plan.chunk(chunk_), scratch, sums_of(plan, split));
    if (chunk_ == plan.chunks - 1) store_dk_dv(gradients_, shape_, plan, split, scratch.row_buffer);
  }

  // Task: adds up the splits' sums of dQ for some rows of the present chunk.
  void merge_rows(int64_t task, const Scratch& scratch) {
    constexpr int64_t kTasks = kChunkRows / kMergeRows;
    const KeyHeadPlan& plan = split_heads_[task / kTasks];
    if (chunk_ >= plan.chunks) return;
    const QueryChunk chunk = plan.chunk(chunk_);
    const RowSums sums = sums_of(plan, 0);
    const int64_t columns = shape_.columns();
    const int64_t begin = task % kTasks * kMergeRows;
    for (int64_t r = begin; r < smaller(chunk.rows(), begin + kMergeRows); ++r) {
      for (int64_t split = 1; split < plan.splits; ++split) {
        const RowSums other = sums_of(plan, split);
        for (int64_t d = 0; d < columns; ++d) sums.dq[r * columns + d] += other.dq[r * columns + d];
        sums.sink_dots[r] += other.sink_dots[r];
      }
      store_row_sums(plan, chunk, r, sums, scratch.row_buffer);
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
  double score_count_ = 0;  // scores of the whole problem
  int64_t unsplit_keys_ = 0;
  int64_t chunk_ = 0;
  bool serial_ = false;
  bool failed_ = false;
  void* memory_ = nullptr;
  KeyHeadPlan* split_heads_ = nullptr;
  int64_t split_head_count_ = 0;
  int64_t* split_ends_ = nullptr;
  double* sinks_ = nullptr;  // [sequence_count][heads]
};

}  // namespace fa::FA_ISA::grad
