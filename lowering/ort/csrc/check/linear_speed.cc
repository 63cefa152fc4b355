// A program that times linear attention with one instruction set, FA_CHECKED, on one thread:
//
//     linear_speed [HEADS [SIZE [TOKENS...]]]
//
// It prints nanoseconds for each token and head, and the rate of the recurrence's 7 SIZE^2 operations: the shortest of many
// calls. The first line has the rate of multiply-adds in registers. A step is compared with a multiplication of the state
// in place.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "check.hpp"

namespace fa::check {
namespace {

constexpr double kSeconds = 0.3;  // of each measurement

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
double shortest(F call) {
  call();
  double best = 1e30;
  const double end = seconds() + kSeconds;
  for (int64_t calls = 0; calls < 5 || seconds() < end; ++calls) {
    const double begin = seconds();
    call();
    best = std::min(best, seconds() - begin);
  }
  return best;
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));

// Operations of multiply-adds in a second.
double multiply_adds() {
  constexpr int kSums = 12;  // so many do not wait for each other
  constexpr int64_t kCount = 2000;
  const double time = shortest([] {
    Vec sums[kSums], x = Vec{} + 0.5f;
    for (int i = 0; i < kSums; ++i) sums[i] = Vec{} + static_cast<float>(i);
    for (int64_t n = 0; n < kCount; ++n) {
#pragma GCC unroll 12
      for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * x + x;
#if defined(__x86_64__)
      asm volatile("" : "+x"(x));
#endif
    }
    volatile float sink = 0;
    for (int i = 0; i < kSums; ++i) sink = sink + sums[i][0];
  });
  return 2.0 * kSums * kLanes * kCount / time;
}

struct Case {
  const char* name;
  linear::Gate gate;
  linear::Correction correction;
  Type type;
  bool value_major;
};

double time_of(const Case& c, int64_t heads, int64_t size, int64_t tokens) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  // |x| scale + shift for normally distributed x, as floats or bfloat16.
  const auto drawn = [&](int64_t row, float scale, float shift, Type type) {
    std::vector<float> floats(static_cast<size_t>(tokens * heads * row));
    for (float& x : floats) x = std::fabs(normal(random)) * scale + shift;
    auto* halves = reinterpret_cast<uint16_t*>(floats.data());
    for (size_t n = 0; n < floats.size() && type != Type::float32; ++n) {
      halves[n] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, floats[n]) >> 16);
    }
    return floats;
  };
  const auto rows = [&](std::vector<float>& numbers, int64_t row) {
    linear::Rows rows;
    rows.data = numbers.data();
    rows.token = heads * row;
    rows.head = row;
    rows.type = c.type;
    return rows;
  };
  const float unit = 1 / std::sqrt(static_cast<float>(size));
  const int64_t decays = c.gate == linear::Gate::key ? size : 1;
  auto query = drawn(size, unit, 0, c.type), key = drawn(size, unit, -0.8f * unit, c.type);
  auto value = drawn(size, 1, -0.8f, c.type), out = value;
  auto decay = drawn(decays, -0.05f, 0, c.type), beta = drawn(1, 0.1f, 0.2f, c.type);
  auto write = drawn(size, unit, -0.8f * unit, c.type), read = drawn(size, -0.5f * unit, 0.4f * unit, c.type);
  std::vector<float> state(static_cast<size_t>(heads * size * size), 0.5f);
  linear::Problem p;
  p.gate = c.gate;
  p.correction = c.correction;
  p.heads = p.query_heads = p.key_heads = p.out_heads = heads;
  p.key_size = p.value_size = size;
  p.query = rows(query, size);
  p.key = rows(key, size);
  p.value = rows(value, size);
  p.decay = rows(decay, decays);
  p.beta = rows(beta, 1);
  p.write = rows(write, size);
  p.read = rows(read, size);
  p.out = rows(out, size);
  p.past.data = p.present.data = state.data();
  p.past.entry = p.present.entry = heads * size * size;
  p.past.head = p.present.head = size * size;
  p.past.key = p.present.key = c.value_major ? 1 : size;
  p.past.value = p.present.value = c.value_major ? size : 1;
  const linear::Sequence sequence{0, tokens, 0, 0};
  p.sequences = &sequence;
  p.sequence_count = 1;
  int64_t seen = 1;
  // The one worker finds the same memory in each call.
  const auto allocate = [](void*, size_t bytes) -> void* {
    static std::vector<char> memory;
    if (memory.size() < bytes) memory.resize(bytes);
    return memory.data();
  };
  const Runtime runtime = {nullptr, allocate, [](void*, void*) {},
                           [](void*, void (*task)(void*, size_t), void* data, size_t count) {
                             for (size_t n = 0; n < count; ++n) task(data, n);
                           },
                           1, &seen};
  return shortest([&] { FA_CHECKED::linear_kernels.attention(p, runtime); });
}

// Seconds of reading and writing the states of `heads` heads.
double pass_over(int64_t count) {
  std::vector<float> numbers(static_cast<size_t>(count + 16), 1.0f);
  float* data = numbers.data();
  return shortest([&] {
    for (int64_t n = 0; n < count; n += 4 * kLanes) {
      for (int i = 0; i < 4; ++i) {
        Vec x;
        __builtin_memcpy(&x, data + n + i * kLanes, sizeof x);
        x *= 0.999f;
        __builtin_memcpy(data + n + i * kLanes, &x, sizeof x);
      }
    }
    asm volatile("" ::: "memory");
  });
}

}  // namespace
}  // namespace fa::check

int main(int argc, char** argv) {
  using namespace fa;
  using namespace fa::check;
  const int64_t heads = argc > 1 ? std::atoll(argv[1]) : 16, size = argc > 2 ? std::atoll(argv[2]) : 128;
  std::vector<int64_t> counts;
  for (int n = 3; n < argc; ++n) counts.push_back(std::atoll(argv[n]));
  if (counts.empty()) counts = {1, 8, 256, 1024, 4096};
  const double limit = multiply_adds();
  const double pass = pass_over(heads * size * size);
  std::printf("multiply-adds %.1f GFLOPS; a pass over the states %.1f us\n", limit * 1e-9, pass * 1e6);
  const Case cases[] = {
      {"gated delta", linear::Gate::head, linear::Correction::delta, Type::float32, false},
      {"gated delta, value-major", linear::Gate::head, linear::Correction::delta, Type::float32, true},
      {"gated", linear::Gate::head, linear::Correction::none, Type::float32, false},
      {"gated delta of keys", linear::Gate::key, linear::Correction::delta, Type::float32, false},
      {"general, gate of keys", linear::Gate::key, linear::Correction::general, Type::float32, false},
      {"gated delta, bfloat16", linear::Gate::head, linear::Correction::delta, Type::bfloat16, false},
  };
  for (const Case& c : cases) {
    for (int64_t tokens : counts) {
      const double time = time_of(c, heads, size, tokens);
      const double rate = 7.0 * static_cast<double>(size * size * heads * tokens) / time;
      std::printf("%-26s T %5lld: %8.1f us, %7.1f ns a token and head, %6.1f GFLOPS, %4.1f %%", c.name,
                  static_cast<long long>(tokens), time * 1e6, time * 1e9 / static_cast<double>(heads * tokens), rate * 1e-9,
                  100 * rate / limit);
      if (tokens == 1) std::printf("; %.0f %% of the pass", 100 * pass / time);
      std::puts("");
    }
  }
}
