// FlashAttentionScore in plain loops: one query row at a time, scalar, with sums in double. It is the variant
// "reference" of the library, with which tests compare the fast kernels.
#include <new>
#include <vector>

#include "reference.hpp"

namespace fa::reference {
namespace {

// The softmax of one row over the keys that have a score. A masked key has one if mask_value is finite or the bias is
// added.
struct Softmax {
  explicit Softmax(const Row& row) {
    const Problem& problem = row.problem;
    const int64_t length = row.sequence.key_length;
    for (int64_t j = 0; j < length; ++j) {
      if (row.attended(j) || !std::isinf(problem.mask_value) || problem.masked_bias) keys.push_back(j);
    }
    empty = keys.empty();
    const bool mean = empty && problem.empty_rows == EmptyRows::mean;
    if (mean || (empty && problem.empty_rows == EmptyRows::unmasked)) {
      for (int64_t j = 0; j < length; ++j) keys.push_back(j);
    }
    const double sink = problem.sink == nullptr ? -std::numeric_limits<double>::infinity() : problem.sink[row.head];
    for (int64_t j : keys) {
      weights.push_back(mean ? 0 : row.attended(j) || empty ? row.score(j) : row.masked_score(j));
      max = maximum(max, weights.back());
    }
    if (problem.sink != nullptr) max = maximum(max, sink);
    for (double& x : weights) {
      x = std::exp(x - max);
      sum += x;
    }
    if (problem.sink != nullptr) sum += std::exp(sink - max);
  }

  // Whether the result is 0: there is no key, or cpu_nan_rows says so.
  bool gives_zero(NanRows rule) const {
    if (keys.empty()) return true;
    if (empty || rule == NanRows::nan) return false;
    return rule == NanRows::zero ? std::isnan(sum) : std::isinf(max) && max < 0;
  }

  std::vector<int64_t> keys;
  std::vector<double> weights;  // exp(score - max)
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  bool empty = false;  // the row attends no key
};

void write_statistics(const Row& row, const Softmax& softmax) {
  const Problem& problem = row.problem;
  const Sequence& sequence = row.sequence;
  const float most = std::numeric_limits<float>::max();
  const float empty_max = problem.sink != nullptr ? problem.sink[row.head] : -most;
  const float empty_sum = problem.sink != nullptr ? 1.0f : most;
  const float max = softmax.empty ? empty_max : static_cast<float>(softmax.max);
  const float sum = softmax.empty ? empty_sum : static_cast<float>(softmax.sum);
  const int64_t at = sequence.statistics + row.head * sequence.statistics_head + row.i * sequence.statistics_row;
  for (int64_t c = 0; c < kStatisticsWidth; ++c) {
    if (problem.softmax_max != nullptr) problem.softmax_max[at + c] = max;
    if (problem.softmax_sum != nullptr) problem.softmax_sum[at + c] = sum;
  }
}

void attend(const Row& row) {
  const Problem& problem = row.problem;
  const Softmax softmax(row);
  const bool zero = softmax.gives_zero(problem.nan_rows);
  // A masked key whose weight is 0 in float32, without subnormal numbers, is not read.
  const double least = std::isnan(softmax.sum) ? 0 : std::numeric_limits<float>::min();
  const bool nan = softmax.empty && problem.empty_rows == EmptyRows::nan;
  const int64_t out = row.sequence.out + row.head * problem.out.head + row.i * problem.out.row;
  for (int64_t d = 0; d < problem.value_size; ++d) {
    double result = 0;
    for (size_t n = 0; n < softmax.keys.size(); ++n) {
      const int64_t j = softmax.keys[n];
      const bool masked = !softmax.empty && !row.attended(j);
      if (masked && (!problem.masked_values || zero || softmax.weights[n] < least)) continue;
      result += (zero ? 0 : softmax.weights[n] / softmax.sum * row.kept(j)) * row.value(j, d);
    }
    if (nan) result = std::numeric_limits<double>::quiet_NaN();
    write(problem.out.data, out + d, static_cast<float>(result), problem.type);
  }
  write_statistics(row, softmax);
}

}  // namespace

Outcome attention(const Problem& problem, const Runtime&) {
  try {
    for (int64_t s = 0; s < problem.sequence_count; ++s) {
      const Sequence& sequence = problem.sequences[s];
      for (int64_t head = 0; head < problem.heads; ++head) {
        for (int64_t i = 0; i < sequence.query_length; ++i) attend(Row{problem, sequence, head, i});
      }
    }
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  }
  return Outcome::done;
}

}  // namespace fa::reference
