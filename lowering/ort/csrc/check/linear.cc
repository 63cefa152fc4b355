#include "../linear.hpp"

#include <algorithm>
#include <memory>

#include "../reference.hpp"
#include "check.hpp"

namespace fa::check {
namespace {

using linear::Correction;
using linear::Gate;

// The log decays of a problem. With `mixed` some tokens decay little and others by e^-80.
enum class Decays { zero, one, eighty, mixed, infinite, growing };

struct Form {
  Gate gate = Gate::head;
  Correction correction = Correction::delta;
  int64_t heads = 2, query_heads = 2, key_heads = 2, key_size = 32, value_size = 32;
  std::vector<int64_t> tokens = {70};  // of each sequence
  Decays decays = Decays::mixed;
  float beta = -1;  // -1: random numbers from 0 to 1
  bool value_major = false, in_place = false, heads_first = false, past = true, present = true, out = true;
  bool one_entry = false;  // all sequences continue one state
  bool reads_before_decay = false;  // with Correction::general
  int64_t specials = 0;    // NaN and infinities among the operands
  Type type = Type::float32, state_type = Type::float32;
  unsigned seed = 7;
};

std::string text_of(const Form& form) {
  const char* gates[] = {"no gate", "gate of heads", "gate of keys"};
  const char* corrections[] = {"no correction", "delta rule", "general correction"};
  const char* decays[] = {"0", "-1", "-80", "mixed", "-inf", "positive"};
  std::string text = std::string("linear ") + check::text_of(form.type) + ", states " + check::text_of(form.state_type) + ", " +
                     gates[static_cast<int>(form.gate)] + ", " + corrections[static_cast<int>(form.correction)] + ", heads " +
                     std::to_string(form.heads) + " " + std::to_string(form.query_heads) + " " +
                     std::to_string(form.key_heads) + ", sizes " + std::to_string(form.key_size) + " " +
                     std::to_string(form.value_size) + ", tokens";
  for (int64_t tokens : form.tokens) text += " " + std::to_string(tokens);
  text += std::string(", decays ") + decays[static_cast<int>(form.decays)] + ", beta " + std::to_string(form.beta);
  text += std::string(form.value_major ? ", value-major" : "") + (form.in_place ? ", in place" : "") +
          (form.heads_first ? ", heads first" : "") + (form.past ? "" : ", no past") + (form.present ? "" : ", no present") +
          (form.out ? "" : ", no result") + (form.one_entry ? ", one entry" : "") + (form.reads_before_decay ? ", reads before the decay" : "");
  return text + ", " + std::to_string(form.specials) + " specials, seed " + std::to_string(form.seed);
}

class Operands {
 public:
  explicit Operands(const Form& form) : form_(form), random_(form.seed) {
    for (int64_t tokens : form.tokens) {
      const auto n = static_cast<int64_t>(sequences_.size());
      const int64_t entry = form.one_entry ? 0 : n;
      sequences_.push_back({tokens_, tokens, form.past && n % 4 != 3 ? entry : -1, entry});
      tokens_ += tokens;
    }
    p_.gate = form.gate;
    p_.correction = form.correction;
    p_.reads_before_decay = form.reads_before_decay;
    p_.heads = form.heads;
    p_.query_heads = form.query_heads;
    p_.key_heads = form.key_heads;
    p_.out_heads = std::max(form.heads, form.query_heads);
    p_.key_size = form.key_size;
    p_.value_size = form.value_size;
    p_.scale = 0.25f;
    p_.query = rows(form.query_heads, form.key_size, false, form.type);
    // With a correction no row is longer than 1, and beta is at most 2, so that the state does not grow without end.
    p_.key = rows(form.key_heads, form.key_size, form.correction != Correction::none, form.type);
    p_.value = rows(form.heads, form.value_size, false, form.type);
    if (form.gate != Gate::none) add_decays();
    if (form.correction == Correction::delta) add_betas();
    if (form.correction == Correction::general) {
      p_.write = rows(form.heads, form.key_size, true, form.type);
      p_.read = rows(form.heads, form.key_size, true, form.type);
    }
    past_numbers_ = std::make_unique<Numbers>(form.state_type, state_count(), random_);
    if (form.specials > 0) add_specials();
    p_.sequences = sequences_.data();
    p_.sequence_count = static_cast<int64_t>(sequences_.size());
  }
  Operands(const Operands&) = delete;

