#include <algorithm>

#include "call/call.hpp"
#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace flash_attention_score_grad {
namespace {

constexpr Signature kSignature = {
    .rules = {.layout = rule::layout,
              .heads = rule::heads,
              .head_size = rule::head_sizes,
              .head_groups = rule::sizes,
              .batch = rule::sizes,
              .keep_prob = rule::dropout,
              .pse_type = rule::pse,
              .slopes = rule::pse,
              .bias = rule::bias_shape,
              .mask = rule::masking,
              .mode = rule::masking,
              .prefix = rule::prefix,
              .dropout = rule::dropout,
              .sink = rule::sink,
              .lengths = rule::lengths,
              .rope = rule::rope,
              .starts = rule::pse,
              .statistics = rule::softmax_in_layout,
              .softcap = rule::softcap},
    .names = kInputs,
    // In the order of Role.
    .positions = {input_query, input_key, input_value, input_pse_shift, input_drop_mask, input_atten_mask, input_prefix,
                  input_actual_seq_qlen, input_actual_seq_kvlen, input_q_start_idx, input_kv_start_idx,
                  input_query_rope, input_key_rope, input_sink},
    .statistics_layout = attr::softmax_in_layout,
    .forward = false,
};

void check_shape(const std::string& node, Rule rule, const CallInputs& inputs, size_t input, const Dims& expected) {
  const Tensor& tensor = inputs.at(input);
  const std::string name = std::string("input ") + kInputs[input];
  if (!tensor.present()) refuse(node, rule, name + " is absent, expected that of the forward pass");
  if (tensor.dims == expected) return;
  refuse(node, rule, name + " has shape " + text_of(tensor.dims) + ", expected " + text_of(expected));
}

}  // namespace

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  void check_forward_results(const CallInputs& inputs, const Call& call) const;
  void check_statistics(const CallInputs& inputs, const Call& call) const;

  ort::Api api_;
  std::string node_;  // the node's title in messages
  Attributes attributes_;
  NodeResources resources_;
  const Variant& variant_;
  bool compressed_mask_checked_ = false;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api), node_(node.title()), attributes_(read_attributes(node, kSignature)),
      resources_(api, info), variant_(chosen_variant()) {
  const Diagnostics diagnostics{node_, kSignature};
  for (size_t input : {input_d_scale_q, input_d_scale_k, input_d_scale_v, input_d_scale_dy, input_d_scale_o,
                       input_ds_scale, input_p_scale}) {
    if (node.has_input(input)) diagnostics.unsupported("the input " + std::string(kInputs[input]) + " (of FP8 types)");
  }
  if (attributes_.empty_rows == EmptyRows::unmasked) {
    refuse(node_, rule::masking, "cpu_empty_rows is \"unmasked\", expected one of \"\", \"zero\", \"mean\", \"nan\"");
  }
  const Tensor mask = node.constant_input(input_atten_mask);
  if (mask.present() && needs_compressed_mask(attributes_, mask.dims)) {
    check_compressed_mask(diagnostics, attributes_, mask, false);
    compressed_mask_checked_ = true;
  }
}

// Checks that dy and attention_in have the shape of attention_out.
void Kernel::check_forward_results(const CallInputs& inputs, const Call& call) const {
  check_shape(node_, rule::forward_result, inputs, input_dy, call.out_dims());
  check_shape(node_, rule::forward_result, inputs, input_attention_in, call.out_dims());
}

// Checks the shapes of softmax_max and softmax_sum.
void Kernel::check_statistics(const CallInputs& inputs, const Call& call) const {
  Dims expected = call.statistics_dims();
  if (attributes_.layout == Layout::TND && attributes_.statistics_like_input) {
    std::swap(expected[0], expected[1]);
    const Tensor& ends = inputs.at(input_actual_seq_qlen);
    const auto* values = static_cast<const int64_t*>(ends.data);
    const int64_t last = ends.count() == 0 ? 0 : *std::max_element(values, values + ends.count());
    if (last != expected[1]) {
      refuse(node_, rule::statistics,
             "input query has " + std::to_string(expected[1]) + " tokens, expected the " + std::to_string(last) +
                 " of actual_seq_qlen with softmax_in_layout \"same_as_input\"");
    }
  }
  for (size_t input : {input_softmax_max, input_softmax_sum}) {
    check_shape(node_, rule::statistics, inputs, input, expected);
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const CallInputs inputs(api_, context, kSignature);
  Call call(kSignature, node_, attributes_, inputs, compressed_mask_checked_);
  check_forward_results(inputs, call);
  check_statistics(inputs, call);
  Gradients gradients;
  gradients.problem = call.problem(inputs.at(input_attention_in).data,
                                   static_cast<float*>(inputs.at(input_softmax_max).data),
                                   static_cast<float*>(inputs.at(input_softmax_sum).data));
  gradients.dy = inputs.at(input_dy).data;
  const Problem& problem = gradients.problem;
  const size_t element = problem.type == Type::float32 ? 4 : 2;
  // In TND the kernel may leave out some rows: tokens of no batch, and batches without queries or keys. In the other
  // layouts it leaves out all rows or none.
  const bool clear = attributes_.layout == Layout::TND || call.has_gaps() || problem.sequence_count == 0;
  const auto like = [&](size_t output, size_t input) -> void* {
    const Tensor& tensor = inputs.at(input);
    return cleared_output(api_, context, output, tensor.present() ? tensor.dims : Dims{0}, element, clear);
  };
  gradients.query = like(output_dq, input_query);
  gradients.key = like(output_dk, input_key);
  gradients.value = like(output_dv, input_value);
  gradients.query_rope = like(output_dq_rope, input_query_rope);
  gradients.key_rope = like(output_dk_rope, input_key_rope);
  const Tensor& shift = inputs.at(input_pse_shift);
  cleared_output(api_, context, output_dpse, shift.present() ? shift.dims : Dims{0}, element, true);
  const Tensor& sink = inputs.at(input_sink);
  auto* sinks = static_cast<float*>(
      cleared_output(api_, context, output_dsink, sink.present() ? sink.dims : Dims{0}, sizeof(float), true));
  if (problem.sequence_count == 0) return;
  if (problem.rope_size == 0) gradients.query_rope = gradients.key_rope = nullptr;
  if (problem.sink != nullptr) gradients.sink = sinks;
  CallRuntime runtime(api_, context, resources_);
  runtime.finish(variant_.gradient(gradients, runtime.runtime()), node_);
}

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace flash_attention_score_grad
}  // namespace fa
