// PromptFlashAttention and FusedInferAttentionScore: the same attention under two names.
#include "operators.hpp"
#include "prompt/call.hpp"

namespace fa {
namespace prompt {
namespace {

// Constraints in the order of Rule; 0 where PromptFlashAttention has no such input.
constexpr Operator kPrompt = {"PFA", {1, 2, 8, 9, 3, 10, 4, 4, 0, 0, 0, 0, 0, 0, 0, 11},
                              prompt_flash_attention::kInputs, prompt_flash_attention::kInputCount, "scale_value", false};
constexpr Operator kFused = {"FIA", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 12},
                             fused_infer_attention_score::kInputs, std::size(fused_infer_attention_score::kInputs),
                             "scale", true};

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node, const Operator& op)
      : api_(api), node_(node.title()), op_(op), attributes_(read_attributes(node, op)),
        allocator_(allocator_of(api, info)), variant_(chosen_variant()) {}

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
    CallRuntime runtime(api_, context, allocator_.get());
    call.run(variant_, runtime, tensor_of(api_, value), statistics);
  }

 private:
  ort::Api api_;
  std::string node_;  // how messages name it
  const Operator& op_;
  Attributes attributes_;
  AllocatorPtr allocator_;
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
