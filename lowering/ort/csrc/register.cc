// RegisterCustomOps, the library's only visible symbol. ONNX Runtime calls it with the options of a session.
#include "op.hpp"
#include "types.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace {

constexpr const char* kDomain = "ascend";

// An operator of descriptors.inc.
struct Operator {
  const char* name;
  size_t inputs, outputs;
  size_t required_inputs;  // the first inputs are required, the others optional
  size_t required_output;  // or kNoOutput
  MakeKernel* make;
};

// One type combination of one operator.
struct Descriptor : ort::CustomOp {
  const Operator* op = nullptr;
  const Types* types = nullptr;
};

const Descriptor& of(const ort::CustomOp* self) { return *static_cast<const Descriptor*>(self); }

// A kernel, and the table that it was made with. ONNX Runtime does not pass the table to compute_v2.
struct Instance {
  ort::Api api;
  std::unique_ptr<OpKernel> kernel;
};

Descriptor descriptor_of(const Operator& op, const Types& types) {
  Descriptor d;
  d.op = &op;
  d.types = &types;
  d.name = [](const ort::CustomOp* self) { return of(self).op->name; };
  d.execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  d.input_type = [](const ort::CustomOp* self, size_t i) { return of(self).types->inputs[i]; };
  d.input_count = [](const ort::CustomOp* self) { return of(self).op->inputs; };
  d.output_type = [](const ort::CustomOp* self, size_t i) { return of(self).types->outputs[i]; };
  d.output_count = [](const ort::CustomOp* self) { return of(self).op->outputs; };
  d.input_characteristic = [](const ort::CustomOp* self, size_t i) {
    return i < of(self).op->required_inputs ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.output_characteristic = [](const ort::CustomOp* self, size_t i) {
    return i == of(self).op->required_output ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  d.variadic_input_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_input_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.create_v2 = [](const ort::CustomOp* self, ort::Api api, const ort::KernelInfo* info, void** kernel) {
    return guarded(api, [&] {
      const Operator& op = *of(self).op;
      *kernel = new Instance{api, op.make(api, info, NodeInfo(api, info, op.name))};
    });
  };
  d.compute_v2 = [](void* instance, ort::KernelContext* context) {
    const Instance& self = *static_cast<const Instance*>(instance);
    return guarded(self.api, [&] { self.kernel->compute(context); });
  };
  d.destroy = [](void* instance) { delete static_cast<Instance*>(instance); };
  d.first_version = [](const ort::CustomOp*) { return 1; };
  d.last_version = [](const ort::CustomOp*) { return 1; };
  d.may_inplace = [](int**, int**) { return size_t{0}; };
  d.release_may_inplace = [](int*, int*) {};
  d.alias_map = [](int**, int**) { return size_t{0}; };
  d.release_alias_map = [](int*, int*) {};
  return d;
}

// All descriptors. They live as long as the library, because sessions keep pointers to them.
const std::vector<Descriptor>& descriptors() {
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> list;
#define FA_ADD(space)                                                                                     \
  static constexpr Operator space = {space::kName,           space::kInputCount,     space::kOutputCount, \
                                     space::kRequiredInputs, space::kRequiredOutput, space::make_kernel}; \
  for (const Types& types : space::kTypes) list.push_back(descriptor_of(space, types));
    FA_EACH_OPERATOR(FA_ADD)
#undef FA_ADD
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
    fa::note_version(api, base->version());
    ort::CustomOpDomain* domain = nullptr;
    fa::check(api, ort::CreateCustomOpDomain(api, fa::kDomain, &domain));
    for (const fa::Descriptor& descriptor : fa::descriptors()) {
      fa::check(api, ort::CustomOpDomain_Add(api, domain, &descriptor));
    }
    fa::check(api, ort::AddCustomOpDomain(api, options, domain));
  });
}
