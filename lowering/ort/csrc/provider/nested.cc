#include "nested.hpp"

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "value_types.hpp"

namespace fa::provider {
namespace {

constexpr int kFatal = static_cast<int>(ort::Severity::fatal);

// The observer of the session that this thread makes, and what it has thrown: nothing may be thrown through the runtime.
struct Watch {
  ort::Api api;
  Observer* observer;
  std::exception_ptr error;
};
thread_local Watch* watch = nullptr;

// The functions of a node that never runs.
struct NoComputeInfo : ort::ep::NodeComputeInfo {
  NoComputeInfo() {
    create_state = [](ort::ep::NodeComputeInfo*, ort::NodeComputeContext*, void** state) {
      *state = nullptr;
      return static_cast<ort::Status*>(nullptr);
    };
    compute = [](ort::ep::NodeComputeInfo*, void*, ort::KernelContext*) { return static_cast<ort::Status*>(nullptr); };
    release_state = [](ort::ep::NodeComputeInfo*, void*) {};
  }
};

struct NestedProvider : ort::ep::Provider {
  NestedProvider() {
    name = [](const ort::ep::Provider*) { return kName; };
    get_capability = [](ort::ep::Provider*, const ort::Graph* graph, ort::GraphSupportInfo* support) {
      if (watch == nullptr || watch->error != nullptr) return static_cast<ort::Status*>(nullptr);
      try {
        watch->observer->see(watch->api, graph, support);
      } catch (...) {
        watch->error = std::current_exception();
      }
      return static_cast<ort::Status*>(nullptr);
    };
    compile = [](ort::ep::Provider* self, const ort::Graph**, const ort::Node**, size_t count,
                 ort::ep::NodeComputeInfo** infos, ort::Node**) {
      for (size_t i = 0; i < count; ++i) infos[i] = &static_cast<NestedProvider*>(self)->info;
      return static_cast<ort::Status*>(nullptr);
    };
    release_node_compute_infos = [](ort::ep::Provider*, ort::ep::NodeComputeInfo**, size_t) {};
  }

  NoComputeInfo info;
};

// Claims the nodes of a graph.
class Claimer : public Observer {
 public:
  void see(ort::Api api, const ort::Graph* graph, ort::GraphSupportInfo* support) override {
    if (has_claimed) return;  // the claimed node is shown again
    const auto nodes = all_of<ort::Node>(api, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph);
    const ort::ep::FusionOptions fusion{.drop_constant_initializers = true};
    const ort::Api ep_api = ort::GetEpApi(api);
    check(api, ort::ep::EpGraphSupportInfo_AddNodesToFuse(ep_api, support, nodes.data(), nodes.size(), &fusion));
    has_claimed = true;
  }

