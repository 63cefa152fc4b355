// The plugin execution provider: CreateEpFactories and ReleaseEpFactory, which ONNX Runtime looks up in the library, and
// FaCompilerSetMatcher, by which the Python package gives it the matcher.
//
// GetCapability writes the graph of a session as a model. A plan that has this graph answers with the model of the fused
// graph; if there is none, the matcher does. The provider tries whether the options of the session allow a claimed graph,
// makes a session of the answer inside the caller's, and compares what ONNX Runtime has read there with the graph. Only if
// all this succeeds does it claim the graph: whatever fails before leaves the graph to the other providers. Memory that
// runs out is such a failure, so CreateEp and Compile, whose errors would end the caller's session, must not fail for it.
//
// The claim is the whole graph, without the nodes that make or read what no claimed node can give or take (part.hpp).
// Claimed nodes become one node, so no node of another provider may lie on a path between them. The nodes that fusion
// removes are those of all layers, and of the mask that the layers share. All other nodes of the model lie between them. The
// session inside has the same runtime, options and other providers, so that only the attention changes.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "../environment.hpp"
#include "../op.hpp"
#include "../register.hpp"
#include "formals.hpp"
#include "fused_session.hpp"
#include "graph_model.hpp"
#include "nested.hpp"
#include "part.hpp"
#include "plan.hpp"
#include "value_types.hpp"

#define FA_VISIBLE extern "C" __attribute__((visibility("default")))

namespace fa::provider {
namespace {

constexpr const char* kVendor = "fa_compiler";

// Where the plans are: an option of the session, and a variable of the environment for sessions without it.
constexpr const char* kPlanOption = "ep.facompilerexecutionprovider.plan";
constexpr const char* kPlanVariable = "FA_COMPILER_PLAN";
// How ONNX Runtime names the provider's options among those of the session.
constexpr std::string_view kOptions = std::string_view(kPlanOption).substr(0, std::string_view(kPlanOption).rfind('.') + 1);

// The matcher calls `take` once, with its answer, before it returns. `weights` are the addresses of GraphModel::weights, and
// `read` of the answer are the places of those whose values it has looked at. `model` of the answer is null if nothing is to
// be replaced.
using TakeAnswer = void (*)(void* answer, const char* model, size_t bytes, const int64_t* sizes, size_t count,
                            const uint64_t* read, size_t read_count, int severity, const char* message);
using Matcher = void (*)(const char* model, size_t bytes, const void* const* weights, size_t count, void* answer,
                         TakeAnswer take);
// Is told why a session runs without fused attention.
using Failed = void (*)(const char* reason);

std::atomic<Matcher> matcher{nullptr};
std::atomic<Failed> failed{nullptr};
thread_local bool have_operators = false;

void take_answer(void* answer, const char* model, size_t bytes, const int64_t* sizes, size_t count, const uint64_t* read,
                 size_t read_count, int severity, const char* message) {
  auto& taken = *static_cast<std::optional<Answer>*>(answer);
  try {
    taken = Answer{std::string(model == nullptr ? "" : model, bytes), {sizes, sizes + count}, {read, read + read_count},
                   static_cast<ort::Severity>(severity), message};
  } catch (const std::bad_alloc&) {  // may not reach the matcher, which is not C++
    taken.reset();
  }
}

// The runs of a session that have not ended, with their options. The options of a run tell, among others, that the caller
// wants it to end, and only the runtime can read them.
class Runs {
 public:
  void start(const ort::RunOptions* options) {
    const std::lock_guard lock(mutex_);
    active_.push_back({std::this_thread::get_id(), options});
  }

  void end(const ort::RunOptions* options) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(active_.rbegin(), active_.rend(), [&](const Run& run) { return run.options == options; });
    if (found != active_.rend()) active_.erase(std::next(found).base());
  }

  // Those of the run that computes in this thread. With parallel execution the runtime computes in threads of its own: then
  // they are known only if there is one run. Null if they are not known.
  const ort::RunOptions* current() const {
    const std::lock_guard lock(mutex_);
    const auto own = std::find_if(active_.rbegin(), active_.rend(),
                                  [id = std::this_thread::get_id()](const Run& run) { return run.thread == id; });
    if (own != active_.rend()) return own->options;
    return active_.size() == 1 ? active_.front().options : nullptr;
  }

 private:
  struct Run {
    std::thread::id thread;
    const ort::RunOptions* options;
  };

