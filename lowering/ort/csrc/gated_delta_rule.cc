// ChunkGatedDeltaRule and RecurrentGatedDeltaRule. Both are the delta rule of linear.hpp for packed tokens, with the states
// [Dv,Dk]; the second one also keeps the state of each token.
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace {

namespace chunks = chunk_gated_delta_rule;
namespace steps = recurrent_gated_delta_rule;

// The inputs that both operators have, at the same places.
constexpr size_t kQuery = steps::input_query, kKey = steps::input_key, kValue = steps::input_value;
constexpr size_t kBeta = steps::input_beta, kState = steps::input_state, kLengths = steps::input_actual_seq_lengths;
static_assert(kQuery == size_t{chunks::input_query} && kKey == size_t{chunks::input_key});
static_assert(kValue == size_t{chunks::input_value} && kBeta == size_t{chunks::input_beta});
static_assert(kState == size_t{chunks::input_initial_state} && kLengths == size_t{chunks::input_actual_seq_lengths});

// In what the operators differ.
struct DeltaRuleKind {
  const char* const* inputs;
  Rule shapes, limits, lengths;
  int64_t most_heads, most_width, most_tokens;
};
constexpr DeltaRuleKind kChunks{chunks::kInputs, chunks::rule::shapes, chunks::rule::limits, chunks::rule::lengths,
                                64, 128, kAny};
constexpr DeltaRuleKind kSteps{steps::kInputs, steps::rule::shapes, steps::rule::limits, steps::rule::lengths,
                               256, 512, 8};

class GatedDeltaRule : public OpKernel {
 protected:
  using Inputs = std::vector<Tensor>;

  GatedDeltaRule(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const DeltaRuleKind& kind, float scale)
      : api_(api), node_(node.title()), resources_(api, info), variant_(chosen_variant()), kind_(kind), scale_(scale) {}

  [[noreturn]] void fail(Rule rule, const std::string& text) const { refuse(node_, rule, text); }
  void check_shape(const Inputs& inputs, size_t input, const Dims& expected) const;
  linear::Problem problem_of(const Inputs& inputs) const;
  void check_lengths(const Inputs& inputs) const;
  linear::States states_of(void* data, const linear::Problem& problem, Type type) const;
  void run(linear::Problem& problem, const std::vector<linear::Sequence>& sequences, CallRuntime& runtime) const;

  ort::Api api_;
  std::string node_;
  NodeResources resources_;

 private:
  void check_limits(const linear::Problem& problem, const Inputs& inputs) const;

  const Variant& variant_;
  const DeltaRuleKind& kind_;
  float scale_;
};

void GatedDeltaRule::check_shape(const Inputs& inputs, size_t input, const Dims& expected) const {
  fa::check_shape(node_, kind_.shapes, kind_.inputs[input], inputs[input], expected);
}

// The problem without its results, states and sequences.
linear::Problem GatedDeltaRule::problem_of(const Inputs& inputs) const {
  const Tensor &query = inputs[kQuery], &key = inputs[kKey], &value = inputs[kValue], &beta = inputs[kBeta];
  for (size_t input : {kQuery, kValue, kState}) {
    const size_t rank = input == kState ? 4 : 3;
    if (inputs[input].rank() == rank) continue;
    fail(kind_.shapes, std::string("input ") + kind_.inputs[input] + " has rank " + std::to_string(inputs[input].rank()) +
                           ", expected " + std::to_string(rank));
  }
  const int64_t tokens = query.dims[0];
  linear::Problem p;
  p.correction = linear::Correction::delta;
  p.query_heads = p.key_heads = query.dims[1];
  p.heads = p.out_heads = value.dims[1];
  p.key_size = query.dims[2];
  p.value_size = value.dims[2];
  p.scale = scale_;
  check_shape(inputs, kKey, {tokens, p.key_heads, p.key_size});
  check_shape(inputs, kValue, {tokens, p.heads, p.value_size});
  check_shape(inputs, kBeta, {tokens, p.heads});
  check_shape(inputs, kState, {inputs[kState].dims[0], p.heads, p.value_size, p.key_size});
  check_limits(p, inputs);
  p.query = {query.data, p.query_heads * p.key_size, p.key_size, type_of(query.type)};
  p.key = {key.data, p.key_heads * p.key_size, p.key_size, type_of(key.type)};
  p.value = {value.data, p.heads * p.value_size, p.value_size, type_of(value.type)};
  p.beta = {beta.data, p.heads, 1, type_of(beta.type)};
  return p;
}

void GatedDeltaRule::check_limits(const linear::Problem& p, const Inputs& inputs) const {
  const struct {
    size_t input;
    const char* what;
    int64_t size, most;
  } limits[] = {{kQuery, "tokens", inputs[kQuery].dims[0], kAny},
                {kQuery, "heads", p.query_heads, kind_.most_heads},
                {kValue, "heads", p.heads, kind_.most_heads},
                {kQuery, "numbers in a head", p.key_size, kind_.most_width},
                {kValue, "numbers in a head", p.value_size, kind_.most_width},
                {kState, "states", inputs[kState].dims[0], kAny}};
  for (const auto& each : limits) {
    if (each.size >= 1 && each.size <= each.most) continue;
    fail(kind_.limits, std::string("input ") + kind_.inputs[each.input] + " has " + std::to_string(each.size) + " " +
                           each.what + ", expected " + text_of_range(1, each.most));
  }
  if (p.heads % p.query_heads == 0) return;
  fail(kind_.limits, "input value has " + std::to_string(p.heads) + " heads, expected a multiple of " +
                         std::to_string(p.query_heads) + ", the heads of query");
}

// The lengths of the sequences add up to the tokens.
void GatedDeltaRule::check_lengths(const Inputs& inputs) const {
  const Tensor& lengths = inputs[kLengths];
  const int64_t tokens = inputs[kQuery].dims[0];
  int64_t sum = 0;
  for (int64_t n = 0; n < lengths.count(); ++n) {
    const int64_t length = integers_of(lengths)[n];
    sum += length;
    if (length >= 1 && length <= kind_.most_tokens) continue;
    fail(kind_.lengths, "input actual_seq_lengths has a length of " + std::to_string(length) + ", expected " +
                            text_of_range(1, kind_.most_tokens));
  }
  if (sum == tokens) return;
  fail(kind_.lengths, "input actual_seq_lengths has the sum " + std::to_string(sum) + ", expected " +
                          std::to_string(tokens) + ", the tokens");
}

linear::States GatedDeltaRule::states_of(void* data, const linear::Problem& p, Type type) const {
  const int64_t head = p.value_size * p.key_size;
  return {data, p.heads * head, head, 1, p.key_size, type};
}

void GatedDeltaRule::run(linear::Problem& p, const std::vector<linear::Sequence>& sequences, CallRuntime& runtime) const {
  p.sequences = sequences.data();
  p.sequence_count = static_cast<int64_t>(sequences.size());
  runtime.finish(variant_.linear->attention(p, runtime.runtime()), node_);
}

}  // namespace

