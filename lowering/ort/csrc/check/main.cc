#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "../reference.hpp"
#include "check.hpp"

namespace fa::check {

const char* text_of(Type type) {
  return type == Type::float32 ? "float32" : type == Type::float16 ? "float16" : "bfloat16";
}

Runtime runtime(int64_t workers) {
  static int64_t workers_seen;
  workers_seen = workers;
  return {nullptr, [](void*, size_t bytes) { return std::malloc(bytes); }, [](void*, void* memory) { std::free(memory); },
          [](void*, void (*task)(void*, size_t), void* data, size_t count) {
            for (size_t n = 0; n < count; ++n) task(data, n);
          },
          workers, &workers_seen};
}

Numbers::Numbers(Type type, int64_t count, float value) : type_(type) {
  const auto size = static_cast<size_t>(count);
  if (type == Type::float32) floats_.assign(size, value);
  else halves_.assign(size, reference::from_float(value, type));
}

Numbers::Numbers(Type type, int64_t count, Random& random) : Numbers(type, count) {
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n < count; ++n) reference::write(data(), n, normal(random), type);
}

float Numbers::operator[](int64_t n) const {
  return type_ == Type::float32 ? floats_[static_cast<size_t>(n)]
                                : reference::to_float(halves_[static_cast<size_t>(n)], type_);
}

// Larger finite numbers have a meaning, such as -FLT_MAX for a row without keys, and must be equal.
constexpr double kOrdinary = 1e30;

double difference(const Numbers& found, const Numbers& expected) {
  double most = 0, largest = 1;
  for (int64_t n = 0; n < expected.size(); ++n) {
    const double a = found[n], b = expected[n];
    if (std::fabs(a) < kOrdinary && std::fabs(b) < kOrdinary) {
      most = std::max(most, std::fabs(a - b));
      largest = std::max(largest, std::fabs(b));
    } else if (!(std::isnan(a) && std::isnan(b)) && a != b) {
      return INFINITY;
    }
  }
  return most / largest;
}

// float32: a score of size x is off by x 2^-24 for each rounding, and its exponential by that factor. The scores of slopes have
// sizes up to about 150 and two roundings. 16 bits: a rounding of the result, and with pairs of bfloat16 one of each probability.
double allowed(Type type) { return type == Type::float32 ? 2e-5 : type == Type::float16 ? 0x1p-10 : 0x1p-7; }

void Report::see(const std::string& problem, double difference, double most) {
  const bool small = difference <= most;
  good_ = good_ && small;
  if (small && only_faults) return;
  std::printf("%s: %.1e%s\n", problem.c_str(), difference, small ? "" : "  TOO LARGE");
}

}  // namespace fa::check

// check_kernels [COUNT [SEED]]: checks the listed problems, then COUNT rounds of one random problem of each kind. check_tiles does
// so for the kernels that have variants with tile registers.
int main(int argc, char** argv) {
  namespace check = fa::check;
  const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 0;
  check::Random random(argc > 2 ? static_cast<unsigned>(std::atoll(argv[2])) : 0);
  check::Report report;
  for (int64_t n = 0; n <= rounds; ++n) {
    check::Random* drawn = n == 0 ? nullptr : &random;
    report.only_faults = n != 0;
    check::check_forward(report, drawn);
    check::check_gradient(report, drawn);
#if !defined(FA_CHECKS_PAIRS)
    check::check_decode(report, drawn);
    check::check_sparse(report, drawn);
    check::check_linear(report, drawn);
#endif
    if (n % 1000 == 999) std::fprintf(stderr, "%lld problems\n", static_cast<long long>(report.problems));
  }
  std::printf("%lld problems\n", static_cast<long long>(report.problems));
  std::puts(report.good() ? "all kernels agree with the reference" : "FAILED");
  return report.good() ? 0 : 1;
}
