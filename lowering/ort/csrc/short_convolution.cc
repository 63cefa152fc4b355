// ShortConvolution. The attributes and inputs of a node become a problem for the kernels.
#include <string>
#include <vector>

#include "op.hpp"
#include "types.hpp"
#include "variants.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace short_convolution {
namespace {

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  ort::Api api_;
  std::string node_;
  NodeResources resources_;
  const Variant& variant_;
  linear::Activation activation_ = linear::Activation::none;
  bool channels_last_;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api),
      node_(node.title()),
      resources_(api, info),
      variant_(chosen_variant()),
      channels_last_(node.get(attr::channels_last)) {
  const std::string asked = node.get(attr::activation);
  if (asked == "silu") activation_ = linear::Activation::silu;
  if (asked != "silu" && asked != "none") {
    refuse(node_, rule::activation, "activation is '" + asked + "', expected none or silu");
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const std::vector<Tensor> inputs = tensors_of(api_, context, kInputCount);
  const Tensor &input = inputs[input_input], &weight = inputs[input_weight], &bias = inputs[input_bias];
  const Tensor& past = inputs[input_past_state];
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].present()) continue;
    if (const std::string fault = type_fault(inputs[i].type, {input.type}); !fault.empty()) {
      refuse(node_, rule::types, std::string("input ") + kInputs[i] + fault);
    }
  }
  for (const Tensor* tensor : {&input, &weight}) {
    if (tensor->rank() == 3) continue;
    refuse(node_, rule::ranks, std::string("input ") + (tensor == &input ? "input" : "weight") + " has rank " +
                                   std::to_string(tensor->rank()) + ", expected 3");
  }
  linear::Convolution c;
  c.activation = activation_;
  c.type = type_of(input.type);
  c.batch = input.dims[0];
  c.channels = input.dims[channels_last_ ? 2 : 1];
  c.tokens = input.dims[channels_last_ ? 1 : 2];
  c.width = weight.dims[2];
  c.channels_last = channels_last_;
  check_shape(node_, rule::ranks, kInputs[input_weight], weight, {c.channels, 1, c.width});
  if (c.width == 0) refuse(node_, rule::ranks, "input weight has no columns, expected 1 or more");
  const Dims state{c.batch, c.channels, c.width - 1};
  check_shape(node_, rule::shapes, kInputs[input_bias], bias, {c.channels});
  check_shape(node_, rule::shapes, kInputs[input_past_state], past, state);
  c.input = input.data;
  c.weight = weight.data;
  c.bias = bias.present() ? bias.data : nullptr;
  c.past = past.present() ? past.data : nullptr;
  c.out = output_of(api_, context, output_output, input.dims);
  c.present = output_of(api_, context, output_present_state, state);
  if (c.out == nullptr && c.present == nullptr) return;
  CallRuntime runtime(api_, context, resources_);
  runtime.finish(variant_.linear->convolution(c, runtime.runtime()), node_);
}

}  // namespace

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace short_convolution
}  // namespace fa