namespace chunk_gated_delta_rule {
namespace {

class Kernel final : public GatedDeltaRule {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : GatedDeltaRule(api, info, node, kChunks, node.get(attr::scale_value)) {}
  void compute(ort::KernelContext* context) const override;
};

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs = tensors_of(api_, context, kInputCount);
  const Tensor &value = inputs[kValue], &state = inputs[kState], &g = inputs[input_g];
  linear::Problem p = problem_of(inputs);
  check_shape(inputs, kLengths, {state.dims[0]});
  check_shape(inputs, input_g, {value.dims[0], p.heads});
  check_lengths(inputs);
  if (g.present()) {
    p.gate = linear::Gate::head;
    p.decay = {g.data, p.heads, 1, type_of(g.type)};
  }
  std::vector<linear::Sequence> sequences;
  int64_t first = 0;
  for (int64_t n = 0; n < state.dims[0]; ++n) {
    const int64_t length = integers_of(inputs[kLengths])[n];
    sequences.push_back({first, length, n, n});
    first += length;
  }
  p.out = {output_of(api_, context, output_out, value.dims), p.heads * p.value_size, p.value_size, type_of(value.type)};
  p.past = states_of(state.data, p, type_of(state.type));
  p.present = states_of(output_of(api_, context, output_final_state, state.dims), p, type_of(state.type));
  if (p.out.data == nullptr && p.present.data == nullptr) return;
  CallRuntime runtime(api_, context, resources_);
  run(p, sequences, runtime);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace chunk_gated_delta_rule

namespace recurrent_gated_delta_rule {
namespace {

// The tokens of a sequence. For the kernels each is a sequence of its own, from the block of the token before it to its own.
using Steps = std::vector<linear::Sequence>;

class Kernel final : public GatedDeltaRule {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
      : GatedDeltaRule(api, info, node, kSteps, node.get(attr::scale_value)) {}
  void compute(ort::KernelContext* context) const override;

