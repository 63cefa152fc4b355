#include <cstring>

#include "call/call.hpp"
#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"  // gives attr::, rule::, input_* and output_* of each operator

namespace flash_attention_score {
namespace {

constexpr Signature kSignature = {
    .rules = {.layout = rule::layout,
              .heads = rule::heads,
              .head_size = rule::head_sizes,
              .head_groups = rule::head_groups,
              .batch = rule::sizes,
              .keep_prob = rule::keep_prob,
              .pse_type = rule::pse_type,
              .slopes = rule::shift_type,
              .bias = rule::shift_shape,
              .mask = rule::mask,
              .mode = rule::sparse_mode,
              .prefix = rule::prefix,
              .dropout = rule::dropout,
              .sink = rule::sink,
              .lengths = rule::lengths,
              .rope = rule::rope,
              .starts = rule::starts,
              .statistics = rule::softmax_out_layout,
              .softcap = rule::softcap},
    .names = kInputs,
    // In the order of Role.
    .positions = {input_query, input_key, input_value, input_real_shift, input_drop_mask, input_atten_mask,
                  input_prefix, input_actual_seq_qlen, input_actual_seq_kvlen, input_q_start_idx, input_kv_start_idx,
                  input_query_rope, input_key_rope, input_sink},
    .statistics_layout = attr::softmax_out_layout,
    .forward = true,
};

}  // namespace

class Kernel final : public OpKernel {
 public:
  // `single_output` is for nodes whose only output is attention_out.
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, bool single_output);
  void compute(ort::KernelContext* context) const override;

 private:
  ort::Api api_;
  std::string node_;  // the node's title in messages
  Attributes attributes_;
  NodeResources resources_;
  const Variant& variant_;
  bool products_may_round_;
  size_t attention_out_;
  bool writes_max_;
  bool writes_sum_;
  bool writes_softmax_out_;
  bool compressed_mask_checked_ = false;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, bool single_output)
    : api_(api), node_(node.title()), attributes_(read_attributes(node, kSignature)),
      resources_(api, info), variant_(chosen_variant()),
      products_may_round_(products_may_round()), attention_out_(single_output ? size_t{0} : output_attention_out),
      writes_max_(!single_output && node.has_output(output_softmax_max)),
      writes_sum_(!single_output && node.has_output(output_softmax_sum)),
      writes_softmax_out_(!single_output && node.has_output(output_softmax_out)) {
  const Diagnostics diagnostics{node_, kSignature};
  for (size_t input : {input_d_scale_q, input_d_scale_k, input_d_scale_v, input_p_scale}) {
    if (node.has_input(input)) diagnostics.unsupported("the input " + std::string(kInputs[input]) + " (of FP8 types)");
  }
  // Only FP8 inputs make the type of the result a choice: the attribute has no effect here.
  if (const int64_t type = node.get(attr::out_dtype); type != 0 && type != 1) {
    refuse(node_, rule::out_dtype, "out_dtype is " + std::to_string(type) + ", expected 0 (float16) or 1 (bfloat16)");
  }
  const Tensor mask = node.constant_input(input_atten_mask);
  if (mask.present() && needs_compressed_mask(attributes_, mask.dims)) {
    check_compressed_mask(diagnostics, attributes_, mask, false);
    compressed_mask_checked_ = true;
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const CallInputs inputs(api_, context, kSignature);
  Call call(kSignature, node_, attributes_, inputs, compressed_mask_checked_);
  const Dims& out_dims = call.out_dims();
  const Dims statistics_dims = call.statistics_dims();
  const auto statistic = [&](bool written, size_t output) {
    return static_cast<float*>(written ? output_of(api_, context, output, statistics_dims) : nullptr);
  };
  float* softmax_max = statistic(writes_max_, output_softmax_max);
  float* softmax_sum = statistic(writes_sum_, output_softmax_sum);
  if (writes_softmax_out_) output_of(api_, context, output_softmax_out, {0, 0, 0, 0});
  void* out = output_of(api_, context, attention_out_, out_dims);
  Problem problem = call.problem(out, softmax_max, softmax_sum);
  problem.rounded_products = products_may_round_ && !problem.keeps_statistics();
  if (call.has_gaps()) {
    const size_t element = problem.type == Type::float32 ? 4 : 2;
    if (out != nullptr) std::memset(out, 0, bytes_of(out_dims, element));
    for (float* statistic : {softmax_max, softmax_sum}) {
      if (statistic != nullptr) std::memset(statistic, 0, bytes_of(statistics_dims, sizeof(float)));
    }
  }
  if (problem.sequence_count == 0) return;
  CallRuntime runtime(api_, context, resources_);
  runtime.finish(variant_.attention(problem, runtime.runtime()), node_);
}

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node, false);
}

std::unique_ptr<OpKernel> make_single_output(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node, true);
}

}  // namespace flash_attention_score
}  // namespace fa