  // The result and the states.
  std::vector<Numbers> run(const linear::Kernels& kernels, int64_t workers) {
    std::vector<Numbers> results = {{form_.type, form_.out ? tokens_ * p_.out_heads * form_.value_size : 0},
                                    {form_.state_type, form_.present ? state_count() : 0}};
    linear::Problem p = p_;
    if (form_.out) {
      p.out = layout(p_.out_heads, form_.value_size, form_.type);
      p.out.data = results[0].data();
    }
    p.past = states(form_.past ? past_numbers_->data() : nullptr);
    p.present = states(form_.present ? results[1].data() : nullptr);
    if (form_.in_place) {
      results[1] = *past_numbers_;
      p.past.data = p.present.data = results[1].data();
    }
    if (kernels.attention(p, runtime(workers)) != Outcome::done) results.clear();
    return results;
  }

 private:
  int64_t state_count() const {
    return static_cast<int64_t>(sequences_.size()) * form_.heads * form_.key_size * form_.value_size;
  }

  linear::Rows layout(int64_t heads, int64_t size, Type type) const {
    linear::Rows rows;
    rows.type = type;
    rows.token = form_.heads_first ? size : heads * size;
    rows.head = form_.heads_first ? tokens_ * size : size;
    return rows;
  }

  Numbers& keep(linear::Rows& rows, int64_t count) {
    numbers_.push_back(std::make_unique<Numbers>(rows.type, count, random_));
    rows.data = numbers_.back()->data();
    return *numbers_.back();
  }

  // Random rows, or rows of random lengths from 0.3 to 0.99.
  linear::Rows rows(int64_t heads, int64_t size, bool short_ones, Type type) {
    linear::Rows rows = layout(heads, size, type);
    Numbers& numbers = keep(rows, tokens_ * heads * size);
    for (int64_t row = 0; row < numbers.size() && short_ones; row += size) {
      double squares = 1e-9;
      for (int64_t n = row; n < row + size; ++n) squares += double{numbers[n]} * numbers[n];
      const double factor = (0.3 + static_cast<double>(random_() % 1024) / 1024 * 0.69) / std::sqrt(squares);
      for (int64_t n = row; n < row + size; ++n) {
        reference::write(numbers.data(), n, static_cast<float>(numbers[n] * factor), type);
      }
    }
    return rows;
  }

  float drawn_decay() {
    switch (form_.decays) {
      case Decays::zero: return 0;
      case Decays::one: return -1;
      case Decays::eighty: return -80;
      case Decays::infinite: return random_() % 16 == 0 ? -INFINITY : -0.1f;
      case Decays::growing: return static_cast<float>(random_() % 1000) * 1e-5f - 5e-3f;
      case Decays::mixed: break;
    }
    const int64_t kind = random_() % 16;
    const float fraction = static_cast<float>(random_() % 4096) / 4096;
    return kind == 0 ? -80 : kind < 4 ? -8 * fraction : -0.1f * fraction;
  }

  void add_decays() {
    const int64_t size = form_.gate == Gate::key ? form_.key_size : 1;
    p_.decay = layout(form_.heads, size, form_.type);
    Numbers& numbers = keep(p_.decay, tokens_ * form_.heads * size);
    for (int64_t n = 0; n < numbers.size(); ++n) reference::write(numbers.data(), n, drawn_decay(), form_.type);
  }

  void add_betas() {
    p_.beta = layout(form_.heads, 1, form_.type);
    Numbers& numbers = keep(p_.beta, tokens_ * form_.heads);
    for (int64_t n = 0; n < numbers.size(); ++n) {
      const float beta = form_.beta >= 0 ? form_.beta : static_cast<float>(random_() % 1025) / 1024;
      reference::write(numbers.data(), n, beta, form_.type);
    }
  }

  void add_specials() {
    for (int64_t n = 0; n < form_.specials; ++n) {
      const float special = std::vector<float>{NAN, INFINITY, -INFINITY}[random_() % 3];
      const size_t where = random_() % (numbers_.size() + 1);
      Numbers& numbers = where < numbers_.size() ? *numbers_[where] : *past_numbers_;
      const Type type = where < numbers_.size() ? form_.type : form_.state_type;
      if (numbers.size() > 0) reference::write(numbers.data(), random_() % numbers.size(), special, type);
    }
  }

  linear::States states(void* data) const {
    linear::States states;
    states.data = data;
    states.entry = form_.heads * form_.key_size * form_.value_size;
    states.head = form_.key_size * form_.value_size;
    states.key = form_.value_major ? 1 : form_.value_size;
    states.value = form_.value_major ? form_.key_size : 1;
    states.type = form_.state_type;
    return states;
  }