 private:
  void check(const Inputs& inputs, const linear::Problem& problem) const;
  void set_decay(const Inputs& inputs, linear::Problem& problem, std::vector<float>& sums) const;
  std::vector<Steps> steps_of(const Inputs& inputs) const;
  void run_through(linear::Problem& problem, const Steps& steps, CallRuntime& runtime) const;
};

void Kernel::check(const Inputs& inputs, const linear::Problem& p) const {
  const Tensor &state = inputs[input_state], &lengths = inputs[input_actual_seq_lengths];
  const Tensor &indices = inputs[input_ssm_state_indices], &accepted = inputs[input_num_accepted_tokens];
  const int64_t tokens = inputs[input_query].dims[0];
  if (lengths.rank() != 1) {
    fail(rule::shapes, "input actual_seq_lengths has rank " + std::to_string(lengths.rank()) + ", expected 1");
  }
  check_shape(inputs, input_ssm_state_indices, {tokens});
  check_shape(inputs, input_g, {tokens, p.heads});
  check_shape(inputs, input_gk, {tokens, p.heads, p.key_size});
  check_shape(inputs, input_num_accepted_tokens, lengths.dims);
  if (lengths.dims[0] == 0) fail(rule::limits, "input actual_seq_lengths is empty, expected 1 or more sequences");
  if (state.dims[0] < tokens) {
    fail(rule::limits, "input state has " + std::to_string(state.dims[0]) + " blocks, expected at least " +
                           std::to_string(tokens) + ", the tokens of query");
  }
  check_lengths(inputs);
  for (int64_t n = 0; accepted.present() && n < lengths.dims[0]; ++n) {
    const int64_t length = integers_of(lengths)[n], count = integers_of(accepted)[n];
    if (count >= 1 && count <= length) continue;
    fail(rule::lengths, "input num_accepted_tokens has " + std::to_string(count) + ", expected 1 to " +
                            std::to_string(length) + ", the length of the sequence");
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t index = integers_of(indices)[t];
    if (index >= 0 && index < state.dims[0]) continue;
    fail(rule::blocks, "input ssm_state_indices has " + std::to_string(index) + ", expected a block of state, 0 to " +
                           std::to_string(state.dims[0]) + " exclusive");
  }
}

// `sums` is the memory of the decays if both inputs are given.
void Kernel::set_decay(const Inputs& inputs, linear::Problem& p, std::vector<float>& sums) const {
  const Tensor &g = inputs[input_g], &gk = inputs[input_gk];
  if (!gk.present()) {
    if (!g.present()) return;
    p.gate = linear::Gate::head;
    p.decay = {g.data, p.heads, 1, Type::float32};
    return;
  }
  p.gate = linear::Gate::key;
  p.decay = {gk.data, p.heads * p.key_size, p.key_size, Type::float32};
  if (!g.present()) return;
  sums.resize(static_cast<size_t>(gk.count()));
  for (size_t n = 0; n < sums.size(); ++n) {
    const size_t row = n / static_cast<size_t>(p.key_size);
    sums[n] = static_cast<const float*>(gk.data)[n] + static_cast<const float*>(g.data)[row];
  }
  p.decay.data = sums.data();
}

// A sequence begins with the block of its first token or, after a speculation, with that of the last accepted one.
std::vector<Steps> Kernel::steps_of(const Inputs& inputs) const {
  const int32_t* indices = integers_of(inputs[input_ssm_state_indices]);
  const Tensor &lengths = inputs[input_actual_seq_lengths], &accepted = inputs[input_num_accepted_tokens];
  std::vector<Steps> all;
  int64_t first = 0;
  for (int64_t n = 0; n < lengths.dims[0]; ++n) {
    const int64_t end = first + integers_of(lengths)[n];
    int64_t before = indices[first + (accepted.present() ? integers_of(accepted)[n] - 1 : 0)];
    Steps& steps = all.emplace_back();
    for (; first < end; ++first) {
      steps.push_back({first, 1, before, indices[first]});
      before = indices[first];
    }
  }
  return all;
}

// One sequence whose blocks are narrower than the numbers of the kernels. A state is rounded when it is written to a block,
// and the next token goes on with the numbers that were not rounded.
void Kernel::run_through(linear::Problem& p, const Steps& steps, CallRuntime& runtime) const {
  const linear::States blocks = p.present;
  std::vector<float> numbers(static_cast<size_t>(p.heads * p.value_size * p.key_size));
  const linear::States held = states_of(numbers.data(), p, Type::float32);
  for (const linear::Sequence& step : steps) {
    const bool is_first = &step == &steps.front(), is_last = &step == &steps.back();
    p.past = is_first ? blocks : held;
    p.present = is_last ? blocks : held;
    run(p, {{step.first, 1, is_first ? step.past : 0, is_last ? step.present : 0}}, runtime);
    if (is_last) break;
    p.past = held;
    p.present = blocks;
    run(p, {{step.first, 0, 0, step.present}}, runtime);  // a sequence without tokens: its state is copied
  }
  p.past = p.present = blocks;
}

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs = tensors_of(api_, context, kInputCount);
  const Tensor &value = inputs[input_value], &state = inputs[input_state];
  linear::Problem p = problem_of(inputs);
  check(inputs, p);
  std::vector<float> sums;
  set_decay(inputs, p, sums);
  p.out = {output_of(api_, context, output_out, value.dims), p.heads * p.value_size, p.value_size, type_of(value.type)};
  void* blocks = output_of(api_, context, output_state, state.dims);
  if (p.out.data == nullptr && blocks == nullptr) return;
  const size_t bytes = static_cast<size_t>(state.count() * bytes_of(state.type));
  std::unique_ptr<std::byte[]> unread;  // the blocks after the call, if nobody reads them
  if (blocks == nullptr) {
    unread.reset(new std::byte[bytes]);
    blocks = unread.get();
  }
  if (blocks != state.data) std::memcpy(blocks, state.data, bytes);
  p.past = p.present = states_of(blocks, p, type_of(state.type));
  CallRuntime runtime(api_, context, resources_);
  Steps together;
  for (const Steps& steps : steps_of(inputs)) {
    if (p.present.type == Type::float32 || steps.size() == 1) {
      together.insert(together.end(), steps.begin(), steps.end());
      continue;
    }
    // Sequences may name one block, so those before come first.
    run(p, together, runtime);
    together.clear();
    run_through(p, steps, runtime);
  }
  run(p, together, runtime);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace recurrent_gated_delta_rule
}  // namespace fa