  mutable std::mutex mutex_;
  std::vector<Run> active_;
};

// The fused graph of a session, from GetCapability to the end of the session.
struct Fused {
  FusedSession session;
  std::vector<std::string> inputs, outputs;  // of the graph
  OutputSizes sizes;
  std::shared_ptr<const Runs> runs;
};

// The node that stands for the graph.
struct ComputeInfo : ort::ep::NodeComputeInfo {
  ComputeInfo(ort::Api api, std::shared_ptr<const Fused> fused);

  // Finds the ports of the node. Allocates nothing: an error of Compile would end the session.
  void connect(const ort::Node* node);

  ort::Api api;
  std::shared_ptr<const Fused> fused;
  Ports ports;

 private:
  template <class Count, class Get>
  void connect(const ort::Node* node, const Count& count_of, const Get& get, const std::vector<std::string>& names,
               std::vector<size_t>& places);

  std::vector<const ort::ValueInfo*> values_;
};

// ONNX Runtime has just freed the weights of the caller's session. glibc would keep that memory for later.
void return_free_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

ComputeInfo::ComputeInfo(ort::Api api, std::shared_ptr<const Fused> of)
    : api(api), fused(std::move(of)), values_(std::max(fused->inputs.size(), fused->outputs.size())) {
  ports.inputs.reserve(fused->inputs.size());
  ports.outputs.reserve(fused->outputs.size());
  create_state = [](ort::ep::NodeComputeInfo*, ort::NodeComputeContext*, void** state) {
    *state = nullptr;
    return_free_memory();
    return static_cast<ort::Status*>(nullptr);
  };
  compute = [](ort::ep::NodeComputeInfo* self, void*, ort::KernelContext* context) {
    const ComputeInfo& info = *static_cast<ComputeInfo*>(self);
    const Fused& fused = *info.fused;
    ort::Status* result = nullptr;
    ort::Status* failure = guarded(info.api, [&] {
      result = fused.session.run(info.ports, fused.inputs, fused.outputs, fused.sizes, fused.runs->current(), context);
    });
    return failure != nullptr ? failure : result;
  };
  release_state = [](ort::ep::NodeComputeInfo*, void*) {};
}

void ComputeInfo::connect(const ort::Node* node) {
  connect(node, ort::Node_GetNumInputs, ort::Node_GetInputs, fused->inputs, ports.inputs);
  connect(node, ort::Node_GetNumOutputs, ort::Node_GetOutputs, fused->outputs, ports.outputs);
}

template <class Count, class Get>
void ComputeInfo::connect(const ort::Node* node, const Count& count_of, const Get& get,
                          const std::vector<std::string>& names, std::vector<size_t>& places) {
  size_t count = 0;
  check(api, count_of(api, node, &count));
  if (count > names.size()) throw Error{ort::ErrorCode::fail, "the node has more inputs or outputs than the graph"};
  check(api, get(api, node, values_.data(), count));
  for (size_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    check(api, ort::GetValueInfoName(api, values_[i], &name));
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      throw Error{ort::ErrorCode::fail, std::string("the fused graph has no input or output '") + name + "'"};
    }
    places.push_back(static_cast<size_t>(found - names.begin()));
  }
}

void log(ort::Api api, const ort::Logger* logger, ort::Severity severity, const char* text) {
#if defined(_WIN32)
  constexpr const wchar_t* kFile = L"FaCompilerExecutionProvider";
#else
  constexpr const char* kFile = kName;
#endif
  ort::Status* status = ort::Logger_LogMessage(api, logger, severity, text, kFile, 0, "GetCapability");
  if (status != nullptr) ort::ReleaseStatus(api, status);
}

// Allocates nothing itself: the reason may be that memory has run out.
void log_failure(ort::Api api, const ort::Logger* logger, const char* reason) {
  char text[1024];
  std::snprintf(text, sizeof(text), "the graph runs without fused attention: %s", reason);
  log(api, logger, ort::Severity::warning, text);
  if (const Failed tell = failed.load()) tell(reason);
}

// Runs `body`, and writes the exception that it throws to the log.
template <class Body>
void logged(ort::Api api, const ort::Logger* logger, Body body) {
  try {
    body();
  } catch (const Error& error) {
    log_failure(api, logger, error.text.c_str());
  } catch (const std::exception& error) {
    log_failure(api, logger, error.what());
  }
}

class Provider : public ort::ep::Provider {
 public:
  // `runtime` is the version of ONNX Runtime.
  Provider(ort::Api api, const std::string& runtime, const ort::SessionOptions* options, const ort::Logger* logger);

