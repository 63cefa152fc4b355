#include "decode/attributes.hpp"
#include "decode/call.hpp"
#include "op.hpp"
#include "variants.hpp"

namespace fa::incre_flash_attention {

class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  ort::Api api_;
  std::string node_;  // the node's title in messages
  Attributes attributes_;
  NodeResources resources_;
  const Variant& variant_;
};

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api), node_(node.title()), attributes_(read_attributes(node)), resources_(api, info),
      variant_(chosen_variant()) {}

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs(api_, context, attributes_.keys, attributes_.values);
  Call call(node_, attributes_, inputs);
  ort::Value* value = nullptr;
  const Dims& dims = call.out_dims();
  check(api_, ort::KernelContext_GetOutput(api_, context, 0, dims.data(), dims.size(), &value));
  const Tensor out = tensor_of(api_, value);
  const Decode& decode = call.decode(out.data, out.type);
  if (out.count() == 0) return;  // with a head size of 0, the number of heads may exceed the memory
  CallRuntime runtime(api_, context, resources_);
  runtime.finish(variant_.decode(decode, runtime.runtime()), node_);
}

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, info, node);
}

}  // namespace fa::incre_flash_attention