  const Form& form_;
  Random random_;
  int64_t tokens_ = 0;
  std::vector<linear::Sequence> sequences_;
  std::vector<std::unique_ptr<Numbers>> numbers_;
  std::unique_ptr<Numbers> past_numbers_;
  linear::Problem p_;
};

Type drawn_type(Random& random) { return std::vector{Type::float32, Type::float16, Type::bfloat16}[random() % 3]; }

Form drawn_form(Random& random) {
  Form form;
  form.gate = static_cast<Gate>(random() % 3);
  form.correction = static_cast<Correction>(random() % 3);
  form.key_heads = one_of(random, {1, 1, 2});
  form.query_heads = form.key_heads * one_of(random, {1, 2});
  form.heads = form.key_heads * one_of(random, {1, 1, 2, 3});
  if (form.heads < form.query_heads ? form.query_heads % form.heads : form.heads % form.query_heads) {
    form.query_heads = form.heads;
  }
  form.key_size = one_of(random, {1, 4, 16, 20, 32, 33, 64, 100, 128});
  form.value_size = one_of(random, {1, 4, 8, 12, 31, 32, 64, 65, 128});
  if (random() % 12 == 0) {  // channels: kernel/linear/channels.hpp
    form.gate = Gate::key;
    form.correction = Correction::none;
    form.value_size = form.key_heads = form.query_heads = 1;
    form.heads = one_of(random, {1, 63, 64, 65, 130});
  }
  form.tokens.clear();
  for (int64_t n = one_of(random, {1, 1, 2, 5}); n > 0; --n) {
    form.tokens.push_back(one_of(random, {0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 47, 48, 49, 63, 64, 65, 96, 97, 130, 300}));
  }
  form.decays = static_cast<Decays>(random() % 6);
  form.beta = std::vector{-1.0f, -1.0f, 0.0f, 1.0f, 2.0f}[random() % 5];
  form.value_major = random() % 2 == 0;
  form.heads_first = random() % 3 == 0;
  form.past = random() % 4 != 0;
  form.present = random() % 6 != 0;
  form.out = !form.present || random() % 8 != 0;
  form.in_place = form.past && form.present && random() % 2 == 0;
  form.one_entry = form.in_place && random() % 3 == 0;
  form.reads_before_decay = form.correction == Correction::general && random() % 2 == 0;
  // A state that decays to 0 in float32, but not in double, gives NaN instead of infinity where it meets one.
  const bool vanishes = form.beta == 0 || form.decays == Decays::one || form.decays == Decays::eighty;
  if (!vanishes && random() % 2 == 0) form.specials = one_of(random, {1, 2, 5});
  form.type = drawn_type(random);
  form.state_type = random() % 2 == 0 ? Type::float32 : form.type;
  form.seed = static_cast<unsigned>(random());
  return form;
}

struct ConvolutionForm {
  int64_t batch = 2, channels = 70, tokens = 50, width = 4;
  bool channels_last = false, silu = false, bias = true, past = true, present = true, in_place = false, out = true;
  bool specials = false, adds_input = false;
  Type type = Type::float32;
  unsigned seed = 7;
};

std::string text_of(const ConvolutionForm& form) {
  return std::string("convolution ") + check::text_of(form.type) + ", " + std::to_string(form.batch) + " x " +
         std::to_string(form.channels) + " x " + std::to_string(form.tokens) + ", width " + std::to_string(form.width) +
         (form.channels_last ? ", channels last" : "") + (form.silu ? ", silu" : "") + (form.bias ? "" : ", no bias") +
         (form.past ? "" : ", no past") + (form.present ? "" : ", no present") + (form.in_place ? ", in place" : "") +
         (form.out ? "" : ", no result") + (form.specials ? ", specials" : "") +
         (form.adds_input ? ", adds the input" : "") + ", seed " + std::to_string(form.seed);
}

ConvolutionForm drawn_convolution(Random& random) {
  ConvolutionForm form;
  form.batch = one_of(random, {1, 2, 3});
  form.channels = one_of(random, {1, 3, 8, 17, 64, 130, 300});
  form.tokens = one_of(random, {0, 1, 2, 3, 4, 8, 15, 16, 17, 33, 70, 200});
  form.width = one_of(random, {1, 2, 3, 4, 4, 5, 9, 20});
  form.channels_last = random() % 2 == 0;
  form.adds_input = form.channels_last && random() % 2 == 0;
  form.silu = random() % 2 == 0;
  form.bias = random() % 2 == 0;
  form.past = random() % 3 != 0;
  form.present = random() % 5 != 0;
  form.in_place = form.past && form.present && random() % 2 == 0;
  form.out = !form.present || random() % 6 != 0;
  form.specials = random() % 4 == 0;
  form.type = drawn_type(random);
  form.seed = static_cast<unsigned>(random());
  return form;
}

std::vector<Numbers> convolve(const ConvolutionForm& form, const linear::Kernels& kernels, int64_t workers) {
  Random random(form.seed);
  const int64_t count = form.batch * form.channels * form.tokens;
  const int64_t state_count = form.batch * form.channels * (form.width - 1);
  Numbers input(form.type, count, random), weight(form.type, form.channels * form.width, random);
  Numbers bias(form.type, form.channels, random), past(form.type, state_count, random);
  if (form.specials && count > 0) {
    reference::write(input.data(), random() % count, NAN, form.type);
    reference::write(input.data(), random() % count, -INFINITY, form.type);
    reference::write(input.data(), random() % count, INFINITY, form.type);
  }
  std::vector<Numbers> results = {{form.type, form.out ? count : 0}, {form.type, form.present ? state_count : 0}};
  linear::Convolution c;
  c.activation = form.silu ? linear::Activation::silu : linear::Activation::none;
  c.type = form.type;
  c.batch = form.batch;
  c.channels = form.channels;
  c.tokens = form.tokens;
  c.width = form.width;
  c.adds_input = form.adds_input;
  c.channels_last = form.channels_last;
  c.input = input.data();
  c.weight = weight.data();
  if (form.bias) c.bias = bias.data();
  if (form.past) c.past = past.data();
  if (form.out) c.out = results[0].data();
  if (form.in_place) results[1] = past;
  if (form.present) c.present = results[1].data();
  if (form.in_place) c.past = c.present;
  if (kernels.convolution(c, runtime(workers)) != Outcome::done) results.clear();
  return results;
}

void compare(Report& report, const std::string& what, const std::vector<Numbers>& found, const std::vector<Numbers>& expected,
             Type type, Type state_type, double tokens) {
  ++report.problems;
  if (found.empty()) return report.see(what, INFINITY, 0);
  // Each token rounds the state once.
  if (expected[0].size() > 0) {
    report.see(what + ": result", difference(found[0], expected[0]), std::max(allowed(type), tokens * 0x1p-23));
  }
  if (expected[1].size() > 0) {
    report.see(what + ": state", difference(found[1], expected[1]), std::max(allowed(state_type), tokens * 0x1p-23));
  }
}

void check_convolution(Report& report, const ConvolutionForm& form) {
  const std::vector<Numbers> expected = convolve(form, reference::linear_kernels, 1);
  compare(report, text_of(form), convolve(form, FA_CHECKED::linear_kernels, 3), expected, form.type, form.type, 0);
}

void check_attention(Report& report, const Form& form) {
  Operands operands(form);
  int64_t longest = 0;
  for (int64_t tokens : form.tokens) longest = form.one_entry ? longest + tokens : std::max(longest, tokens);
  const std::vector<Numbers> expected = operands.run(reference::linear_kernels, 1);
  const std::vector<Numbers> found = operands.run(FA_CHECKED::linear_kernels, 1);
  compare(report, text_of(form), found, expected, form.type, form.state_type, static_cast<double>(longest));
  // The panels of a state are divided among many threads.
  const std::vector<Numbers> divided = operands.run(FA_CHECKED::linear_kernels, 64);
  if (found.empty() || divided.empty()) return report.see(text_of(form), INFINITY, 0);
  for (size_t n = 0; n < 2; ++n) {
    if (found[n].size() > 0) report.see(text_of(form) + ": 64 threads", difference(divided[n], found[n]), 0);
  }
}

}  // namespace

void check_linear(Report& report, Random* random) {
  if (random != nullptr) {
    check_attention(report, drawn_form(*random));
    return check_convolution(report, drawn_convolution(*random));
  }
  for (Gate gate : {Gate::none, Gate::head, Gate::key}) {
    for (Correction correction : {Correction::none, Correction::delta, Correction::general}) {
      Form form;
      form.gate = gate;
      form.correction = correction;
      form.key_size = form.value_size = 48;
      form.tokens = {200, 0, 1, 8};
      check_attention(report, form);
      form.specials = 3;
      form.value_major = form.in_place = true;
      form.reads_before_decay = correction == Correction::general;
      check_attention(report, form);
    }
  }
  for (bool channels_last : {false, true}) {
    ConvolutionForm form;
    form.channels_last = channels_last;
    form.silu = true;
    form.adds_input = channels_last;
    check_convolution(report, form);
    form.tokens = 1;
    form.in_place = true;
    check_convolution(report, form);
  }
}

}  // namespace fa::check