 private:
  static Provider& of(ort::ep::Provider* self) { return *static_cast<Provider*>(self); }

  void claim(const ort::Graph* graph, ort::GraphSupportInfo* support);
  std::shared_ptr<const Fused> fused(const ort::Graph* graph, const Part& part);
  std::vector<Constant> constants_outside(const GraphModel& model) const;
  std::optional<Answer> answer(const GraphModel& model);
  void log(ort::Severity severity, const char* text) const { provider::log(api_, logger_, severity, text); }
  void log_failure(const char* reason) const { provider::log_failure(api_, logger_, reason); }

  ort::Api api_;
  const ort::Logger* logger_;
  OptionsPtr options_;  // a copy of those of the session, until it runs
  std::once_flag has_run_;
  std::shared_ptr<Runs> runs_ = std::make_shared<Runs>();
  std::optional<Plans> plans_;
  bool answered_ = false;  // whether a graph of the session was matched
  std::unique_ptr<ComputeInfo> claimed_;  // between GetCapability and Compile
};

// The plans that the session may use. A session without the option has those of the environment.
std::optional<Plans> plans_of(ort::Api api, const std::string& runtime, const ort::SessionOptions* options) {
  std::string place;
  if (has_entry(api, options, kPlanOption)) {
    place = entry_of(api, options, kPlanOption);
  } else {
    place = environment_variable(kPlanVariable);
  }
  if (place.empty()) return std::nullopt;
  return Plans(place, runtime);
}

// Warns of options that the provider does not have, such as a misspelt one.
void warn_of_unknown(ort::Api api, const ort::SessionOptions* options, const ort::Logger* logger) {
  ort::KeyValuePairs* pairs = nullptr;
  check(api, ort::GetSessionOptionsConfigEntries(api, options, &pairs));
  const PairsPtr owner(pairs, {api});
  const char* const *keys = nullptr, *const *values = nullptr;
  size_t count = 0;
  ort::GetKeyValuePairs(api, pairs, &keys, &values, &count);
  for (size_t i = 0; i < count; ++i) {
    const std::string_view key = keys[i];
    if (key.substr(0, kOptions.size()) != kOptions || key == kPlanOption) continue;
    const std::string name(key.substr(kOptions.size()));
    if (name == kBringsOperators) continue;
    log(api, logger, ort::Severity::warning, ("the provider has no option '" + name + "'; its option is 'plan'").c_str());
  }
}

// Whether a session writes the compiled graphs of its providers to a file. It is left alone.
bool writes_context(ort::Api api, const ort::SessionOptions* options) {
  constexpr const char* kContext = "ep.context_enable";
  return has_entry(api, options, kContext) && entry_of(api, options, kContext) != "0";
}

Provider::Provider(ort::Api api, const std::string& runtime, const ort::SessionOptions* options, const ort::Logger* logger)
    : api_(api), logger_(logger), options_(copy_of(api, options)), plans_(plans_of(api, runtime, options)) {
  name = [](const ort::ep::Provider*) { return kName; };
  get_capability = [](ort::ep::Provider* self, const ort::Graph* graph, ort::GraphSupportInfo* support) {
    Provider& provider = of(self);
    // An error would end in the log, too, but with the runtime's words.
    logged(provider.api_, provider.logger_, [&] { provider.claim(graph, support); });
    return static_cast<ort::Status*>(nullptr);
  };
  compile = [](ort::ep::Provider* self, const ort::Graph**, const ort::Node** nodes, size_t count,
               ort::ep::NodeComputeInfo** infos, ort::Node**) {
    Provider& provider = of(self);
    return guarded(provider.api_, [&] {
      if (count != 1 || provider.claimed_ == nullptr) throw Error{ort::ErrorCode::fail, "the graph is not claimed"};
      provider.claimed_->connect(nodes[0]);
      infos[0] = provider.claimed_.release();
    });
  };
  release_node_compute_infos = [](ort::ep::Provider*, ort::ep::NodeComputeInfo** infos, size_t count) {
    for (size_t i = 0; i < count; ++i) delete static_cast<ComputeInfo*>(infos[i]);
  };
  on_run_start = [](ort::ep::Provider* self, const ort::RunOptions* options) {
    Provider& provider = of(self);
    std::call_once(provider.has_run_, [&] { provider.options_.reset(); });  // they may hold weights of the caller
    return guarded(provider.api_, [&] { provider.runs_->start(options); });
  };
  on_run_end = [](ort::ep::Provider* self, const ort::RunOptions* options, bool) {
    of(self).runs_->end(options);
    return static_cast<ort::Status*>(nullptr);
  };
}

