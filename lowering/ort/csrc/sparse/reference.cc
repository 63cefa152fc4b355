// The sparse family in plain loops: one row and head at a time, scalar, sums in double.
//
//     S_ij = scale (q_i . k_j + q_rope_i . k_rope_j);  P = softmax over the list of row i;  O = P V
//     dP = dO V^T;  dS = P (dP - rowsum(dO O));  dQ = scale dS K;  dK = scale dS^T Q;  dV = P^T dO
//     dsink = -sum_i exp(sink - max_i) / sum_i rowsum(dO O)_i
//     I_ij = sum over h of w_ih r_ihj;  r_ihj = relu(q_ih . k_j);  dw_ih = sum_j dI_ij r_ihj
//     dS_ihj = dI_ij w_ih where r_ihj > 0 (or NaN), else 0;  dq_ih = sum_j dS_ihj k_j;  dk_j = sum_ih dS_ihj q_ih
//     loss = sum_ij p (ln p - ln y), each at least 1e-8 (or another floor);  y = softmax(I);  dI = y - p
//
// p is the mean of P over attention's heads. With sinks, p is the sum of P divided by n - (sum of the sinks'
// probabilities), where n is the number of heads. If this divisor is less than kLeastLeft * n, the rounding of the
// statistics makes it inexact, and p is the sum of P normalised to 1.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../reference.hpp"
#include "problem.hpp"

