// A program without Python: it runs a model in ONNX Runtime, with the library as execution provider, once for each plan.
//
//     plan_host RUNTIME LIBRARY MODEL LEVEL FLOATS [PLAN ...]
//
// RUNTIME is libonnxruntime.so, and LEVEL the number of the optimisation level. The model has the inputs query, key and
// value, float32 [2, 4, 8, 16], whose values follow each other in the file FLOATS, and the output out of the same shape.
// PLAN is a file or a folder; for "-" no option names one, and for "without" the session has no provider. For each PLAN
// the bytes of the output go to standard output. A session that cannot be made, or does not run, ends the program.
//
// With failing_malloc.cc preloaded, K@PLAN lets the K-th allocation of the library fail while the session is made, and the
// program says how many there were.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ep_abi.hpp"

// Of failing_malloc.cc. Null without it.
extern "C" __attribute__((weak)) void fail_allocation(long number);
extern "C" __attribute__((weak)) long count_allocations();

namespace {

using ort::Slot;

constexpr const char* kName = "FaCompilerExecutionProvider";
constexpr auto kVerbose = static_cast<ort::Severity>(0);  // the log tells where the nodes are placed
constexpr size_t kCount = 2 * 4 * 8 * 16;

enum class GraphOptimizationLevel : int {};

// clang-format off
constexpr Slot<ort::Status*(const ort::Env*, const ort::PathChar*, const ort::SessionOptions*, ort::Session**)> CreateSession{7};
constexpr Slot<ort::Status*(ort::SessionOptions**)> CreateSessionOptions{10};
constexpr Slot<ort::Status*(ort::SessionOptions*, GraphOptimizationLevel)> SetSessionGraphOptimizationLevel{23};
constexpr Slot<ort::Status*(ort::Env*, const char*, const ort::PathChar*)> RegisterExecutionProviderLibrary{301};
// clang-format on

ort::Api api;

void check(ort::Status* status) {
  if (status == nullptr) return;
  std::fprintf(stderr, "failed: %s\n", ort::GetErrorMessage(api, status));
  std::exit(1);
}

const ort::EpDevice* device_of(ort::Env* env) {
  const ort::EpDevice* const* devices = nullptr;
  size_t count = 0;
  check(ort::GetEpDevices(api, env, &devices, &count));
  for (size_t i = 0; i < count; ++i) {
    if (std::strcmp(ort::EpDevice_EpName(api, devices[i]), kName) == 0) return devices[i];
  }
  std::fprintf(stderr, "failed: no device\n");
  std::exit(1);
}

void run(ort::Session* session, std::vector<float>& floats) {
  ort::MemoryInfo* memory = nullptr;
  check(ort::CreateCpuMemoryInfo(api, ort::AllocatorKind::device, ort::MemoryType::standard, &memory));
  const int64_t shape[] = {2, 4, 8, 16};
  const char* names[] = {"query", "key", "value"};
  const char* out = "out";
  ort::Value* inputs[3];
  for (size_t i = 0; i < 3; ++i) {
    check(ort::CreateTensorWithDataAsOrtValue(api, memory, floats.data() + i * kCount, kCount * sizeof(float), shape, 4,
                                         ort::Element::float32, &inputs[i]));
  }
  ort::Value* output = nullptr;
  check(ort::Run(api, session, nullptr, names, inputs, 3, &out, 1, &output));
  void* data = nullptr;
  check(ort::GetTensorMutableData(api, output, &data));
  std::fwrite(data, sizeof(float), kCount, stdout);
  ort::ReleaseValue(api, output);
  for (ort::Value* input : inputs) ort::ReleaseValue(api, input);
  ort::ReleaseMemoryInfo(api, memory);
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) return 2;
  void* runtime = dlopen(words[1], RTLD_NOW);
  if (runtime == nullptr) return 2;
  const auto base = reinterpret_cast<const ort::ApiBase* (*)()>(dlsym(runtime, "OrtGetApiBase"));
  api = base()->get_api(ort::kFirstEpMinor);
  std::vector<float> floats(3 * kCount);
  std::FILE* file = std::fopen(words[5], "rb");
  if (file == nullptr || std::fread(floats.data(), sizeof(float), floats.size(), file) != floats.size()) return 2;
  std::fclose(file);
  ort::Env* env = nullptr;
  check(ort::CreateEnv(api, kVerbose, "host", &env));
  check(RegisterExecutionProviderLibrary(api, env, kName, words[2]));
  const ort::EpDevice* device = device_of(env);
  for (int i = 6; i < count; ++i) {
    std::string plan = words[i];
    std::fprintf(stderr, "plan %s\n", words[i]);
    const size_t at = plan.find('@');
    const long failing = at == std::string::npos ? -1 : std::atol(plan.c_str());
    if (failing >= 0) plan.erase(0, at + 1);
    const char* value = plan.c_str();
    ort::SessionOptions* options = nullptr;
    check(CreateSessionOptions(api, &options));
    check(SetSessionGraphOptimizationLevel(api, options, GraphOptimizationLevel{std::atoi(words[4])}));
    const char* key = "plan";
    if (plan != "without") {
      check(ort::SessionOptionsAppendExecutionProvider_V2(api, options, env, &device, 1, &key, &value, plan == "-" ? 0 : 1));
    }
    ort::Session* session = nullptr;
    if (failing >= 0) fail_allocation(failing);
    ort::Status* made = CreateSession(api, env, words[3], options, &session);
    if (failing >= 0) std::fprintf(stderr, "allocations %ld\n", count_allocations());
    check(made);
    run(session, floats);
    ort::ReleaseSession(api, session);
    ort::ReleaseSessionOptions(api, options);
  }
  ort::ReleaseEnv(api, env);
  return 0;
}
