#include <algorithm>
#include <memory>
#include <numeric>

#include "../reference.hpp"
#include "../sparse/problem.hpp"
#include "check.hpp"

namespace fa::check {
namespace {

using sparse::Rows;

struct Form {
  int64_t heads, key_heads, queries, keys;  // of each of two sequences; the second has half of the keys
  int64_t size, rope, value_size;
  int64_t count, block;  // of the lists
  bool paged = false, sinks = false, lists_of_heads = false;
  unsigned seed = 7;  // of the numbers
};

std::string text_of(const Form& form, Type type) {
  return std::string(check::text_of(type)) + ", " + std::to_string(form.heads) + " heads over " +
         std::to_string(form.key_heads) + ", " + std::to_string(form.queries) + " x " + std::to_string(form.keys) +
         ", sizes " + std::to_string(form.size) + " + " + std::to_string(form.rope) + " and " +
         std::to_string(form.value_size) + ", " + std::to_string(form.count) + " blocks of " + std::to_string(form.block) +
         (form.paged ? ", paged" : "") + (form.sinks ? ", sinks" : "") + (form.lists_of_heads ? ", a list a head" : "");
}

constexpr int64_t kPage = 16;
constexpr int64_t kSequences = 2;

// The operands of all four kernels.
class Problem {
 public:
  Problem(const Form& form, Type type)
      : form_(form), type_(type), tokens_(kSequences * form.queries), room_((form.keys + kPage - 1) / kPage * kPage),
        key_tokens_(kSequences * room_), random_(form.seed) {
    add_batch();
    add_lists();
    a_.batch = batch_;
    a_.lists = lists_;
    a_.query = rows(tokens_, form.heads, form.size, form.rope, type);
    a_.key = rows(key_tokens_, form.key_heads, form.size, form.rope, type);
    a_.value = rows(key_tokens_, form.key_heads, form.value_size, 0, type);
    a_.scale = 1 / std::sqrt(static_cast<float>(form.size + form.rope));
    if (form.sinks) a_.sinks = keep(Type::float32, form.heads).floats();
    a_.statistics_head = form.queries * form.heads / form.key_heads;
    index_.batch = batch_;
    index_.query = quarters(rows(tokens_, form.heads, form.size, 0, type));
    index_.key = quarters(rows(key_tokens_, 1, form.size, 0, type));
    index_.weight_type = type;
    index_.weights = keep(type, tokens_ * form.heads).data();
    scores_ = keep(type, tokens_ * form.count).data();
    d_out_ = rows(tokens_, form.heads, form.value_size, 0, type);
  }
  Problem(const Problem&) = delete;

  // attention_out, and softmax_max and softmax_sum, which are float32.
  std::vector<Numbers> attention(const sparse::Kernels& kernels) {
    std::vector<Numbers> results = {{type_, tokens_ * form_.heads * form_.value_size},
                                    {Type::float32, tokens_ * form_.heads},
                                    {Type::float32, tokens_ * form_.heads}};
    sparse::Attention a = a_;
    a.out = results[0].data();
    a.softmax_max = results[1].floats();
    a.softmax_sum = results[2].floats();
    return run(kernels.attention, a, results);
  }

  // The gradients of query, key, value and the rope parts, given the results of `attention`.
  std::vector<Numbers> gradient(const sparse::Kernels& kernels, std::vector<Numbers>& forward) {
    std::vector<Numbers> results = {{type_, tokens_ * form_.heads * form_.size},
                                    {type_, key_tokens_ * form_.key_heads * form_.size},
                                    {type_, key_tokens_ * form_.key_heads * form_.value_size},
                                    {type_, tokens_ * form_.heads * form_.rope},
                                    {type_, key_tokens_ * form_.key_heads * form_.rope}};
    sparse::Gradient g;
    g.attention = a_;
    g.attention.softmax_max = forward[1].floats();
    g.attention.softmax_sum = forward[2].floats();
    g.d_out = g.out = d_out_;
    g.out.plain = forward[0].data();
    g.query = results[0].data();
    g.key = results[1].data();
    g.value = results[2].data();
    if (form_.rope != 0) {
      g.query_rope = results[3].data();
      g.key_rope = results[4].data();
    }
    return run(kernels.gradient, g, results);
  }

  // The scores of the best keys as numbers; `indices` are these keys.
  std::vector<Numbers> select(const sparse::Kernels& kernels, std::vector<int32_t>& indices) {
    std::vector<Numbers> results = {{type_, tokens_ * form_.count}};
    indices.assign(static_cast<size_t>(tokens_ * form_.count), -77);
    sparse::Selection s;
    s.index = index_;
    s.count = form_.count;
    s.indices = indices.data();
    s.values = results[0].data();
    return run(kernels.select, s, results);
  }

