// FlashLinearAttention. The attributes and inputs of a node become a problem for the kernels.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace flash_linear_attention {
namespace {

struct UpdateRule {
  const char* name;
  bool gated;
  linear::Correction correction;
  bool reads_before_decay = false;
};
constexpr UpdateRule kUpdateRules[] = {{"linear", false, linear::Correction::none},
                                       {"gated", true, linear::Correction::none},
                                       {"delta", false, linear::Correction::delta},
                                       {"gated_delta", true, linear::Correction::delta},
                                       {"general", false, linear::Correction::general},
                                       {"dplr", false, linear::Correction::general, true}};

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  using Inputs = std::vector<Tensor>;

  [[noreturn]] void fail(Rule rule, const std::string& text) const { refuse(node_, rule, text); }
  int64_t divided(size_t input, int64_t width, int64_t heads) const;
  void check_operands(const Inputs& inputs) const;
  void check_types(const Inputs& inputs) const;
  linear::Rows rows(const Tensor& tensor, int64_t heads) const;
  linear::Problem problem_of(const Inputs& inputs) const;
  std::vector<linear::Sequence> sequences_of(const Inputs& inputs) const;

  ort::Api api_;
  std::string node_;
  NodeResources resources_;
  const Variant& variant_;
  UpdateRule rule_{};
  int64_t query_heads_;
  int64_t heads_;
  float scale_;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api),
      node_(node.title()),
      resources_(api, info),
      variant_(chosen_variant()),
      query_heads_(node.get(attr::q_num_heads)),
      heads_(node.get(attr::kv_num_heads)),
      scale_(node.get(attr::scale)) {
  const std::string asked = node.get(attr::update_rule);
  const auto found = std::find_if(std::begin(kUpdateRules), std::end(kUpdateRules),
                                  [&](const UpdateRule& each) { return asked == each.name; });
  if (found == std::end(kUpdateRules)) {
    fail(rule::update_rule, "update_rule is '" + asked + "', expected linear, gated, delta, gated_delta, general or dplr");
  }
  rule_ = *found;
  if (query_heads_ < 1 || heads_ < 1 ||
      std::max(query_heads_, heads_) % std::min(query_heads_, heads_) != 0) {
    fail(rule::heads, "q_num_heads is " + std::to_string(query_heads_) + " beside " + std::to_string(heads_) +
                          " of kv_num_heads, expected a multiple or a divisor");
  }
}

// The size of a head of an input that has so many heads.
int64_t Kernel::divided(size_t input, int64_t width, int64_t heads) const {
  if (width % heads == 0) return width / heads;
  fail(rule::widths, std::string("input ") + kInputs[input] + " has a width of " + std::to_string(width) +
                         ", expected " + std::to_string(heads) + " heads");
}

void Kernel::check_types(const Inputs& inputs) const {
  const E type = inputs[input_query].type;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].present() || i == input_past_state || i == input_cu_seqlens) continue;
    if (const std::string fault = type_fault(inputs[i].type, {type}); !fault.empty()) {
      fail(rule::types, std::string("input ") + kInputs[i] + fault);
    }
  }
}

void Kernel::check_operands(const Inputs& inputs) const {
  const bool is_general = rule_.correction == linear::Correction::general;
  const bool is_delta = rule_.correction == linear::Correction::delta;
  const struct {
    size_t input;
    bool may, must;
  } operands[] = {{input_decay, rule_.gated || is_general, rule_.gated},
                  {input_beta, is_delta, is_delta},
                  {input_low_rank_write, is_general, is_general},
                  {input_low_rank_read, is_general, is_general}};
  for (const auto& each : operands) {
    const bool given = inputs[each.input].present();
    if (given ? each.may : !each.must) continue;
    fail(rule::operands, std::string("input ") + kInputs[each.input] + (given ? " is given" : " is absent") +
                             " with the update_rule " + rule_.name);
  }
}

linear::Rows Kernel::rows(const Tensor& tensor, int64_t heads) const {
  if (!tensor.present()) return {};
  const int64_t width = tensor.dims[2];
  return {tensor.data, width, heads == 0 ? 0 : width / heads, type_of(tensor.type)};
}

