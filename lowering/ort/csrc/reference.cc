// The operator written down plainly: one query row at a time, scalar, sums in double. It is compiled in
// as the variant "reference", so that every test can put the fast kernels beside it.
#include <new>
#include <vector>

#include "reference.hpp"

namespace fa::reference {
namespace {

void attend(const Row& row) {
  const Problem& problem = row.problem;
  const Sequence& sequence = row.sequence;
  std::vector<int64_t> keys;
  for (int64_t j = 0; j < sequence.key_length; ++j) {
    if (row.attended(j) || !std::isinf(problem.mask_value) || problem.masked_bias) keys.push_back(j);
  }
  const bool empty = keys.empty();
  const EmptyRows rule = problem.empty_rows;
  if (empty && (rule == EmptyRows::mean || rule == EmptyRows::unmasked)) {
    for (int64_t j = 0; j < sequence.key_length; ++j) keys.push_back(j);
  }
  std::vector<double> p(keys.size());
  const bool sink = problem.sink != nullptr;
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t n = 0; n < keys.size(); ++n) {
    p[n] = empty && rule == EmptyRows::mean ? 0 : row.attended(keys[n]) || empty ? row.score(keys[n]) : row.masked_score(keys[n]);
    max = maximum(max, p[n]);
  }
  if (sink) max = maximum(max, problem.sink[row.head]);
  for (double& x : p) {
    x = std::exp(x - max);
    sum += x;
  }
  if (sink) sum += std::exp(problem.sink[row.head] - max);
  bool zero = keys.empty();
  if (problem.nan_rows == NanRows::zero && !empty) zero = zero || std::isnan(sum);
  if (problem.nan_rows == NanRows::infinite && !empty) zero = zero || (std::isinf(max) && max < 0);
  const int64_t out = sequence.out + row.head * problem.out.head + row.i * problem.out.row;
  for (int64_t d = 0; d < problem.value_size; ++d) {
    double result = 0;
    for (size_t n = 0; n < keys.size(); ++n) {
      if (!problem.masked_values && !empty && !row.attended(keys[n])) continue;
      result += p[n] / sum * row.kept(keys[n]) * row.value(keys[n], d);
    }
    if (zero) result = 0;
    if (empty && rule == EmptyRows::nan) result = std::numeric_limits<double>::quiet_NaN();
    write(problem.out.data, out + d, static_cast<float>(result), problem.type);
  }
  const float most = std::numeric_limits<float>::max();
  const float empty_max = sink ? problem.sink[row.head] : -most;
  const float empty_sum = sink ? 1.0f : most;
  const int64_t at = sequence.statistics + row.head * sequence.statistics_head + row.i * sequence.statistics_row;
  for (int64_t c = 0; c < kStatisticsWidth; ++c) {
    if (problem.softmax_max != nullptr) problem.softmax_max[at + c] = empty ? empty_max : static_cast<float>(max);
    if (problem.softmax_sum != nullptr) problem.softmax_sum[at + c] = empty ? empty_sum : static_cast<float>(sum);
  }
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
