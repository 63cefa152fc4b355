// Compares the kernel of one instruction set, compiled as `baseline`, with the plain reference: a program for machines,
// or emulators, on which the tests in Python do not run. Prints the worst difference; fails if one is not small.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "reference.hpp"

namespace fa {
namespace baseline {
Outcome attention(const Problem&, const Runtime&);
}
namespace reference {
Outcome attention(const Problem&, const Runtime&);
}

namespace {

void* allocate(void*, size_t bytes) { return std::malloc(bytes); }
void release(void*, void* memory) { std::free(memory); }
void run_all(void*, void (*task)(void*, size_t), void* data, size_t count) {
  for (size_t n = 0; n < count; ++n) task(data, n);
}

struct Form {
  int64_t heads, key_heads, queries, keys, size, value_size;
  bool causal;
};

// Numbers of one type.
struct Numbers {
  std::vector<float> floats;
  std::vector<uint16_t> halves;

  Numbers(Type type, int64_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t n = 0; n < count; ++n) {
      const float x = normal(random);
      floats.push_back(x);
      halves.push_back(type == Type::float32 ? uint16_t{} : reference::from_float(x, type));
    }
  }
  void* data(Type type) { return type == Type::float32 ? static_cast<void*>(floats.data()) : halves.data(); }
  float at(size_t n, Type type) const { return type == Type::float32 ? floats[n] : reference::to_float(halves[n], type); }
};

// The largest difference of an output, a softmax_max or a softmax_sum (that one relative).
double worst(const Form& form, Type type) {
  std::mt19937 random(7);
  const int64_t rows = form.heads * form.queries;
  Numbers query(type, rows * form.size, random);
  Numbers key(type, form.key_heads * form.keys * form.size, random);
  Numbers value(type, form.key_heads * form.keys * form.value_size, random);
  Sequence sequence;
  sequence.query_length = form.queries;
  sequence.key_length = form.keys;
  if (form.causal) sequence.last = form.keys - form.queries;
  sequence.statistics_head = form.queries * kStatisticsWidth;
  sequence.statistics_row = kStatisticsWidth;
  Problem problem;
  problem.type = type;
  problem.heads = form.heads;
  problem.key_heads = form.key_heads;
  problem.head_size = form.size;
  problem.value_size = form.value_size;
  problem.query = {query.data(type), form.queries * form.size, form.size};
  problem.key = {key.data(type), form.keys * form.size, form.size};
  problem.value = {value.data(type), form.keys * form.value_size, form.value_size};
  problem.sequences = &sequence;
  problem.sequence_count = 1;
  problem.scale = 1 / std::sqrt(static_cast<float>(form.size));
  const Runtime runtime{nullptr, allocate, release, run_all};
  std::vector<Numbers> outs;
  std::vector<std::vector<float>> largest;
  std::vector<std::vector<float>> sums;
  for (const Attention attention : {baseline::attention, reference::attention}) {
    Numbers out(type, rows * form.value_size, random);
    std::vector<float> max(static_cast<size_t>(rows * kStatisticsWidth));
    std::vector<float> sum(max.size());
    problem.out = {out.data(type), form.queries * form.value_size, form.value_size};
    problem.softmax_max = max.data();
    problem.softmax_sum = sum.data();
    if (attention(problem, runtime) != Outcome::done) return INFINITY;
    outs.push_back(out);
    largest.push_back(max);
    sums.push_back(sum);
  }
  double difference = 0;
  const auto see = [&](double x) { difference = x <= difference ? difference : x; };  // NaN is seen
  for (size_t n = 0; n < static_cast<size_t>(rows * form.value_size); ++n) see(std::fabs(outs[0].at(n, type) - outs[1].at(n, type)));
  for (size_t n = 0; n < largest[0].size(); ++n) {
    see(std::fabs(largest[0][n] - largest[1][n]));
    see(std::fabs(sums[0][n] / sums[1][n] - 1));
  }
  return difference;
}

}  // namespace
}  // namespace fa

int main() {
  using fa::Type;
  const fa::Form forms[] = {
      {2, 2, 33, 29, 16, 16, false}, {4, 1, 1, 600, 64, 64, false}, {8, 1, 1, 300, 80, 48, false}, {4, 2, 5, 301, 7, 5, false},
      {2, 2, 100, 100, 64, 64, true}, {1, 1, 300, 700, 32, 32, true}, {3, 3, 1, 17, 1, 1, false}, {2, 1, 197, 197, 128, 96, false},
  };
  // float32: a sum of at most 700 products. Else one unit in the last place of numbers below 4.
  const struct { Type type; const char* name; double allowed; } types[] = {
      {Type::float32, "float32", 5e-6}, {Type::float16, "float16", 4 * 0x1p-10}, {Type::bfloat16, "bfloat16", 4 * 0x1p-7}};
  bool good = true;
  for (const auto& type : types) {
    for (const fa::Form& form : forms) {
      const double difference = fa::worst(form, type.type);
      const bool small = difference <= type.allowed;
      good = good && small;
      std::printf("%-8s %d heads over %d, %d x %d, sizes %d and %d%s: %.1e%s\n", type.name, int(form.heads), int(form.key_heads),
                  int(form.queries), int(form.keys), int(form.size), int(form.value_size), form.causal ? ", causal" : "",
                  difference, small ? "" : "  TOO LARGE");
    }
  }
  return good ? 0 : 1;
}