linear::Problem Kernel::problem_of(const Inputs& inputs) const {
  const Tensor &query = inputs[input_query], &key = inputs[input_key], &value = inputs[input_value];
  for (size_t input : {input_query, input_key, input_value}) {
    if (inputs[input].rank() != 3) {
      fail(rule::widths, std::string("input ") + kInputs[input] + " has rank " + std::to_string(inputs[input].rank()) +
                             ", expected 3");
    }
  }
  const int64_t batch = query.dims[0], tokens = query.dims[1];
  linear::Problem p;
  p.correction = rule_.correction;
  p.reads_before_decay = rule_.reads_before_decay;
  p.heads = heads_;
  p.query_heads = query_heads_;
  p.out_heads = std::max(query_heads_, heads_);
  p.key_size = divided(input_query, query.dims[2], query_heads_);
  p.value_size = divided(input_value, value.dims[2], heads_);
  if (p.key_size == 0) fail(rule::widths, "input query has heads of no numbers, expected 1 or more");
  p.key_heads = key.dims[2] / p.key_size;
  if (key.dims[2] % p.key_size != 0 || p.key_heads == 0 || heads_ % p.key_heads != 0) {
    fail(rule::widths, "input key has a width of " + std::to_string(key.dims[2]) + ", expected heads of " +
                           std::to_string(p.key_size) + " whose number divides " + std::to_string(heads_));
  }
  check_shape(node_, rule::widths, "key", key, {batch, tokens, key.dims[2]});
  check_shape(node_, rule::widths, "value", value, {batch, tokens, value.dims[2]});
  p.scale = scale_ != 0 ? scale_ : 1.0f / std::sqrt(static_cast<float>(p.key_size));
  p.query = rows(query, query_heads_);
  p.key = rows(key, p.key_heads);
  p.value = rows(value, heads_);
  const int64_t wide = heads_ * p.key_size;
  if (const Tensor& decay = inputs[input_decay]; decay.present()) {
    p.gate = decay.rank() == 3 && decay.dims[2] == heads_ ? linear::Gate::head : linear::Gate::key;
    check_shape(node_, rule::rows, "decay", decay, {batch, tokens, p.gate == linear::Gate::head ? heads_ : wide});
    p.decay = rows(decay, heads_);
  }
  if (const Tensor& beta = inputs[input_beta]; beta.present()) {
    const bool is_shared = beta.rank() == 3 && beta.dims[2] == 1;
    check_shape(node_, rule::rows, "beta", beta, {batch, tokens, is_shared ? 1 : heads_});
    p.beta = rows(beta, is_shared ? 0 : heads_);
  }
  for (size_t input : {input_low_rank_write, input_low_rank_read}) {
    if (!inputs[input].present()) continue;
    check_shape(node_, rule::rows, kInputs[input], inputs[input], {batch, tokens, wide});
    (input == input_low_rank_write ? p.write : p.read) = rows(inputs[input], heads_);
  }
  return p;
}

std::vector<linear::Sequence> Kernel::sequences_of(const Inputs& inputs) const {
  const Tensor &query = inputs[input_query], &limits = inputs[input_cu_seqlens];
  const int64_t batch = query.dims[0], tokens = query.dims[1];
  const bool has_past = inputs[input_past_state].present();
  std::vector<linear::Sequence> sequences;
  if (!limits.present()) {
    for (int64_t b = 0; b < batch; ++b) sequences.push_back({b * tokens, tokens, has_past ? b : -1, b});
    return sequences;
  }
  if (limits.rank() != 1 || limits.dims[0] == 0 || batch != 1) {
    fail(rule::states, "input cu_seqlens has the shape " + text_of(limits.dims) + " with a batch of " +
                           std::to_string(batch) + ", expected [N+1] with a batch of 1");
  }
  const int32_t* ends = integers_of(limits);
  const int64_t count = limits.dims[0] - 1;
  for (int64_t n = 0; n < count; ++n) {
    if (ends[n + 1] < ends[n] || ends[0] != 0) fail(rule::states, "input cu_seqlens is not a rising list that begins with 0");
    sequences.push_back({ends[n], ends[n + 1] - ends[n], has_past ? n : -1, n});
  }
  if (ends[count] != tokens || ends[0] != 0) {
    fail(rule::states, "input cu_seqlens ends with " + std::to_string(ends[count]) + ", expected " +
                           std::to_string(tokens) + ", the tokens of query");
  }
  return sequences;
}

linear::States states_of(void* data, const Dims& dims, Type type) {
  return {data, dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1, type};
}

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs = tensors_of(api_, context, kInputCount);
  check_types(inputs);
  check_operands(inputs);
  linear::Problem p = problem_of(inputs);
  const std::vector<linear::Sequence> sequences = sequences_of(inputs);
  const Tensor &query = inputs[input_query], &past = inputs[input_past_state];
  p.sequences = sequences.data();
  p.sequence_count = static_cast<int64_t>(sequences.size());
  const Dims states{p.sequence_count, heads_, p.key_size, p.value_size};
  Type state_type = type_of(query.type);
  if (past.present()) {
    check_shape(node_, rule::states, "past_state", past, states);
    state_type = type_of(past.type);
    p.past = states_of(past.data, states, state_type);
  }
  const int64_t width = p.out_heads * p.value_size;
  p.out = {output_of(api_, context, output_output, {query.dims[0], query.dims[1], width}), width, p.value_size,
           type_of(query.type)};
  p.present = states_of(output_of(api_, context, output_present_state, states), states, state_type);
  if ((p.out.data == nullptr && p.present.data == nullptr) || p.value_size == 0) return;
  CallRuntime runtime(api_, context, resources_);
  runtime.finish(variant_.linear->attention(p, runtime.runtime()), node_);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace flash_linear_attention
}  // namespace fa
