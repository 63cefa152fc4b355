#include "attention.hpp"

namespace fa::check {

std::string text_of(const Form& form) {
  static constexpr const char* kNames[] = {"causal", "mask", "bias", "slopes", "rope", "sink", "dropout", "packed", "mean",
                                           "mask value", "masked bias", "soft cap"};
  std::string text = std::to_string(form.heads) + " heads over " + std::to_string(form.key_heads) + ", " +
                     std::to_string(form.queries) + " x " + std::to_string(form.keys) + ", sizes " +
                     std::to_string(form.size) + " and " + std::to_string(form.value_size);
  for (size_t n = 0; n < std::size(kNames); ++n) {
    if (form.features >> n & 1) text += std::string(", ") + kNames[n];
  }
  return text;
}

Form drawn_form(Random& random) {
  Form form;
  form.key_heads = one_of(random, {1, 1, 2, 3});
  form.heads = form.key_heads * one_of(random, {1, 1, 2, 4});
  form.queries = one_of(random, {1, 1, 2, 5, 17, 33, 40, 64, 70});
  form.keys = one_of(random, {1, 2, 7, 16, 29, 33, 64, 70, 130, 300});
  form.size = one_of(random, {1, 5, 8, 16, 24, 33, 64, 80});
  form.value_size = random() % 4 == 0 ? one_of(random, {1, 3, 16, 40}) : form.size;
  form.features = static_cast<unsigned>(random() & random()) & (2 * kSoftcap - 1);
  if (form.has(kBias)) form.features &= ~kSlopes;
  if (!form.has(kMask) && !form.has(kCausal)) form.features &= ~kMaskValue;
  if (form.has(kSink) || form.has(kMaskValue)) form.features &= ~kMean;  // no row is empty
  if (!form.has(kMaskValue) || !form.has(kBias)) form.features &= ~kMaskedBias;
  form.seed = static_cast<unsigned>(random());
  return form;
}

AttentionProblem::AttentionProblem(const Form& form, Type type) : random(form.seed) {
  const int64_t count = form.has(kPacked) ? 2 : 1;
  rows = form.heads * form.queries * count;
  key_rows = form.key_heads * form.keys * count;
  problem.type = type;
  problem.heads = form.heads;
  problem.key_heads = form.key_heads;
  problem.head_size = form.size;
  problem.value_size = form.value_size;
  problem.scale = 1 / std::sqrt(static_cast<float>(form.size));
  add_sequences(form);
  const auto operand = [&](int64_t heads, int64_t all, int64_t size) {
    void* data = keep(type, all * size).data();
    return form.has(kPacked) ? Strided{data, size, heads * size} : Strided{data, all / heads * size, size};
  };
  problem.query = operand(form.heads, rows, form.size);
  problem.key = operand(form.key_heads, key_rows, form.size);
  problem.value = operand(form.key_heads, key_rows, form.value_size);
  problem.out = operand(form.heads, rows, form.value_size);
  if (form.has(kRope)) {
    problem.rope_size = 12;
    problem.query_rope = operand(form.heads, rows, problem.rope_size);
    problem.key_rope = operand(form.key_heads, key_rows, problem.rope_size);
  }
  add_terms(form);
}

void AttentionProblem::add_sequences(const Form& form) {
  for (int64_t n = 0; n < (form.has(kPacked) ? 2 : 1); ++n) {
    Sequence sequence;
    sequence.query_length = form.queries;
    sequence.key_length = form.keys;
    sequence.query = n * form.queries * form.heads * form.size;
    sequence.key = n * form.keys * form.key_heads * form.size;
    sequence.value = n * form.keys * form.key_heads * form.value_size;
    sequence.out = n * form.queries * form.heads * form.value_size;
    sequence.drop = n * form.heads * form.queries * form.keys;
    sequence.statistics = n * form.heads * form.queries * kStatisticsWidth;
    sequence.statistics_head = form.queries * kStatisticsWidth;
    sequence.statistics_row = kStatisticsWidth;
    sequence.pse_head = form.queries * form.keys;
    sequence.pse_row = form.keys;
    if (form.has(kCausal)) sequence.band_last = form.keys - form.queries;
    sequences_.push_back(sequence);
  }
  problem.sequences = sequences_.data();
  problem.sequence_count = static_cast<int64_t>(sequences_.size());
}

void AttentionProblem::add_terms(const Form& form) {
  const int64_t cells = form.heads * form.queries * form.keys;
  if (form.has(kMask)) {
    for (int64_t n = 0; n < cells; ++n) mask_.push_back(n < form.keys || random() % 4 == 0);
    problem.mask = mask_.data();
    problem.mask_head = form.queries * form.keys;
    problem.mask_row = form.keys;
    problem.mask_column = 1;
  }
  if (form.has(kBias)) {
    problem.pse = keep(problem.type, cells).data();
    problem.pse_type = problem.type;
    problem.pse_column = 1;
  }
  if (form.has(kSlopes)) problem.slopes = keep(Type::float32, form.heads).floats();
  if (form.has(kSink)) problem.sink = keep(Type::float32, form.heads).floats();
  if (form.has(kDropout)) {
    for (int64_t n = 0; n < problem.sequence_count * cells / 8 + 1; ++n) drop_mask_.push_back(random() & 255);
    problem.drop_mask = drop_mask_.data();
    problem.keep_prob = 0.5f;
  }
  if (form.has(kMean)) problem.empty_rows = EmptyRows::mean;
  if (form.has(kMaskValue)) problem.mask_value = -1.5f;
  problem.masked_bias = form.has(kMaskedBias);
  if (form.has(kSoftcap)) problem.softcap = 1.5f;
}

Numbers& AttentionProblem::keep(Type type, int64_t count) {
  numbers_.push_back(std::make_unique<Numbers>(type, count, random));
  return *numbers_.back();
}

Forward::Forward(AttentionProblem& of, Attention attention)
    : out(of.problem.type, of.rows * of.problem.value_size), max(Type::float32, of.rows * kStatisticsWidth),
      sum(Type::float32, of.rows * kStatisticsWidth) {
  of.problem.out.data = out.data();
  of.problem.softmax_max = max.floats();
  of.problem.softmax_sum = sum.floats();
  if (attention(of.problem, runtime()) != Outcome::done) out = Numbers(of.problem.type, out.size(), NAN);
}

}  // namespace fa::check
