// Spreads the work over threads. A pair (a sequence and a key head) that is a small share of the whole runs as one task,
// wave after wave. Larger ones are cut into parts of their keys: the parts of a wave run side by side, each with its own
// sums of dQ, which are then added up part by part.
#pragma once

#include "results.hpp"
#include "block_pair.hpp"

namespace fa::FA_ISA::grad {

// Below this many multiplications (about 20 microseconds) waking other threads costs more than it gives.
inline constexpr double kInlineProducts = 1 << 20;

inline constexpr int64_t kWorkers = 64;

// Rows of one task that adds up the sums of parts.
inline constexpr int64_t kMergeRows = kBlockRows;

class Driver {
 public:
  Driver(const Gradients& gradients, const Runtime& runtime)
      : gradients_(gradients), problem_(gradients.problem), runtime_(runtime),
        shape_(problem_), group_(problem_.heads / problem_.key_heads), pairs_(problem_.sequence_count * problem_.key_heads) {
    const auto key_heads = static_cast<double>(problem_.key_heads);
    for (int64_t n = 0; n < problem_.sequence_count; ++n) total_ += area(problem_.sequences[n]) * key_heads;
  }

  ~Driver() { runtime_.release(runtime_.self, memory_); }

  Outcome run() {
    if (!prepare()) return Outcome::out_of_memory;
    alone_ = total_ * static_cast<double>(group_ * (shape_.numbers + shape_.value_size)) < kInlineProducts;
    spread(pairs_, &Driver::whole_pair);
    int64_t waves = 0;
    for (int64_t n = 0; n < shared_count_; ++n) waves = larger(waves, shared_[n].waves);
    for (wave_ = 0; wave_ < waves; ++wave_) {
      spread(part_ends_[shared_count_], &Driver::part_of_wave);
      spread(shared_count_ * kWaveRows / kMergeRows, &Driver::merge_rows);
      for (int64_t n = 0; n < shared_count_ && !failed_; ++n) {
        const Pair& own = shared_[n];
        if (wave_ < own.waves) count_sink(own, own.wave(wave_), sums_of(own, 0));
      }
    }
    if (gradients_.sink != nullptr && !failed_) add_sinks();
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  static double area(const Sequence& s) { return static_cast<double>(s.query_length) * static_cast<double>(s.key_length); }

  Pair pair(int64_t n) const {
    const Sequence& s = problem_.sequences[n / problem_.key_heads];
    return Pair(s, n % problem_.key_heads, group_, share(s));
  }

  // In parts of kPartsWanted.
  int64_t share(const Sequence& s) const { return static_cast<int64_t>(kPartsWanted * area(s) / total_); }

  // Lists the pairs that are shared and gives them memory: at most kPartsWanted / 2 of them.
  bool prepare() {
    constexpr int64_t kMost = kPartsWanted;
    int64_t floats = 0;
    const int64_t rows = cache_lines(RowSums::floats(shape_));
    for (int64_t n = 0; n < pairs_; ++n) {
      const Pair own = pair(n);
      const int64_t keys = own.sequence->key_length;
      if (own.parts == 1) {
        keys_alone_ = larger(keys_alone_, keys);
      } else {
        floats += keys * (shape_.columns() + shape_.value_columns()) + own.parts * rows;
        ++shared_count_;
      }
    }
    floats = cache_lines(floats);
    const int64_t sinks = gradients_.sink == nullptr ? 0 : problem_.sequence_count * problem_.heads;
    const size_t bytes = kAlignment + static_cast<size_t>(floats) * sizeof(float) +
                         static_cast<size_t>(shared_count_) * sizeof(Pair) + (kMost + 1) * sizeof(int64_t) +
                         static_cast<size_t>(sinks) * sizeof(double);
    memory_ = runtime_.allocate(runtime_.self, bytes);
    if (memory_ == nullptr) return false;
    float* data = aligned(memory_);
    shared_ = reinterpret_cast<Pair*>(data + floats);
    part_ends_ = reinterpret_cast<int64_t*>(shared_ + shared_count_);
    sinks_ = reinterpret_cast<double*>(part_ends_ + kMost + 1);
    for (int64_t n = 0; n < sinks; ++n) sinks_[n] = 0;
    int64_t count = 0;
    int64_t parts = 0;
    for (int64_t n = 0; n < pairs_; ++n) {
      Pair own = pair(n);
      if (own.parts == 1) continue;
      const int64_t keys = own.sequence->key_length;
      own.key_sums = data;
      own.value_sums = own.key_sums + keys * shape_.columns();
      own.row_sums = own.value_sums + keys * shape_.value_columns();
      data = own.row_sums + own.parts * rows;
      shared_[count] = own;
      part_ends_[count++] = parts;
      parts += own.parts;
    }
    part_ends_[count] = parts;
    return true;
  }

  using Task = void (Driver::*)(int64_t task, const Scratch& scratch);

  struct Job {
    Driver* driver;
    Task task;
    int64_t count;
    int64_t next;
  };

  // Workers take tasks from a common counter, so that each needs its scratch memory once.
  void spread(int64_t count, Task task) {
    if (count == 0 || failed_) return;
    Job job{this, task, count, 0};
    if (alone_ || count == 1) {
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
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(driver.shape_, driver.keys_alone_));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, driver.shape_, driver.keys_alone_);
    while (index < job.count) {
      (driver.*job.task)(index, scratch);
      index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    }
    driver.runtime_.release(driver.runtime_.self, memory);
  }