// Whether the graph belongs to a node, or reads values of a graph around it. 1.23 does not tell the node.
bool is_inside_another(ort::Api api, const ort::Graph* graph) {
  const ort::Node* parent = nullptr;
  check(api, ort::Graph_GetParentNode(api, graph, &parent));
  if (parent != nullptr) return true;
  for (const auto* node : all_of<ort::Node>(api, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph)) {
    for (const auto* value : all_of<ort::ValueInfo>(api, ort::Node_GetNumInputs, ort::Node_GetInputs, node)) {
      bool is_from_outside = false;
      if (value != nullptr) check(api, ort::ValueInfo_IsFromOuterScope(api, value, &is_from_outside));
      if (is_from_outside) return true;
    }
  }
  return false;
}

// The provider that has a node already; empty if none has one.
std::string provider_before(ort::Api api, const std::vector<const ort::Node*>& nodes) {
  for (const auto* node : nodes) {
    const char* name = nullptr;
    check(api, ort::Node_GetEpName(api, node, &name));
    if (name != nullptr && *name != 0) return name;
  }
  return "";
}

void Provider::claim(const ort::Graph* graph, ort::GraphSupportInfo* support) {
  // A subgraph belongs to its node, which the claim of the main graph holds.
  if (is_inside_another(api_, graph)) return;
  const auto nodes = all_of<ort::Node>(api_, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph);
  if (const std::string before = provider_before(api_, nodes); !before.empty()) {
    // A graph is shown again after a claim, and after the runtime has written out functions in a graph without one.
    if (before != kName && !answered_) log_failure((before + " comes first").c_str());
    return;
  }
  answered_ = true;
  if (!plans_ && matcher.load() == nullptr) {
    log(ort::Severity::info, "nothing is fused: there is no plan, and no matcher in this process");
    return;
  }
  const Part part = part_of(api_, graph);
  if (part.nodes.empty()) return;
  auto found = fused(graph, part);
  if (found == nullptr) return;
  claimed_ = std::make_unique<ComputeInfo>(api_, std::move(found));
  const ort::ep::FusionOptions fusion{.drop_constant_initializers = true};
  const ort::Api ep_api = ort::GetEpApi(api_);
  check(api_, ort::ep::EpGraphSupportInfo_AddNodesToFuse(ep_api, support, part.nodes.data(), part.nodes.size(), &fusion));
}

// The answer of a plan or, if no plan has one, of the matcher. Empty if there is none.
std::optional<Answer> Provider::answer(const GraphModel& model) {
  if (plans_) {
    const auto refused = [&](const std::string& reason) { log(ort::Severity::warning, reason.c_str()); };
    if (auto found = plans_->answer(model, refused)) return found;
  }
  const Matcher match = matcher.load();
  if (match == nullptr) return std::nullopt;
  std::vector<const void*> weights;
  for (const Weight& weight : model.weights) weights.push_back(weight.data);
  std::optional<Answer> answer;
  match(model.bytes.data(), model.bytes.size(), weights.data(), weights.size(), &answer, take_answer);
  if (!answer) throw std::bad_alloc();
  return answer;
}

// Throws an Error if the caller gives the value of a constant that the answer depends on (AddInitializer). The graph shows the
// value of the file. Other shared constants are those of the session inside, too.
void check_shared(ort::Api api, const ort::SessionOptions* options, const GraphModel& model, const Answer& answer) {
  std::set<std::string> read = model.copied;
  for (const uint64_t place : answer.read) {
    if (place < model.weights.size()) read.insert(model.weights[place].name);
  }
  SharedNames shared(api, options);
  for (const std::string& name : read) {
    if (!shared.has(name)) continue;
    throw Error{ort::ErrorCode::fail, "the options of the session give a value of their own for the constant '" + name + "'"};
  }
}

