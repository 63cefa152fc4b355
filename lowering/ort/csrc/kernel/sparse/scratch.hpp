// Memory of a call that frees itself, and parallel loops over function objects.
#pragma once

#include "../simd.hpp"

namespace fa::FA_ISA {

template <class T>
class Scratch {
 public:
  explicit Scratch(const Runtime& runtime) : runtime_(runtime) {}
  Scratch(const Runtime& runtime, int64_t count) : Scratch(runtime) { allocate(count); }
  ~Scratch() { runtime_.release(runtime_.self, data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // To be called once. Returns false if there is no memory.
  bool allocate(int64_t count) {
    size_t bytes;
    if (__builtin_mul_overflow(static_cast<size_t>(larger(count, 1)), sizeof(T), &bytes)) return false;
    data_ = static_cast<T*>(runtime_.allocate(runtime_.self, bytes));
    return data_ != nullptr;
  }

  T* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  const Runtime& runtime_;
  T* data_ = nullptr;
};

// Calls f(first, last) for parts of [0, count) of `step` each. What a part computes must not depend on the thread.
template <class F>
static void in_parallel(const Runtime& runtime, int64_t count, int64_t step, F& f) {
  struct Part {
    F& f;
    int64_t count, step;
  } part{f, count, step};
  const int64_t tasks = ceil_div(count, step);
  if (tasks == 1) return f(int64_t{0}, count);
  const auto task = [](void* data, size_t i) {
    const Part& part = *static_cast<Part*>(data);
    const int64_t first = static_cast<int64_t>(i) * part.step;
    part.f(first, smaller(first + part.step, part.count));
  };
  if (tasks > 0) runtime.parallel(runtime.self, task, &part, static_cast<size_t>(tasks));
}

// Set by tasks that find no memory. The others go on.
class Failure {
 public:
  void set() { __atomic_store_n(&failed_, true, __ATOMIC_RELAXED); }
  Outcome outcome() const { return __atomic_load_n(&failed_, __ATOMIC_RELAXED) ? Outcome::out_of_memory : Outcome::done; }

 private:
  bool failed_ = false;
};

}  // namespace fa::FA_ISA
