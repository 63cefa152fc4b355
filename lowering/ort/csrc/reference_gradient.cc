// FlashAttentionScoreGrad in plain loops: one query row at a time, scalar, with sums in double. It belongs to the
// variant "reference" of the library, with which tests compare the fast kernels.
#include <new>
#include <vector>

#include "gradient.hpp"
#include "reference.hpp"

namespace fa::reference {
namespace {

using Doubles = std::vector<double>;

// A query head of a sequence, and the sums of dK and dV of its key head.
struct Head {
  const Gradients& gradients;
  const Sequence& sequence;
  int64_t head;
  Doubles& key_sums;    // [key_length][head size + rope size]
  Doubles& value_sums;  // [key_length][value_size]

  const Problem& problem() const { return gradients.problem; }
  int64_t qk_size() const { return problem().head_size + problem().rope_size; }

  // Number d of a row of query or key. The numbers of the rope part come after those of `nope`.
  float number(const Strided& nope, int64_t at, const Strided& rope, int64_t rope_at, int64_t n, int64_t row,
               int64_t d) const {
    const bool in_rope = d >= problem().head_size;
    const Strided& of = in_rope ? rope : nope;
    const int64_t first = (in_rope ? rope_at : at) + n * of.head + row * of.row;
    return read(of.data, first + (in_rope ? d - problem().head_size : d), problem().type);
  }
  float query(int64_t i, int64_t d) const {
    return number(problem().query, sequence.query, problem().query_rope, sequence.query_rope, head, i, d);
  }
  float key(const Row& row, int64_t j, int64_t d) const {
    return number(problem().key, sequence.key, problem().key_rope, sequence.key_rope, row.key_head(), j, d);
  }

  int64_t out_row(int64_t i) const { return sequence.out + head * problem().out.head + i * problem().out.row; }
  int64_t statistic(int64_t i) const {
    return sequence.statistics + head * sequence.statistics_head + i * sequence.statistics_row;
  }

  // Adds the gradients of row i. Returns what the row adds to the gradient of the sink.
  double run(int64_t i) {
    const Row row{problem(), sequence, head, i};
    const double max = problem().softmax_max[statistic(i)];
    const double sum = problem().softmax_sum[statistic(i)];
    bool zeroed = false;
    if (problem().nan_rows == NanRows::zero) zeroed = std::isnan(sum);
    if (problem().nan_rows == NanRows::infinite) zeroed = std::isinf(max) && max < 0;
    const bool masked_have_score = !std::isinf(problem().mask_value) || problem().masked_bias;
    bool empty = !masked_have_score;
    for (int64_t j = 0; j < sequence.key_length; ++j) empty = empty && !row.attended(j);
    if (empty) {
      add_empty_row(row);
      return 0;
    }
    double delta = 0;
    for (int64_t d = 0; d < problem().value_size; ++d) {
      delta += double{read(gradients.dy, out_row(i) + d, problem().type)} *
               read(problem().out.data, out_row(i) + d, problem().type);
    }
    Doubles query_sum(static_cast<size_t>(qk_size()));
    double dot = 0;
    for (int64_t j = 0; j < sequence.key_length; ++j) {
      const bool attended = row.attended(j);
      if (!attended && !masked_have_score) continue;
      const double above = (attended ? row.score(j) : row.masked_score(j)) - max;
      // `above` is positive after other rounding, or with statistics of other scores.
      const double p = zeroed ? 0.0 : std::exp(above > 0 ? 0.0 : above) / sum;
      double dp = 0;
      for (int64_t d = 0; d < problem().value_size; ++d) {
        const double dy = read(gradients.dy, out_row(i) + d, problem().type);
        dp += dy * row.value(j, d);
        value_sums[static_cast<size_t>(j * problem().value_size + d)] += p * row.kept(j) * dy;
      }
      dp *= row.kept(j);
      dot += p * dp;
      if (!attended) continue;
      const double ds = p * (dp - delta) * row.slope(j);
      for (int64_t d = 0; d < qk_size(); ++d) {
        query_sum[static_cast<size_t>(d)] += ds * key(row, j, d);
        key_sums[static_cast<size_t>(j * qk_size() + d)] += ds * query(i, d);
      }
    }
    write_query(i, query_sum);
    return problem().sink == nullptr ? 0 : -std::exp(problem().sink[head] - max) / sum * dot;
  }