namespace fa::reference {
namespace {

using sparse::Rows;
using Numbers = std::vector<double>;

// A row of query, key or value, including its rope part.
Numbers row_of(const Rows& rows, int64_t token, int64_t head) {
  const int64_t row = token * rows.heads + head;
  Numbers numbers;
  for (int64_t d = 0; d < rows.size; ++d) numbers.push_back(read(rows.plain, row * rows.size + d, rows.type));
  for (int64_t d = 0; d < rows.rope_size; ++d) numbers.push_back(read(rows.rope, row * rows.rope_size + d, rows.type));
  return numbers;
}

double dot(const Numbers& a, const Numbers& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// The gradient of a tensor. It is accumulated in double and rounded at the end.
class Sums {
 public:
  Sums(const Rows& like, int64_t tokens)
      : like_(like), numbers_(static_cast<size_t>(tokens * like.heads * like.numbers())) {}

  void add(int64_t token, int64_t head, double factor, const Numbers& numbers) {
    const size_t at = static_cast<size_t>((token * like_.heads + head) * like_.numbers());
    for (size_t d = 0; d < numbers.size(); ++d) numbers_[at + d] += factor * numbers[d];
  }

  void write_to(void* plain, void* rope) const {
    for (size_t i = 0; i < numbers_.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / like_.numbers(), d = static_cast<int64_t>(i) % like_.numbers();
      const auto number = static_cast<float>(numbers_[i]);
      if (d < like_.size && plain != nullptr) write(plain, row * like_.size + d, number, like_.type);
      if (d >= like_.size && rope != nullptr) write(rope, row * like_.rope_size + d - like_.size, number, like_.type);
    }
  }

 private:
  const Rows& like_;
  Numbers numbers_;
};

// The score is rounded to float32, as in the operators, so that softmax_max is one of the scores.
float score_of(const sparse::Attention& a, const Numbers& query, int64_t token, int64_t key_head) {
  return static_cast<float>(a.scale * dot(query, row_of(a.key, token, key_head)));
}

// Calls f(sequence, row) for every computed row.
template <class F>
void each_row(const sparse::Batch& batch, F f) {
  for (int64_t s = 0; s < batch.count; ++s) {
    for (int64_t row = 0; row < batch.sequences[s].queries; ++row) f(batch.sequences[s], row);
  }
}

// The tokens that a row of a key head selects.
std::vector<int64_t> selected(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t head) {
  const int64_t list = a.lists.heads == 1 ? 0 : head;
  std::vector<int64_t> tokens(selected_tokens(a.batch, a.lists, sequence, row, list, nullptr));
  selected_tokens(a.batch, a.lists, sequence, row, list, tokens.data());
  return tokens;
}

// The softmax of one row and head.
struct Softmax {
  std::vector<int64_t> tokens;  // of the weights
  Numbers weights;              // exp(score - max)
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  bool empty = false;  // no token is selected
};

Softmax softmax_of(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t q_head) {
  const int64_t head = q_head / a.group();
  Softmax softmax;
  softmax.tokens = selected(a, sequence, row, head);
  softmax.empty = softmax.tokens.empty();
  if (a.sinks != nullptr) softmax.max = a.sinks[q_head];
  const Numbers query = row_of(a.query, sequence.query + row, q_head);
  for (int64_t j : softmax.tokens) softmax.weights.push_back(score_of(a, query, j, head));
  for (double s : softmax.weights) softmax.max = std::isnan(s) || s > softmax.max ? s : softmax.max;
  for (double& s : softmax.weights) softmax.sum += s = std::exp(s - softmax.max);
  if (a.sinks != nullptr) softmax.sum += std::exp(a.sinks[q_head] - softmax.max);
  if (softmax.empty && sequence.keys > 0 && a.empty_rows == EmptyRows::mean) {
    for (int64_t j = 0; j < sequence.keys; ++j) softmax.tokens.push_back(key_token(a.batch, sequence, j));
    softmax.weights.assign(softmax.tokens.size(), 1.0);
    softmax.sum = static_cast<double>(softmax.tokens.size());
  }
  return softmax;
}

void write_statistics(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t q_head,
                      const Softmax& softmax) {
  double max = softmax.max, sum = softmax.sum;
  if (softmax.empty && a.sinks == nullptr) {
    max = sparse::kEmptyMax;
    sum = 0;
  } else if (softmax.empty) {
    sum = 1;
  }
  const int64_t head = q_head / a.group();
  const int64_t statistic = sequence.statistics + head * a.statistics_head + row * a.group() + q_head % a.group();
  if (a.softmax_max != nullptr) a.softmax_max[statistic] = static_cast<float>(max);
  if (a.softmax_sum != nullptr) a.softmax_sum[statistic] = static_cast<float>(sum);
}

void attend(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t q_head) {
  const int64_t head = q_head / a.group(), size = a.value.size;
  const Softmax softmax = softmax_of(a, sequence, row, q_head);
  Numbers out(static_cast<size_t>(size));
  for (size_t n = 0; n < softmax.tokens.size(); ++n) {
    const Numbers value = row_of(a.value, softmax.tokens[n], head);
    for (size_t d = 0; d < value.size(); ++d) out[d] += softmax.weights[n] / softmax.sum * value[d];
  }
  const bool nan = softmax.empty && sequence.keys > 0 && a.empty_rows == EmptyRows::nan;
  const int64_t at = ((sequence.query + row) * a.query.heads + q_head) * size;
  for (int64_t d = 0; a.out != nullptr && d < size; ++d) {
    write(a.out, at + d, nan ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(out[d]), a.query.type);
  }
  write_statistics(a, sequence, row, q_head, softmax);
}

Outcome attention_rows(const sparse::Attention& a, const Runtime&) {
  each_row(a.batch, [&](const sparse::Sequence& sequence, int64_t row) {
    for (int64_t head = 0; head < a.query.heads; ++head) attend(a, sequence, row, head);
  });
  return Outcome::done;
}

// The probability of a score in one head, computed from the given statistics.
double probability_of(double score, const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row,
                      int64_t q_head) {
  const int64_t head = q_head / a.group();
  const int64_t at = sequence.statistics + head * a.statistics_head + row * a.group() + q_head % a.group();
  return std::exp(score - a.softmax_max[at]) / a.softmax_sum[at];
}

double sink_probability(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t q_head) {
  return probability_of(a.sinks[q_head], a, sequence, row, q_head);
}

// Attention's probability of a key in one head.
double probability(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row, int64_t q_head,
                   const Numbers& query, int64_t token) {
  return probability_of(score_of(a, query, token, q_head / a.group()), a, sequence, row, q_head);
}

Outcome attention_gradient(const sparse::Gradient& g, const Runtime&) {
  const sparse::Attention& a = g.attention;
  const sparse::Sequence& last = a.batch.sequences[a.batch.count - 1];
  Sums d_query(a.query, last.query + last.queries), d_key(a.key, a.batch.key_tokens), d_value(a.value, a.batch.key_tokens);
  Numbers d_sinks(static_cast<size_t>(a.query.heads));
  each_row(a.batch, [&](const sparse::Sequence& sequence, int64_t row) {
    const int64_t token = sequence.query + row;
    for (int64_t q_head = 0; q_head < a.query.heads; ++q_head) {
      const int64_t head = q_head / a.group();
      const Numbers query = row_of(a.query, token, q_head), d_out = row_of(g.d_out, token, q_head);
      const double delta = dot(d_out, row_of(g.out, token, q_head));
      if (a.sinks != nullptr) {
        d_sinks[static_cast<size_t>(q_head)] -= sink_probability(a, sequence, row, q_head) * delta;
      }
      for (int64_t j : selected(a, sequence, row, head)) {
        const double p = probability(a, sequence, row, q_head, query, j);
        const double ds = a.scale * p * (dot(d_out, row_of(a.value, j, head)) - delta);
        d_query.add(token, q_head, ds, row_of(a.key, j, head));
        d_key.add(j, head, ds, query);
        (g.merged ? d_key : d_value).add(j, head, p, d_out);
      }
    }
  });
  d_query.write_to(g.query, g.query_rope);
  d_key.write_to(g.key, g.key_rope);
  d_value.write_to(g.value, nullptr);
  for (size_t h = 0; g.sinks != nullptr && h < d_sinks.size(); ++h) g.sinks[h] = static_cast<float>(d_sinks[h]);
  return Outcome::done;
}

Outcome select_rows(const sparse::Selection& s, const Runtime&) {
  const sparse::Index& index = s.index;
  each_row(index.batch, [&](const sparse::Sequence& sequence, int64_t row) {
    const int64_t token = sequence.query + row, visible = visible_keys(index.batch, sequence, row);
    Numbers scores(static_cast<size_t>(visible));
    for (int64_t h = 0; h < index.query.heads; ++h) {
      const Numbers query = row_of(index.query, token, h);
      const double weight = read(index.weights, token * index.query.heads + h, index.weight_type);
      for (int64_t j = 0; j < visible; ++j) {
        const double r = dot(query, row_of(index.key, key_token(index.batch, sequence, j), 0));
        scores[static_cast<size_t>(j)] += weight * (0 > r ? 0 : r);
      }
    }
    std::vector<int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    // The scores are compared in float32, as in the fast kernels.
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const float left = static_cast<float>(scores[static_cast<size_t>(a)]);
      const float right = static_cast<float>(scores[static_cast<size_t>(b)]);
      if (!std::isnan(left) && !std::isnan(right)) return left > right;
      return s.nan_first ? std::isnan(left) && !std::isnan(right) : !std::isnan(left) && std::isnan(right);
    });
    for (int64_t n = 0; n < s.count; ++n) {
      const bool used = n < visible;
      const int32_t place = used ? order[static_cast<size_t>(n)] : -1;
      const float score =
          used ? static_cast<float>(scores[static_cast<size_t>(place)]) : -std::numeric_limits<float>::infinity();
      if (s.indices != nullptr) s.indices[token * s.count + n] = place;
      if (s.values != nullptr) write(s.values, token * s.count + n, score, index.query.type);
    }
  });
  return Outcome::done;
}

// p of the listed keys (see the formulas at the beginning).
Numbers target_of(const sparse::Attention& a, const sparse::Sequence& sequence, int64_t row,
                  const std::vector<int64_t>& tokens) {
  std::vector<Numbers> logs;  // of P, for each head
  double heads = static_cast<double>(a.query.heads), max_log = -std::numeric_limits<double>::infinity();
  for (int64_t head = 0; head < a.query.heads; ++head) {
    const Numbers query = row_of(a.query, sequence.query + row, head);
    const int64_t at = sequence.statistics + row * a.query.heads + head;
    Numbers& head_logs = logs.emplace_back();
    for (int64_t token : tokens) {
      const double log_exp = double{score_of(a, query, token, 0)} - a.softmax_max[at];
      head_logs.push_back(log_exp - std::log(double{a.softmax_sum[at]}));
      max_log = maximum(max_log, head_logs.back());
    }
    if (a.sinks != nullptr) heads -= sink_probability(a, sequence, row, head);
  }
  const bool sinks_take_all = a.sinks != nullptr && heads < sparse::kLeastLeft * static_cast<double>(a.query.heads);
  Numbers p(tokens.size());
  for (const Numbers& head_logs : logs) {
    for (size_t n = 0; n < p.size(); ++n) p[n] += std::exp(head_logs[n] - (sinks_take_all ? max_log : 0.0));
  }
  const double total = sinks_take_all ? std::accumulate(p.begin(), p.end(), 0.0) : heads;
  for (double& x : p) x /= total;
  return p;
}

// Returns dI of a row's keys, and adds the row's part to the loss.
Numbers loss_gradient(const sparse::IndexGradient& g, const sparse::Sequence& sequence, int64_t row,
                    const std::vector<int64_t>& tokens, const std::vector<Numbers>& relu, const Numbers& weights,
                    double& loss) {
  Numbers y(tokens.size());
  for (size_t n = 0; n < y.size(); ++n) {
    for (size_t h = 0; h < weights.size(); ++h) y[n] += weights[h] * relu[h][n];
  }
  const double max_y = y.empty() ? 0 : *std::max_element(y.begin(), y.end());
  double sum = 0;
  for (double x : y) sum += std::exp(x - max_y);
  Numbers d_scores;
  const Numbers target = target_of(*g.attention, sequence, row, tokens);
  const double floor = g.floor, least = std::log(floor);
  for (size_t n = 0; n < y.size(); ++n) {
    const double p = target[n], log_y = y[n] - max_y - std::log(sum);
    const double q = std::max(p, floor);
    if (q != 0) loss += q * (std::log(q) - std::max(log_y, least));
    d_scores.push_back(std::exp(log_y) - p);
  }
  return d_scores;
}

Outcome index_gradient_rows(const sparse::IndexGradient& g, const Runtime&) {
  const sparse::Index& index = g.index;
  const sparse::Sequence& last = index.batch.sequences[index.batch.count - 1];
  Sums d_query(index.query, last.query + last.queries), d_key(index.key, index.batch.key_tokens);
  double loss = 0;
  each_row(index.batch, [&](const sparse::Sequence& sequence, int64_t row) {
    const int64_t token = sequence.query + row, heads = index.query.heads;
    const int64_t visible = visible_keys(index.batch, sequence, row);
    const int64_t used = index.batch.causal ? std::min(g.lists.count, visible) : g.lists.count;
    std::vector<int64_t> tokens;
    for (int64_t n = 0; n < used; ++n) {
      tokens.push_back(key_token(index.batch, sequence, g.lists.entries[token * g.lists.count + n]));
    }
    Numbers weights;
    std::vector<Numbers> relu(static_cast<size_t>(heads));
    for (int64_t h = 0; h < heads; ++h) {
      weights.push_back(read(index.weights, token * heads + h, index.weight_type));
      const Numbers query = row_of(index.query, token, h);
      for (int64_t j : tokens) relu[static_cast<size_t>(h)].push_back(std::max(dot(query, row_of(index.key, j, 0)), 0.0));
    }
    Numbers d_scores;
    if (g.attention != nullptr) {
      d_scores = loss_gradient(g, sequence, row, tokens, relu, weights, loss);
    } else {
      for (int64_t n = 0; n < used; ++n) d_scores.push_back(read(g.scores, token * g.lists.count + n, index.query.type));
    }
    for (int64_t h = 0; h < heads; ++h) {
      const Numbers& r = relu[static_cast<size_t>(h)];
      const Numbers query = row_of(index.query, token, h);
      for (size_t n = 0; n < tokens.size(); ++n) {
        const double ds = r[n] <= 0 ? 0 : d_scores[n] * weights[static_cast<size_t>(h)];
        d_query.add(token, h, ds, row_of(index.key, tokens[n], 0));
        d_key.add(tokens[n], 0, ds, query);
      }
      if (g.weights != nullptr) write(g.weights, token * heads + h, static_cast<float>(dot(d_scores, r)), index.weight_type);
    }
  });
  d_query.write_to(g.query, nullptr);
  d_key.write_to(g.key, nullptr);
  if (g.loss != nullptr) *g.loss = static_cast<float>(loss);
  return Outcome::done;
}

}  // namespace

extern const sparse::Kernels sparse_kernels;
const sparse::Kernels sparse_kernels = {attention_rows, attention_gradient, select_rows, index_gradient_rows};

}  // namespace fa::reference
