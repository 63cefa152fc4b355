// RegisterCustomOps, which ONNX Runtime calls with the options of a session.
#include "register.hpp"

#include <array>
#include <map>
#include <mutex>

#include "op.hpp"
#include "types.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace flash_attention_score {
MakeKernel make_single_output;
}

namespace {

constexpr const char* kDomain = "ascend";

// What FlashAttentionScore is in files: the operator with attention_out as its only output. Tools know a node by its
// first output, and many of them do not expect that it is absent. In a file the nodes of one name share a function body,
// which is for runtimes without this library, so nodes with other bodies need other names.
constexpr const char* kFileDomain = "fa_compiler";
constexpr std::array kFileOps = {"FlashAttention",      "FlashAttentionBody2", "FlashAttentionBody3", "FlashAttentionBody4",
                                 "FlashAttentionBody5", "FlashAttentionBody6", "FlashAttentionBody7", "FlashAttentionBody8"};

// An operator of descriptors.inc. Its outputs before `first_output` are left out.
struct Operator {
  const char* name;
  size_t inputs, first_output, outputs;
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
  d.output_type = [](const ort::CustomOp* self, size_t i) { return of(self).types->outputs[of(self).op->first_output + i]; };
  d.output_count = [](const ort::CustomOp* self) { return of(self).op->outputs; };
  d.input_characteristic = [](const ort::CustomOp* self, size_t i) {
    return i < of(self).op->required_inputs ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.output_characteristic = [](const ort::CustomOp* self, size_t i) {
    return i == of(self).op->required_output ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.input_memory_type = [](const ort::CustomOp*, size_t) { return ort::MemoryType::standard; };
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

// The descriptors of kDomain. They live as long as the library, because sessions keep pointers to them.
const std::vector<Descriptor>& descriptors() {
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> list;
#define FA_ADD(space)                                                                                     \
  static constexpr Operator space = {                                                                     \
      space::kName, space::kInputCount, 0, space::kOutputCount, space::kRequiredInputs, space::kRequiredOutput, space::make_kernel}; \
  for (const Types& types : space::kTypes) list.push_back(descriptor_of(space, types));
    FA_EACH_OPERATOR(FA_ADD)
#undef FA_ADD
    return list;
  }();
  return all;
}

// The descriptors of kFileDomain.
const std::vector<Descriptor>& file_descriptors() {
  namespace flash = flash_attention_score;
  static constexpr auto operators = [] {
    std::array<Operator, kFileOps.size()> list{};
    for (size_t n = 0; n < list.size(); ++n) {
      list[n] = {kFileOps[n], flash::kInputCount, flash::output_attention_out, 1, flash::kRequiredInputs, 0,
                 flash::make_single_output};
    }
    return list;
  }();
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> list;
    for (const Operator& op : operators) {
      for (const Types& types : flash::kTypes) list.push_back(descriptor_of(op, types));
    }
    return list;
  }();
  return all;
}

constexpr const char* kNestedDomain = "fa_compiler.nested";

// Whether a node of a serialised model may be this operator: its type stands in the model as in the field of a node.
bool may_have(std::string_view model, const std::string& type) {
  constexpr char kOpType = 4 << 3 | 2;  // the key of the field
  return model.find(std::string{kOpType, static_cast<char>(type.size())} + type) != std::string_view::npos;
}

ort::CustomOpDomain* new_domain(ort::Api api, const char* name) {
  ort::CustomOpDomain* domain = nullptr;
  check(api, ort::CreateCustomOpDomain(api, name, &domain));
  return domain;
}

// Adds the operators whose names are `wanted`.
template <class Wanted>
void fill(ort::Api api, ort::CustomOpDomain* domain, const std::vector<Descriptor>& descriptors, Wanted wanted) {
  for (const Descriptor& descriptor : descriptors) {
    if (wanted(descriptor.op->name)) check(api, ort::CustomOpDomain_Add(api, domain, &descriptor));
  }
}

bool always(const std::string&) { return true; }

// The domains that were made for one runtime. A process may have several.
struct Domains {
  ort::CustomOpDomain* graph;
  ort::CustomOpDomain* file;
};

const Domains& domains_of(ort::Api api) {
  static std::mutex mutex;
  static std::map<ort::Api, Domains> all;
  const std::lock_guard lock(mutex);
  if (const auto found = all.find(api); found != all.end()) return found->second;
  const Domains made{new_domain(api, kDomain), new_domain(api, kFileDomain)};
  fill(api, made.graph, descriptors(), always);
  fill(api, made.file, file_descriptors(), always);
  return all.emplace(api, made).first->second;
}

// The operators of kDomain whose names are in the list, which has commas between them. Each list has one domain, for all
// sessions of the process.
ort::CustomOpDomain* domain_of(ort::Api api, const std::string& names) {
  static std::mutex mutex;
  static std::map<std::pair<ort::Api, std::string>, ort::CustomOpDomain*> all;
  const std::lock_guard lock(mutex);
  if (const auto found = all.find({api, names}); found != all.end()) return found->second;
  DomainPtr domain(new_domain(api, kDomain), {api});
  const std::string list = "," + names + ",";
  fill(api, domain.get(), descriptors(),
       [&](const std::string& name) { return list.find("," + name + ",") != std::string::npos; });
  return all.emplace(std::pair(api, names), domain.release()).first->second;
}

}  // namespace

bool has_entry(ort::Api api, const ort::SessionOptions* options, const char* key) {
  int found = 0;
  check(api, ort::HasSessionConfigEntry(api, options, key, &found));
  return found != 0;
}

std::string entry_of(ort::Api api, const ort::SessionOptions* options, const char* key) {
  size_t size = 0;  // with the final 0
  check(api, ort::GetSessionConfigEntry(api, options, key, nullptr, &size));
  std::string value(size, '\0');
  check(api, ort::GetSessionConfigEntry(api, options, key, value.data(), &size));
  value.resize(size - 1);
  return value;
}

std::vector<ort::CustomOpDomain*> file_domains(ort::Api api) { return {domains_of(api).graph, domains_of(api).file}; }

DomainPtr nested_domain(ort::Api api, std::string_view model) {
  DomainPtr domain(new_domain(api, kNestedDomain), {api});
  const auto in_model = [&](const std::string& name) { return may_have(model, name); };
  fill(api, domain.get(), descriptors(), in_model);
  fill(api, domain.get(), file_descriptors(), in_model);
  return domain;
}

}  // namespace fa

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api api = base->get_api(ort::kApiVersion);
  if (api == nullptr) return nullptr;
  return fa::guarded(api, [&] {
    fa::note_version(api, base->version());
    if (fa::has_entry(api, options, fa::kHasOperators) || fa::has_entry(api, options, fa::kRegistered)) return;
    fa::check(api, ort::AddSessionConfigEntry(api, options, fa::kRegistered, "1"));
    if (fa::has_entry(api, options, fa::kOperators)) {
      ort::CustomOpDomain* domain = fa::domain_of(api, fa::entry_of(api, options, fa::kOperators));
      return fa::check(api, ort::AddCustomOpDomain(api, options, domain));
    }
    for (ort::CustomOpDomain* domain : fa::file_domains(api)) fa::check(api, ort::AddCustomOpDomain(api, options, domain));
  });
}

#if defined(_WIN32)
extern "C" __declspec(dllimport) int __stdcall GetModuleHandleExW(unsigned long, const wchar_t*, void**);

namespace {

// Windows has no -z nodelete (CMakeLists.txt), so the library counts itself among those that stay when it is loaded.
[[maybe_unused]] const int stays_loaded = [] {
  constexpr unsigned long kPin = 1, kOfThisAddress = 4;
  void* self = nullptr;
  return GetModuleHandleExW(kPin | kOfThisAddress, reinterpret_cast<const wchar_t*>(&RegisterCustomOps), &self);
}();

}  // namespace
#endif