  void run(const Pair& own, int64_t part, const Wave& wave, const Scratch& scratch, const RowSums& sums) {
    if (!shape_.pairs) {
      run_part<false>(gradients_, shape_, own, part, wave, scratch, sums);
    } else if constexpr (kHasPairs) {
      run_part<true>(gradients_, shape_, own, part, wave, scratch, sums);
    }
  }

  void whole_pair(int64_t task, const Scratch& scratch) {
    Pair own = pair(task);
    if (own.parts > 1) return;
    const RowSums sums(scratch.own, shape_);
    own.key_sums = scratch.own + cache_lines(RowSums::floats(shape_));
    own.value_sums = own.key_sums + own.sequence->key_length * shape_.columns();
    clear_keys(shape_, own, 0);
    for (int64_t n = 0; n < own.waves; ++n) {
      const Wave wave = own.wave(n);
      run(own, 0, wave, scratch, sums);
      for (int64_t r = 0; r < wave.rows(); ++r) put_row_sums(own, wave, r, sums, scratch.rows);
      count_sink(own, wave, sums);
    }
    put_keys(gradients_, shape_, own, 0, scratch.rows);
  }

  RowSums sums_of(const Pair& own, int64_t part) const {
    return RowSums(own.row_sums + part * cache_lines(RowSums::floats(shape_)), shape_);
  }

  void part_of_wave(int64_t task, const Scratch& scratch) {
    int64_t n = 0;
    while (part_ends_[n + 1] <= task) ++n;
    const Pair& own = shared_[n];
    const int64_t part = task - part_ends_[n];
    if (wave_ >= own.waves) return;
    if (wave_ == 0) clear_keys(shape_, own, part);
    run(own, part, own.wave(wave_), scratch, sums_of(own, part));
    if (wave_ == own.waves - 1) put_keys(gradients_, shape_, own, part, scratch.rows);
  }

  void merge_rows(int64_t task, const Scratch& scratch) {
    constexpr int64_t kTasks = kWaveRows / kMergeRows;
    const Pair& own = shared_[task / kTasks];
    if (wave_ >= own.waves) return;
    const Wave wave = own.wave(wave_);
    const RowSums sums = sums_of(own, 0);
    const int64_t columns = shape_.columns();
    const int64_t begin = task % kTasks * kMergeRows;
    for (int64_t r = begin; r < smaller(wave.rows(), begin + kMergeRows); ++r) {
      for (int64_t part = 1; part < own.parts; ++part) {
        const RowSums other = sums_of(own, part);
        for (int64_t d = 0; d < columns; ++d) sums.query[r * columns + d] += other.query[r * columns + d];
        sums.dots[r] += other.dots[r];
      }
      put_row_sums(own, wave, r, sums, scratch.rows);
    }
  }

  void put_row_sums(const Pair& own, const Wave& wave, int64_t r, const RowSums& sums, float* buffer) {
    if (!gradients_.wants_query()) return;
    put_query(gradients_, *own.sequence, wave.head_of(r), wave.index_of(r), sums.query + r * shape_.columns(),
              buffer);
  }

  // One task at a time does this for a head: the sum has one order.
  void count_sink(const Pair& own, const Wave& wave, const RowSums& sums) {
    if (gradients_.sink == nullptr) return;
    double* of = sinks_ + (own.sequence - problem_.sequences) * problem_.heads;
    for (int64_t r = 0; r < wave.rows(); ++r) {
      const int64_t head = wave.head_of(r);
      of[head] += sink_term(problem_, *own.sequence, head, wave.index_of(r), sums.dots[r]);
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
  const int64_t pairs_;
  double total_ = 0;  // scores
  int64_t keys_alone_ = 0;
  int64_t wave_ = 0;
  bool alone_ = false;
  bool failed_ = false;
  void* memory_ = nullptr;
  Pair* shared_ = nullptr;
  int64_t shared_count_ = 0;
  int64_t* part_ends_ = nullptr;
  double* sinks_ = nullptr;  // [sequence_count][heads]
};

}  // namespace fa::FA_ISA::grad
