// A program that compares the kernels of one instruction set, FA_CHECKED or `baseline`, with the reference. It is for
// machines, or emulators, on which the tests in Python do not run. Every operand is random, and every result begins as a
// number that no kernel writes. The program prints the largest difference of each problem.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "../variants.hpp"

namespace fa {
#if !defined(FA_CHECKED)
#define FA_CHECKED baseline
#endif
FA_DECLARE_KERNELS(FA_CHECKED)
FA_DECLARE_KERNELS(reference)
}  // namespace fa

namespace fa::check {

inline constexpr float kUnwritten = -77.0f;

#if defined(FA_CHECKS_PAIRS)  // kernels for products of pairs of bfloat16
inline constexpr bool kChecksPairs = true;
inline constexpr Type kTypes[] = {Type::bfloat16};
#else
inline constexpr bool kChecksPairs = false;
inline constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16};
#endif

const char* text_of(Type type);

// Runs tasks one after the other.
Runtime runtime(int64_t workers = 3);

using Random = std::mt19937;

// The numbers of a tensor.
class Numbers {
 public:
  Numbers(Type type, int64_t count, float value = kUnwritten);
  Numbers(Type type, int64_t count, Random& random);  // normally distributed

  void* data() { return type_ == Type::float32 ? static_cast<void*>(floats_.data()) : halves_.data(); }
  float* floats() { return floats_.data(); }
  int64_t size() const { return static_cast<int64_t>(type_ == Type::float32 ? floats_.size() : halves_.size()); }
  float operator[](int64_t n) const;

 private:
  Type type_;
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
};

// The largest difference, relative to the largest expected number if that exceeds 1. Infinite if NaN, infinities or numbers
// above 1e30 are not the same at the same places.
double difference(const Numbers& found, const Numbers& expected);

// The difference that a type allows. float32: the rounding of sums of some hundred terms. Else: one unit in the last place
// of the largest number.
double allowed(Type type);

class Report {
 public:
  // Prints one line. With only_faults it prints nothing if the difference is at most `most`; a larger one fails.
  void see(const std::string& problem, double difference, double most);
  bool good() const { return good_; }

  bool only_faults = false;
  int64_t problems = 0;  // compared so far

 private:
  bool good_ = true;
};

// One of the numbers, at random.
inline int64_t one_of(Random& random, std::initializer_list<int64_t> numbers) {
  return numbers.begin()[random() % numbers.size()];
}

// Each checks its list of forms, or, if `random` is given, one random form.
void check_forward(Report& report, Random* random);
void check_gradient(Report& report, Random* random);
void check_decode(Report& report, Random* random);
void check_sparse(Report& report, Random* random);
void check_linear(Report& report, Random* random);

}  // namespace fa::check