  bool has_claimed = false;
};

// A device of ours for options without one: the session has the provider by its name.
void add_device(ort::Api api, ort::Env* env, ort::SessionOptions* options) {
  const ort::EpDevice* const* devices = nullptr;
  size_t count = 0;
  check(api, ort::GetEpDevices(api, env, &devices, &count));
  for (size_t i = 0; i < count; ++i) {
    if (std::strcmp(ort::EpDevice_EpName(api, devices[i]), kName) != 0) continue;
    check(api, ort::SessionOptionsAppendExecutionProvider_V2(api, options, env, &devices[i], 1, nullptr, nullptr, 0));
    return;
  }
}

void add_files(ort::Api api, ort::SessionOptions* options, const std::vector<Weight>& weights) {
  using File = std::basic_string<ort::PathChar>;
  std::vector<File> names;  // of ASCII
  for (const Weight& weight : weights) names.emplace_back(weight.file.begin(), weight.file.end());
  std::vector<const ort::PathChar*> files;
  for (const File& name : names) files.push_back(name.c_str());
  std::vector<char*> buffers;
  std::vector<size_t> sizes;
  for (const Weight& weight : weights) {
    buffers.push_back(static_cast<char*>(const_cast<void*>(weight.data)));
    sizes.push_back(weight.bytes);
  }
  if (files.empty()) return;
  check(api, ort::AddExternalInitializersFromFilesInMemory(api, options, files.data(), buffers.data(), sizes.data(),
                                                           files.size()));
}

// What no session inside another may have.
void set_nested(ort::Api api, ort::SessionOptions* options) {
  check(api, ort::AddSessionConfigEntry(api, options, kNested, "1"));
  check(api, ort::AddSessionConfigEntry(api, options, "session.load_model_format", "ONNX"));
  check(api, ort::AddSessionConfigEntry(api, options, "session.disable_cpu_ep_fallback", "0"));
  check(api, ort::DisableProfiling(api, options));
}

}  // namespace

ort::ep::Provider* nested_provider() {
  static NestedProvider provider;
  return &provider;
}

constexpr ort::PathChar kNoPath = 0;

OptionsPtr nested_options(ort::Api api, const ort::SessionOptions* options, const ort::Logger* logger) {
  OptionsPtr copy = copy_of(api, options);
  set_nested(api, copy.get());
  check(api, ort::SetOptimizedModelFilePath(api, copy.get(), &kNoPath));
  ort::Severity told{};
  check(api, ort::Logger_GetLoggingSeverityLevel(api, logger, &told));
  if (told >= ort::Severity::warning) check(api, ort::SetSessionLogSeverityLevel(api, copy.get(), kFatal));
  return copy;
}

MadeSession make_session(ort::Api api, std::string_view model, const std::vector<Weight>& weights,
                         ort::SessionOptions* options, Observer* observer) {
  add_files(api, options, weights);
  MadeSession made{environment(api), SessionPtr(nullptr, {api})};
  Watch own{api, observer, nullptr};
  Watch* const outer = std::exchange(watch, observer == nullptr ? nullptr : &own);
  ort::Session* session = nullptr;
  ort::Status* status = ort::CreateSessionFromArray(api, made.env.get(), model.data(), model.size(), options, &session);
  watch = outer;
  made.session.reset(session);
  if (own.error != nullptr) {
    if (status != nullptr) ort::ReleaseStatus(api, status);
    std::rethrow_exception(own.error);
  }
  check(api, status);
  return made;
}

std::string fault_of_claims(ort::Api api, const ort::SessionOptions* options, const std::vector<Constant>& constants) {
  const std::string model = trial_model(constants);
  for (const bool is_named : {false, true}) {
    const OptionsPtr copy = copy_of(api, options);
    set_nested(api, copy.get());
    // The file in this format would not be written: the runtime sees the claim before.
    check(api, ort::AddSessionConfigEntry(api, copy.get(), "session.save_model_format", "ONNX"));
    check(api, ort::SetSessionLogSeverityLevel(api, copy.get(), kFatal));
    if (is_named) add_device(api, environment(api).get(), copy.get());
    Claimer claimer;
    try {
      make_session(api, model, weights_of(constants), copy.get(), &claimer);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    if (claimer.has_claimed) break;
  }
  return "";
}

bool makes_a_session(ort::Api api, ort::SessionOptions* options) {
  try {
    make_session(api, trial_model({}), {}, options, nullptr);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

SharedNames::SharedNames(ort::Api api, const ort::SessionOptions* options) : api_(api), options_(copy_of(api, options)) {
  ort::MemoryInfo* raw = nullptr;
  check(api, ort::CreateCpuMemoryInfo(api, ort::AllocatorKind::device, ort::MemoryType::standard, &raw));
  const std::unique_ptr<ort::MemoryInfo, Deleter<ort::ReleaseMemoryInfo>> memory(raw, {api});
  const int64_t one = 1;
  ort::Value* value = nullptr;
  check(api, ort::CreateTensorWithDataAsOrtValue(api, raw, &number_, sizeof(number_), &one, 1, ort::Element::float32, &value));
  value_ = ValuePtr(value, {api});
}

bool SharedNames::has(const std::string& name) {
  ort::Status* status = ort::AddInitializer(api_, options_.get(), name.c_str(), value_.get());
  if (status == nullptr) return false;
  ort::ReleaseStatus(api_, status);
  return true;
}

std::vector<Weight> weights_of(const std::vector<Constant>& constants) {
  std::vector<Weight> weights;
  for (const Constant& constant : constants) weights.push_back(constant.weight);
  return weights;
}

}  // namespace fa::provider