  // Adds the gradients of a row that attends no key. It adds to dV with the probabilities of the forward pass; its
  // other gradients are 0.
  void add_empty_row(const Row& row) {
    write_query(row.i, Doubles(static_cast<size_t>(qk_size())));
    const EmptyRows rule = problem().empty_rows;
    if (rule == EmptyRows::zero) return;
    const double p = rule == EmptyRows::mean ? 1.0 / static_cast<double>(sequence.key_length)
                                             : std::numeric_limits<double>::quiet_NaN();
    for (int64_t j = 0; j < sequence.key_length; ++j) {
      for (int64_t d = 0; d < problem().value_size; ++d) {
        value_sums[static_cast<size_t>(j * problem().value_size + d)] +=
            p * row.kept(j) * read(gradients.dy, out_row(row.i) + d, problem().type);
      }
    }
  }

  void write_query(int64_t i, const Doubles& sum) const {
    const Problem& p = problem();
    write_row(gradients.query, sequence.query + head * p.query.head + i * p.query.row, gradients.query_rope,
              sequence.query_rope + head * p.query_rope.head + i * p.query_rope.row, sum.data());
  }

  void write_row(void* nope, int64_t at, void* rope, int64_t rope_at, const double* sum) const {
    for (int64_t d = 0; d < qk_size(); ++d) {
      const bool in_rope = d >= problem().head_size;
      void* out = in_rope ? rope : nope;
      const auto result = static_cast<float>(sum[d] * problem().scale);
      if (out != nullptr) write(out, in_rope ? rope_at + d - problem().head_size : at + d, result, problem().type);
    }
  }

  void write_keys(int64_t key_head) const {
    const Problem& p = problem();
    for (int64_t j = 0; j < sequence.key_length; ++j) {
      write_row(gradients.key, sequence.key + key_head * p.key.head + j * p.key.row, gradients.key_rope,
                sequence.key_rope + key_head * p.key_rope.head + j * p.key_rope.row, key_sums.data() + j * qk_size());
      for (int64_t d = 0; d < p.value_size && gradients.value != nullptr; ++d) {
        write(gradients.value, sequence.value + key_head * p.value.head + j * p.value.row + d,
              static_cast<float>(value_sums[static_cast<size_t>(j * p.value_size + d)]), p.type);
      }
    }
  }
};

void run(const Gradients& gradients) {
  const Problem& problem = gradients.problem;
  const int64_t group = problem.heads / problem.key_heads;
  Doubles sinks(static_cast<size_t>(problem.heads));
  for (int64_t n = 0; n < problem.sequence_count; ++n) {
    const Sequence& sequence = problem.sequences[n];
    for (int64_t key_head = 0; key_head < problem.key_heads; ++key_head) {
      Doubles key_sums(static_cast<size_t>(sequence.key_length * (problem.head_size + problem.rope_size)));
      Doubles value_sums(static_cast<size_t>(sequence.key_length * problem.value_size));
      Head query_head{gradients, sequence, 0, key_sums, value_sums};
      for (query_head.head = key_head * group; query_head.head < (key_head + 1) * group; ++query_head.head) {
        for (int64_t i = 0; i < sequence.query_length; ++i) {
          sinks[static_cast<size_t>(query_head.head)] += query_head.run(i);
        }
      }
      query_head.write_keys(key_head);
    }
  }
  for (int64_t head = 0; head < problem.heads && gradients.sink != nullptr; ++head) {
    gradients.sink[head] = static_cast<float>(sinks[static_cast<size_t>(head)]);
  }
}

}  // namespace

Outcome gradient(const Gradients& gradients, const Runtime&) {
  try {
    run(gradients);
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  }
  return Outcome::done;
}

}  // namespace fa::reference
