#include "fused_session.hpp"

#include <cstring>

#include "../register.hpp"

namespace fa::provider {
namespace {

// The runtime's only environment, which exists already. The reference keeps it until the session is released.
EnvPtr environment(ort::Api api) {
  ort::Env* env = nullptr;
  check(api, ort::CreateEnv(api, ort::Severity::warning, "fa_compiler", &env));
  return EnvPtr(env, {api});
}

Shape shape_of(ort::Api api, const ort::Value* value) {
  ort::TensorInfo* raw = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &raw));
  const std::unique_ptr<ort::TensorInfo, Deleter<ort::ReleaseTensorTypeAndShapeInfo>> info(raw, {api});
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, raw, &rank));
  Shape shape(rank);
  check(api, ort::GetDimensions(api, raw, shape.data(), rank));
  return shape;
}

ort::Value* output_value(ort::Api api, ort::KernelContext* context, size_t index, const Shape& shape) {
  ort::Value* value = nullptr;
  check(api, ort::KernelContext_GetOutput(api, context, index, shape.data(), shape.size(), &value));
  return value;
}

void copy_output(ort::Api api, ort::KernelContext* context, size_t index, const ort::Value* from) {
  ort::Value* to = output_value(api, context, index, shape_of(api, from));
  size_t bytes = 0;
  check(api, ort::GetTensorSizeInBytes(api, from, &bytes));
  void* source = nullptr;
  void* target = nullptr;
  check(api, ort::GetTensorMutableData(api, const_cast<ort::Value*>(from), &source));
  check(api, ort::GetTensorMutableData(api, to, &target));
  if (bytes > 0) std::memcpy(target, source, bytes);
}

std::vector<const char*> names_of(const std::vector<Port>& ports) {
  std::vector<const char*> names;
  for (const Port& port : ports) names.push_back(port.name.c_str());
  return names;
}

}  // namespace

FusedSession::FusedSession(ort::Api api, ort::SessionOptions* options, const std::string& model,
                           const std::vector<Weight>& weights)
    : api_(api), env_(environment(api)), session_(nullptr, {api}) {
  add_nested_operators(api, options);
  std::vector<const char*> files;
  std::vector<char*> buffers;
  std::vector<size_t> sizes;
  for (const Weight& weight : weights) {
    files.push_back(weight.file.c_str());
    buffers.push_back(static_cast<char*>(const_cast<void*>(weight.data)));
    sizes.push_back(weight.bytes);
  }
  if (!files.empty()) {
    check(api, ort::AddExternalInitializersFromFilesInMemory(api, options, files.data(), buffers.data(), sizes.data(),
                                                             files.size()));
  }
  ort::Session* session = nullptr;
  check(api, ort::CreateSessionFromArray(api, env_.get(), model.data(), model.size(), options, &session));
  session_.reset(session);
}

ort::Status* FusedSession::run(const Ports& ports, const OutputSizes& sizes, size_t graph_inputs,
                               ort::KernelContext* context) const {
  std::vector<const ort::Value*> inputs(ports.inputs.size());
  std::vector<Shape> shapes(graph_inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check(api_, ort::KernelContext_GetInput(api_, context, i, &inputs[i]));
    shapes[ports.inputs[i].place] = shape_of(api_, inputs[i]);
  }
  std::vector<ort::Value*> outputs(ports.outputs.size());
  std::vector<bool> copied(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::optional<Shape> shape = sizes.shape(ports.outputs[i].place, shapes);
    copied[i] = !shape;
    if (shape) outputs[i] = output_value(api_, context, i, *shape);
  }
  const auto input_names = names_of(ports.inputs);
  const auto output_names = names_of(ports.outputs);
  ort::Status* status = ort::Run(api_, session_.get(), nullptr, input_names.data(), inputs.data(), inputs.size(),
                                 output_names.data(), outputs.size(), outputs.data());
  std::vector<ValuePtr> owned;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (copied[i] && outputs[i] != nullptr) owned.emplace_back(outputs[i], Deleter<ort::ReleaseValue>{api_});
  }
  if (status != nullptr) return status;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (copied[i]) copy_output(api_, context, i, outputs[i]);
  }
  return nullptr;
}

}  // namespace fa::provider