  // The gradients of query, key and weights, and the loss: by the statistics of `forward` if it is given, else by given
  // gradients of the scores.
  std::vector<Numbers> index_gradient(const sparse::Kernels& kernels, std::vector<Numbers>* forward) {
    std::vector<Numbers> results = {{type_, tokens_ * form_.heads * form_.size},
                                    {type_, key_tokens_ * form_.size},
                                    {type_, tokens_ * form_.heads},
                                    {Type::float32, 1, 0.0f}};
    sparse::Attention a = a_;
    sparse::IndexGradient g;
    g.index = index_;
    g.lists = index_lists_;
    g.scores = scores_;
    if (forward != nullptr) {
      a.softmax_max = (*forward)[1].floats();
      a.softmax_sum = (*forward)[2].floats();
      g.attention = &a;
      g.loss = results[3].floats();
    }
    g.query = results[0].data();
    g.key = results[1].data();
    g.weights = results[2].data();
    return run(kernels.index_gradient, g, results);
  }

 private:
  template <class Of>
  static std::vector<Numbers> run(Outcome (*kernel)(const Of&, const Runtime&), const Of& of,
                                  std::vector<Numbers>& results) {
    if (kernel(of, runtime()) != Outcome::done) results.clear();
    return results;
  }

  Numbers& keep(Type type, int64_t count) {
    numbers_.push_back(std::make_unique<Numbers>(type, count, random_));
    return *numbers_.back();
  }

  Rows rows(int64_t tokens, int64_t heads, int64_t size, int64_t rope_size, Type type) {
    Rows rows;
    rows.plain = keep(type, tokens * heads * size).data();
    if (rope_size != 0) rows.rope = keep(type, tokens * heads * rope_size).data();
    rows.size = size;
    rows.rope_size = rope_size;
    rows.heads = heads;
    rows.type = type;
    return rows;
  }

  // Rounds to multiples of a quarter. Sums of their products are exact, so that a score of 0 is 0 in both kernels, and its
  // gradient too.
  Rows quarters(const Rows& rows) {
    Numbers& all = *numbers_.back();
    for (int64_t n = 0; n < all.size(); ++n) reference::write(all.data(), n, std::round(all[n] * 4) / 4, rows.type);
    return rows;
  }

  void add_batch() {
    pages_.resize(static_cast<size_t>(key_tokens_ / kPage));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), random_);
    for (int64_t n = 0; n < kSequences; ++n) {
      sparse::Sequence sequence;
      sequence.query = sequence.first_row = n * form_.queries;
      sequence.queries = form_.queries;
      sequence.key = n * room_;
      sequence.keys = n == 0 ? form_.keys : form_.keys / 2;
      if (form_.paged) sequence.pages = pages_.data() + n * (room_ / kPage);
      sequence.statistics = n * form_.queries * form_.heads;
      sequences_.push_back(sequence);
    }
    batch_ = {sequences_.data(), kSequences, tokens_, key_tokens_, form_.paged ? kPage : 1, true};
  }

  // Each list names different blocks in any order. Some of attention's lists end early.
  void add_lists() {
    const int64_t heads = form_.lists_of_heads ? form_.key_heads : 1;
    for (int64_t token = 0; token < tokens_; ++token) {
      const sparse::Sequence& sequence = sequences_[static_cast<size_t>(token / form_.queries)];
      for (int64_t head = 0; head < heads; ++head) add_list(entries_, sequence.keys / form_.block, token % 5 == 4);
      add_list(index_entries_, visible_keys(batch_, sequence, token % form_.queries), false);
    }
    lists_ = {entries_.data(), heads, form_.count, form_.block, false, form_.count * form_.block};
    index_lists_ = {index_entries_.data(), 1, form_.count, 1, false, form_.count};
  }

  void add_list(std::vector<int32_t>& entries, int64_t blocks, bool ends_early) {
    std::vector<int32_t> all(static_cast<size_t>(blocks));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(static_cast<size_t>(form_.count), -1);
    if (ends_early) std::fill(all.begin() + form_.count / 2, all.end(), -1);
    entries.insert(entries.end(), all.begin(), all.end());
  }

  Form form_;
  Type type_;
  int64_t tokens_, room_, key_tokens_;
  Random random_;
  std::vector<std::unique_ptr<Numbers>> numbers_;
  std::vector<int32_t> pages_, entries_, index_entries_;
  std::vector<sparse::Sequence> sequences_;
  sparse::Batch batch_;
  sparse::Lists lists_, index_lists_;
  sparse::Attention a_;
  sparse::Index index_;
  Rows d_out_;
  const void* scores_;  // gradients of the index scores
};

