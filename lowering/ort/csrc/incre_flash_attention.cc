#include "incre_flash_attention.hpp"

#include "decode/call.hpp"

namespace fa::incre_flash_attention {

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info) : Kernel(api, info, NodeInfo(api, info, kName)) {}

Kernel::Kernel(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node)
    : api_(api), node_(node.title()), attributes_(read_attributes(node)), allocator_(allocator_of(api, info)),
      variant_(chosen_variant()) {}

void Kernel::compute(ort::KernelContext* context) const {
  const Inputs inputs(api_, context, attributes_.keys, attributes_.values);
  Call call(node_, attributes_, inputs);
  ort::Value* value = nullptr;
  const Dims& dims = call.out_dims();
  check(api_, ort::KernelContext_GetOutput(api_, context, 0, dims.data(), dims.size(), &value));
  const Tensor out = tensor_of(api_, value);
  CallRuntime runtime(api_, context, allocator_.get());
  const Outcome outcome = variant_.decode(call.decode(out.data, out.type), runtime.runtime());
  runtime.rethrow();
  if (outcome == Outcome::out_of_memory) throw Error{ort::ErrorCode::fail, node_ + ": out of memory"};
}

}  // namespace fa::incre_flash_attention
