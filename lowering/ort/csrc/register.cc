// The library's one visible symbol: ONNX Runtime calls it with the options of a session.
#include <iterator>

#include "flash_attention_score.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace {

constexpr const char* kDomain = "ascend";

// One type combination of one operator.
struct Descriptor : ort::CustomOp {
  const Types* types = nullptr;
};

const Types& types_of(const ort::CustomOp* op) { return *static_cast<const Descriptor*>(op)->types; }

// The kernel and the table it was made with, which compute_v2 is not given.
template <class Kernel>
struct Instance {
  ort::Api api;
  Kernel kernel;
};

Descriptor flash_attention_score_descriptor(const Types& types) {
  namespace op = flash_attention_score;
  using Made = Instance<op::Kernel>;
  Descriptor d;
  d.types = &types;
  d.name = [](const ort::CustomOp*) { return op::kName; };
  d.execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  d.input_type = [](const ort::CustomOp* self, size_t i) { return types_of(self).inputs[i]; };
  d.input_count = [](const ort::CustomOp*) { return std::size(op::kInputs); };
  d.output_type = [](const ort::CustomOp* self, size_t i) { return types_of(self).outputs[i]; };
  d.output_count = [](const ort::CustomOp*) { return std::size(op::kOutputs); };
  d.input_characteristic = [](const ort::CustomOp*, size_t i) {
    return i < op::kRequiredInputs ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.output_characteristic = [](const ort::CustomOp*, size_t i) {
    return i == op::output_attention_out ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  d.variadic_input_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_input_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.create_v2 = [](const ort::CustomOp*, ort::Api api, const ort::KernelInfo* info, void** kernel) {
    return guarded(api, [&] { *kernel = new Made{api, op::Kernel(api, info)}; });
  };
  d.compute_v2 = [](void* made, ort::KernelContext* context) {
    const Made& self = *static_cast<const Made*>(made);
    return guarded(self.api, [&] { self.kernel.compute(context); });
  };
  d.destroy = [](void* made) { delete static_cast<Made*>(made); };
  d.first_version = [](const ort::CustomOp*) { return 1; };
  d.last_version = [](const ort::CustomOp*) { return 1; };
  d.may_inplace = [](int**, int**) { return size_t{0}; };
  d.release_may_inplace = [](int*, int*) {};
  d.alias_map = [](int**, int**) { return size_t{0}; };
  d.release_alias_map = [](int*, int*) {};
  return d;
}

// They live as long as the library: sessions keep pointers to them.
const std::vector<Descriptor>& descriptors() {
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> list;
    for (const Types& types : flash_attention_score::kTypes) list.push_back(flash_attention_score_descriptor(types));
    return list;
  }();
  return all;
}

}  // namespace
}  // namespace fa

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api api = base->get_api(ort::kApiVersion);
  if (api == nullptr) return nullptr;
  return fa::guarded(api, [&] {
    ort::CustomOpDomain* domain = nullptr;
    fa::check(api, ort::CreateCustomOpDomain(api, fa::kDomain, &domain));
    for (const fa::Descriptor& descriptor : fa::descriptors()) {
      fa::check(api, ort::CustomOpDomain_Add(api, domain, &descriptor));
    }
    fa::check(api, ort::AddCustomOpDomain(api, options, domain));
  });
}