std::shared_ptr<const Fused> Provider::fused(const ort::Graph* graph, const Part& part) {
  const GraphModel model = model_of(api_, graph, part);
  const std::optional<Answer> found = answer(model);
  if (!found) return nullptr;
  if (!found->message.empty()) log(found->severity, found->message.c_str());
  if (found->model.empty()) return nullptr;
  const OutputSizes sizes(found->sizes, model.inputs.size(), model.outputs.size());
  check_shared(api_, options_.get(), model, *found);
  const OptionsPtr options = nested_options(api_, options_.get(), logger_);
  std::string fused_model = found->model;
  std::vector<Weight> weights = model.weights;
  if (const auto outside = constants_outside(model); !outside.empty()) {
    fused_model = with_constants_outside(fused_model, outside);
    weights = weights_of(outside);
  }
  FusedSession session(api_, options.get(), fused_model, weights, formals_of(api_, graph));
  return std::make_shared<Fused>(Fused{std::move(session), model.inputs, model.outputs, sizes, runs_});
}

// The constants that the session inside has to have as external data; none for most sessions. The caller may have given the
// values of some, by AddExternalInitializers. Their names cannot be asked for, and every session with these options has to have
// them. Mostly they are large weights. The small constants are outside only if those do not suffice, because ONNX Runtime
// refuses some operators with external axes or sizes. Throws an Error if ONNX Runtime makes no session with these options and
// a claimed node.
std::vector<Constant> Provider::constants_outside(const GraphModel& model) const {
  const std::string fault = fault_of_claims(api_, options_.get(), {});
  if (fault.empty()) return {};
  if (makes_a_session(api_, nested_options(api_, options_.get(), logger_).get())) {
    throw Error{ort::ErrorCode::fail, "the options of the session allow no claimed graph: " + fault};
  }
  std::vector<Constant> large;
  for (const Constant& constant : model.constants) {
    if (constant.is_large()) large.push_back(constant);
  }
  if (!large.empty() && fault_of_claims(api_, options_.get(), large).empty()) return large;
  const std::string other = fault_of_claims(api_, options_.get(), model.constants);
  if (other.empty()) return model.constants;
  throw Error{ort::ErrorCode::fail, "the options of the session allow no session inside it: " + other};
}

// Claims nothing: the provider of sessions that are left alone, and of those for which there is no memory for another one.
struct Idle : ort::ep::Provider {
  Idle() {
    name = [](const ort::ep::Provider*) { return kName; };
    get_capability = [](ort::ep::Provider*, const ort::Graph*, ort::GraphSupportInfo*) {
      return static_cast<ort::Status*>(nullptr);
    };
    compile = [](ort::ep::Provider*, const ort::Graph**, const ort::Node**, size_t, ort::ep::NodeComputeInfo**,
                 ort::Node**) { return static_cast<ort::Status*>(nullptr); };
    release_node_compute_infos = [](ort::ep::Provider*, ort::ep::NodeComputeInfo**, size_t) {};
  }
};

// The factory lives until ONNX Runtime has released it and all its providers. The library may be unregistered while there
// are sessions, and a session calls the factory when it releases its provider.
class Factory : public ort::ep::Factory {
 public:
  // `runtime` is the version of ONNX Runtime, and `minor` its second number.
  Factory(ort::Api api, const std::string& runtime, int minor);

  // Ends one use of the factory: by ONNX Runtime, or by a provider.
  static void release(ort::ep::Factory* self) {
    if (of(self).users_.fetch_sub(1) == 1) delete static_cast<Factory*>(self);
  }

 private:
  static Factory& of(ort::ep::Factory* self) { return *static_cast<Factory*>(self); }

  // The options that a session gets with the device.
  PairsPtr device_options() const {
    ort::KeyValuePairs* pairs = nullptr;
    ort::CreateKeyValuePairs(api_, &pairs);
    if (!domains_.empty()) ort::AddKeyValuePair(api_, pairs, kBringsOperators, "1");
    return PairsPtr(pairs, {api_});
  }

  ort::Api api_;
  Idle idle_;
  std::string runtime_;
  std::atomic<size_t> users_{1};
  std::vector<ort::CustomOpDomain*> domains_;
};

