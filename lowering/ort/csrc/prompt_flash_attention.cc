// PromptFlashAttention and FusedInferAttentionScore. Both compute the same attention; the second has more inputs.
#include "op.hpp"
#include "prompt/call.hpp"

namespace fa {
namespace prompt {
namespace {

namespace older = prompt_flash_attention;

constexpr Operator kPrompt = {
    .rules = {.types = older::rule::types,
              .layout = older::rule::layout,
              .heads = older::rule::heads,
              .sizes = older::rule::sizes,
              .mask = older::rule::mask,
              .bias = older::rule::bias,
              .scales = older::rule::int8_results,
              .rows = older::rule::int8_results,
              .lengths = older::rule::lengths},
    .names = older::kInputs,
    .inputs = older::kInputCount,
    .scale = older::attr::scale_value,
    .pre_tokens = older::attr::pre_tokens,
    .next_tokens = older::attr::next_tokens,
    .fused = false,
};
constexpr Operator kFused = {
    .rules = {.types = rule::types,
              .layout = rule::layout,
              .heads = rule::heads,
              .sizes = rule::sizes,
              .mask = rule::mask,
              .bias = rule::bias,
              .scales = rule::quantised,
              .rows = rule::rows_without_keys,
              .pages = rule::pages,
              .padding = rule::padding,
              .lists = rule::lists,
              .packed = rule::packed,
              .rope = rule::rope,
              .prefix = rule::prefix,
              .antiquant = rule::antiquantised,
              .lengths = rule::packed},
    .names = kInputs,
    .inputs = std::size(kInputs),
    .scale = attr::scale,
    .pre_tokens = attr::pre_tokens,
    .next_tokens = attr::next_tokens,
    .fused = true,
};

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Operator& op)
      : api_(api), node_(node.title()), op_(op), attributes_(read_attributes(node, op)),
        resources_(api, info), variant_(chosen_variant()) {}

  void compute(ort::KernelContext* context) const override {
    const Inputs inputs(api_, context, op_, attributes_);
    for (size_t input : {input_dequant_scale_query, input_key_rope_antiquant_scale}) {
      if (!inputs.has(input)) continue;
      throw Error{ort::ErrorCode::not_implemented,
                  node_ + ": the input " + op_.names[input] + " (full quantisation with scales of the query) is not computed"};
    }
    Call call(node_, op_, attributes_, inputs);
    ort::Value* value = nullptr;
    const Dims& dims = call.out_dims();
    check(api_, ort::KernelContext_GetOutput(api_, context, 0, dims.data(), dims.size(), &value));
    float* statistics = nullptr;
    if (op_.fused) {
      const Dims rows = attributes_.statistics ? call.statistics_dims() : Dims{0};
      statistics = static_cast<float*>(output_of(api_, context, output_softmax_lse, rows));
      if (!attributes_.statistics) statistics = nullptr;
    }
    CallRuntime runtime(api_, context, resources_);
    call.run(variant_, runtime, tensor_of(api_, value), statistics);
  }

 private:
  ort::Api api_;
  std::string node_;  // the node's title in messages
  const Operator& op_;
  Attributes attributes_;
  NodeResources resources_;
  const Variant& variant_;
};

}  // namespace
}  // namespace prompt

namespace prompt_flash_attention {
std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<prompt::Kernel>(api, info, node, prompt::kPrompt);
}
}  // namespace prompt_flash_attention

namespace fused_infer_attention_score {
std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<prompt::Kernel>(api, info, node, prompt::kFused);
}
}  // namespace fused_infer_attention_score
}  // namespace fa
