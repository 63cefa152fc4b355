// Spreads the work over threads: packs some key heads, runs all their query rows, and goes on.
#pragma once

#include "tile.hpp"

namespace fa::FA_ISA {

// Packed K and V of the heads in flight: a share of the last-level cache, and the bound on memory.
inline constexpr int64_t kPackedBytes = 16 << 20;

// Below this many multiplications (about 20 microseconds) waking other threads costs more than it gives.
inline constexpr int64_t kInlineProducts = int64_t{1} << 20;

// Workers take tasks from a common counter, so that each needs its scratch memory once.
inline constexpr int64_t kWorkers = 64;

// How the query rows that share a key head are cut into spans.
struct Cut {
  int64_t rows = 0;             // of one head in a span
  int64_t heads = 1;            // in a span
  int64_t spans_per_head = 1;   // 1 when a span holds several heads
  int64_t count = 0;

  Cut() = default;
  Cut(int64_t query_length, int64_t group) {
    if (query_length == 0) return;
    spans_per_head = blocks_of(query_length, kBlockRows);
    rows = blocks_of(blocks_of(query_length, spans_per_head), kTileRows) * kTileRows;
    rows = smaller(rows, query_length);
    spans_per_head = blocks_of(query_length, rows);
    if (spans_per_head == 1) heads = larger(1, smaller(group, kBlockRows / query_length));
    count = spans_per_head > 1 ? spans_per_head * group : blocks_of(group, heads);
  }

  // Last rows first: under a causal mask they are the longest tasks.
  RowSpan span(int64_t index, int64_t query_length, int64_t first_head, int64_t group) const {
    if (spans_per_head == 1) {
      const int64_t head = index * heads;
      return {first_head + head, smaller(heads, group - head), 0, query_length};
    }
    const int64_t begin = (spans_per_head - 1 - index % spans_per_head) * rows;
    return {first_head + index / spans_per_head, 1, begin, smaller(query_length, begin + rows)};
  }
};

// Panels begin on cache lines, so that no vector load touches two.
inline constexpr size_t kAlignment = 64;

FA_INLINE float* aligned(void* p) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

class Driver {
 public:
  Driver(const Problem& problem, const Runtime& runtime)
      : problem_(problem), runtime_(runtime), shape_{problem.head_size + problem.rope_size, problem.value_size},
        group_(problem.heads / problem.key_heads) {}

  ~Driver() { runtime_.release(runtime_.self, memory_); }

  Outcome run() {
    const int64_t pairs = problem_.sequence_count * problem_.key_heads;
    int64_t begin = 0;
    while (begin < pairs && !failed_) {
      int64_t end = begin;
      int64_t floats = 0;
      while (end < pairs) {
        const int64_t more = shape_.head_floats(packed_keys(sequence(end)));
        if (end > begin && (floats + more) * static_cast<int64_t>(sizeof(float)) > kPackedBytes) break;
        floats += more;
        ++end;
      }
      run_heads(begin, end, floats);
      begin = end;
    }
    return failed_ ? Outcome::out_of_memory : Outcome::done;
  }

 private:
  const Sequence& sequence(int64_t pair) const { return problem_.sequences[pair / problem_.key_heads]; }

  // None if so few query rows read them that packing does not pay.
  int64_t packed_keys(const Sequence& s) const {
    return s.query_length * group_ <= kDirectRows ? 0 : s.key_length;
  }

  // Pairs [begin, end) of a sequence and a key head.
  void run_heads(int64_t begin, int64_t end, int64_t floats) {
    const int64_t count = end - begin;
    int64_t blocks = 0;
    for (int64_t pair = begin; pair < end; ++pair) blocks += blocks_of(packed_keys(sequence(pair)), kBlockKeys);
    const size_t bytes = static_cast<size_t>(count) * (sizeof(PackedHead) + 2 * sizeof(int64_t)) +
                         static_cast<size_t>(floats) * sizeof(float) + static_cast<size_t>(blocks) + kAlignment;
    if (bytes > memory_bytes_) {
      runtime_.release(runtime_.self, memory_);
      memory_ = runtime_.allocate(runtime_.self, bytes);
      memory_bytes_ = memory_ == nullptr ? 0 : bytes;
      if (memory_ == nullptr) {
        failed_ = true;
        return;
      }
    }
    heads_ = static_cast<PackedHead*>(memory_);
    block_ends_ = reinterpret_cast<int64_t*>(heads_ + count);
    span_ends_ = block_ends_ + count;
    float* data = aligned(span_ends_ + count);
    uint8_t* finite = reinterpret_cast<uint8_t*>(data + floats);
    int64_t spans = 0;
    int64_t products = 0;
    blocks = 0;
    for (int64_t n = 0; n < count; ++n) {
      const Sequence& s = sequence(begin + n);
      const int64_t keys = packed_keys(s);
      const int64_t own = blocks_of(keys, kBlockKeys);
      heads_[n] = {&s, (begin + n) % problem_.key_heads, keys == 0 ? nullptr : data, finite};
      data += shape_.head_floats(keys);
      finite += own;
      block_ends_[n] = blocks += own;
      span_ends_[n] = spans += Cut(s.query_length, group_).count;
      products += s.query_length * group_ * s.key_length * (shape_.depth + shape_.value_size);
    }
    const bool alone = products < kInlineProducts;
    spread(blocks, alone, &Driver::pack_task);
    spread(spans, alone, &Driver::span_task);
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
    if (alone) {
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
    void* memory = driver.runtime_.allocate(driver.runtime_.self, Scratch::bytes(driver.shape_));
    if (memory == nullptr) {
      __atomic_store_n(&driver.failed_, true, __ATOMIC_RELAXED);
      return;
    }
    const Scratch scratch(memory, driver.shape_);
    while (index < job.count) {
      (driver.*job.task)(index, scratch);
      index = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    }
    driver.runtime_.release(driver.runtime_.self, memory);
  }

  // The head that task number `task` belongs to, given where each head's tasks end; turns `task` into the
  // number within the head.
  static const int64_t* locate(const int64_t* ends, int64_t& task) {
    const int64_t* end = ends;
    while (*end <= task) ++end;
    if (end != ends) task -= end[-1];
    return end;
  }

  void pack_task(int64_t task, const Scratch& scratch) {
    const PackedHead& head = heads_[locate(block_ends_, task) - block_ends_];
    const Sequence& s = *head.sequence;
    const int64_t first = task * kBlockKeys;
    const int64_t keys = smaller(kBlockKeys, s.key_length - first);
    float* out = head.data + shape_.block_offset(task);
    pack_keys(problem_, s, head.head, first, keys, out, scratch.rows);
    head.finite[task] = pack_values(problem_, s, head.head, first, keys, out + shape_.key_floats(keys), scratch.rows);
  }

  void span_task(int64_t task, const Scratch& scratch) {
    const PackedHead& head = heads_[locate(span_ends_, task) - span_ends_];
    const int64_t length = head.sequence->query_length;
    const RowSpan span = Cut(length, group_).span(task, length, head.head * group_, group_);
    run_span({problem_, shape_, head, *head.sequence, span, scratch});
  }

  const Problem& problem_;
  const Runtime& runtime_;
  const PackShape shape_;
  const int64_t group_;
  void* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  bool failed_ = false;
  PackedHead* heads_ = nullptr;
  int64_t* block_ends_ = nullptr;
  int64_t* span_ends_ = nullptr;
};

}  // namespace fa::FA_ISA