Factory::Factory(ort::Api api, const std::string& runtime, int minor) : api_(api), runtime_(runtime) {
  version = static_cast<uint32_t>(std::min(minor, ort::kFirstEpDomainMinor));
  if (minor >= ort::kFirstEpDomainMinor) domains_ = file_domains(api);
  name = [](const ort::ep::Factory*) { return kName; };
  vendor = [](const ort::ep::Factory*) { return kVendor; };
  vendor_id = [](const ort::ep::Factory*) { return uint32_t{0}; };
  provider_version = [](const ort::ep::Factory*) { return kVersion; };
  create_data_transfer = [](ort::ep::Factory*, ort::DataTransfer** transfer) {
    *transfer = nullptr;  // all memory is the processor's
    return static_cast<ort::Status*>(nullptr);
  };
  is_stream_aware = [](const ort::ep::Factory*) { return false; };
  // One device: the processor.
  supported_devices = [](ort::ep::Factory* self, const ort::HardwareDevice* const* devices, size_t count,
                         ort::EpDevice** found, size_t most, size_t* found_count) {
    const ort::Api api = of(self).api_;
    *found_count = 0;
    for (size_t i = 0; i < count && *found_count < most && *found_count == 0; ++i) {
      if (ort::HardwareDevice_Type(api, devices[i]) != ort::DeviceKind::cpu) continue;
      const auto options = of(self).device_options();
      ort::Status* status = ort::ep::CreateEpDevice(ort::GetEpApi(api), self, devices[i], nullptr, options.get(), found);
      if (status != nullptr) return status;
      *found_count = 1;
    }
    return static_cast<ort::Status*>(nullptr);
  };
  create_provider = [](ort::ep::Factory* self, const ort::HardwareDevice* const*, const ort::KeyValuePairs* const*,
                       size_t, const ort::SessionOptions* options, const ort::Logger* logger,
                       ort::ep::Provider** provider) {
    Factory& factory = of(self);
    *provider = &factory.idle_;
    // An error would end the session.
    logged(factory.api_, logger, [&] {
      if (has_entry(factory.api_, options, kNested)) {
        *provider = nested_provider();
        return;
      }
      warn_of_unknown(factory.api_, options, logger);
      if (writes_context(factory.api_, options)) return;
      *provider = new Provider(factory.api_, factory.runtime_, options, logger);
    });
    factory.users_.fetch_add(1);
    return static_cast<ort::Status*>(nullptr);
  };
  release_provider = [](ort::ep::Factory* self, ort::ep::Provider* provider) {
    if (provider != &of(self).idle_ && provider != nested_provider()) delete static_cast<Provider*>(provider);
    release(self);
  };
  domain_count = [](ort::ep::Factory* self, size_t* count) {
    *count = have_operators ? 0 : of(self).domains_.size();
    return static_cast<ort::Status*>(nullptr);
  };
  domains = [](ort::ep::Factory* self, ort::CustomOpDomain** domains, size_t count) {
    const auto& own = of(self).domains_;
    std::copy_n(own.begin(), std::min(count, own.size()), domains);
    return static_cast<ort::Status*>(nullptr);
  };
}

}  // namespace
}  // namespace fa::provider

// ONNX Runtime calls this when the library is registered. Releases before kFirstEpMinor pass other arguments after the
// second.
FA_VISIBLE ort::Status* CreateEpFactories(const char*, const ort::ApiBase* base, const ort::Logger*,
                                          ort::ep::Factory** factories, size_t most, size_t* count) {
  const std::string version = base->version();
  int major = 0;
  int minor = 0;
  std::sscanf(version.c_str(), "%d.%d", &major, &minor);
  if (major > 1) minor = ort::kFirstEpDomainMinor;
  if (minor < ort::kFirstEpMinor) {
    const std::string text = "the provider of fa_compiler needs ONNX Runtime 1." + std::to_string(ort::kFirstEpMinor) +
                             " or newer; this is " + version;
    return ort::CreateStatus(base->get_api(ort::kApiVersion), ort::ErrorCode::not_implemented, text.c_str());
  }
  const ort::Api api = base->get_api(ort::kFirstEpMinor);
  return fa::guarded(api, [&] {
    if (most == 0) throw fa::Error{ort::ErrorCode::invalid_argument, "no room for a provider factory"};
    fa::note_version(api, version);
    factories[0] = new fa::provider::Factory(api, version, minor);
    *count = 1;
  });
}

FA_VISIBLE ort::Status* ReleaseEpFactory(ort::ep::Factory* factory) {
  fa::provider::Factory::release(factory);
  return nullptr;
}

// Sets the function that fuses graphs, and the one that is told of failures, for all sessions that are made from now on.
// Null: there is none.
FA_VISIBLE void FaCompilerSetMatcher(fa::provider::Matcher match, fa::provider::Failed tell) {
  fa::provider::matcher.store(match);
  fa::provider::failed.store(tell);
}

// Says whether the options to which this thread adds the device have our operators already (RegisterCustomOps). ONNX
// Runtime would warn that the device brings them a second time.
FA_VISIBLE void FaCompilerHaveOperators(int have) { fa::provider::have_operators = have != 0; }