void compare(Report& report, const std::string& what, const std::vector<const char*>& names,
             const std::vector<Numbers>& found, const std::vector<Numbers>& expected, Type type) {
  if (found.empty()) return report.see(what, INFINITY, 0);
  for (size_t n = 0; n < found.size(); ++n) {
    if (found[n].size() == 0) continue;
    report.see(what + ": " + names[n], difference(found[n], expected[n]), allowed(type));
  }
}

// The number of keys that differ although their scores are not close. Both lists have the scores of `expected`.
int64_t wrong_keys(const std::vector<int32_t>& found, const std::vector<int32_t>& keys, const Numbers& scores, int64_t count,
                   double close) {
  int64_t wrong = 0;
  for (size_t n = 0; n < keys.size(); ++n) {
    if (found[n] == keys[n]) continue;
    const size_t first = n / static_cast<size_t>(count) * static_cast<size_t>(count);
    const auto row = keys.begin() + static_cast<int64_t>(first);
    const int64_t other = std::min<int64_t>(std::find(row, row + count, found[n]) - row, count - 1);
    const double a = scores[static_cast<int64_t>(n)], b = scores[static_cast<int64_t>(first) + other];
    wrong += !(std::fabs(a - b) <= close * std::max(1.0, std::fabs(a)));
  }
  return wrong;
}

Form drawn_form(Random& random) {
  Form form;
  form.key_heads = one_of(random, {1, 1, 2});
  form.heads = form.key_heads * one_of(random, {1, 2, 3, 8, 12});
  form.queries = one_of(random, {1, 3, 9, 19});
  form.keys = form.queries + one_of(random, {2, 30, 70, 130, 380});
  form.size = one_of(random, {4, 16, 20, 32, 48, 64});
  form.rope = one_of(random, {0, 0, 8, 16});
  form.value_size = one_of(random, {form.size, form.size, 12});
  form.block = one_of(random, {1, 1, 2, 4});
  form.count = one_of(random, {1, 5, 21, 64, 200});
  form.paged = random() % 3 == 0;
  form.sinks = random() % 3 == 0;
  form.lists_of_heads = random() % 3 == 0;
  form.seed = static_cast<unsigned>(random());
  return form;
}

}  // namespace

void check_sparse(Report& report, Random* random) {
  const std::vector<Form> listed = {
      {4, 1, 9, 70, 32, 0, 32, 21, 1},
      {8, 1, 5, 130, 48, 16, 48, 64, 1, true},
      {6, 2, 7, 90, 20, 0, 12, 11, 4, false, true, true},
      {12, 1, 19, 400, 64, 8, 64, 200, 1},
      {3, 1, 5, 4600, 16, 0, 16, 100, 1},  // keys of several ranges
      {3, 1, 5, 9000, 16, 0, 16, 5, 1},    // few keys of each
  };
  const std::vector<Form> forms = random == nullptr ? listed : std::vector{drawn_form(*random)};
  for (Type type : {Type::float32, Type::float16, Type::bfloat16}) {
    for (const Form& form : forms) {
      report.problems += 5;
      Problem problem(form, type);
      const sparse::Kernels &fast = baseline::sparse_kernels, &plain = reference::sparse_kernels;
      const std::string what = text_of(form, type);
      std::vector<Numbers> forward = problem.attention(plain);
      compare(report, "sparse " + what, {"attention_out", "softmax_max", "softmax_sum"}, problem.attention(fast), forward,
              type);
      compare(report, "sparse gradient " + what, {"query", "key", "value", "query_rope", "key_rope"},
              problem.gradient(fast, forward), problem.gradient(plain, forward), type);
      std::vector<int32_t> found, keys;
      const std::vector<Numbers> scores = problem.select(fast, found), expected = problem.select(plain, keys);
      compare(report, "indexer " + what, {"scores"}, scores, expected, type);
      report.see("indexer " + what + ": wrong keys", double(wrong_keys(found, keys, expected[0], form.count, allowed(type))),
                 0);
      const std::vector<const char*> names = {"query", "key", "weights", "loss"};
      compare(report, "indexer gradient " + what, names, problem.index_gradient(fast, nullptr),
              problem.index_gradient(plain, nullptr), type);
      if (form.sinks) continue;  // the loss has no sinks
      compare(report, "indexer loss " + what, names, problem.index_gradient(fast, &forward),
              problem.index_gradient(plain, &forward), type);
    }
  }
}

}  // namespace fa::check
