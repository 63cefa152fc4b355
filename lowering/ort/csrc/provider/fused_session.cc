#include "fused_session.hpp"

#include <cstring>

#include "nested.hpp"

namespace fa::provider {
namespace {

Shape shape_of(ort::Api api, const ort::Value* value) {
  ort::TensorInfo* raw = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &raw));
  const TensorInfoPtr info(raw, {api});
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, raw, &rank));
  Shape shape(rank);
  check(api, ort::GetDimensions(api, raw, shape.data(), rank));
  return shape;
}

bool is_tensor(ort::Api api, const ort::Value* value) {
  int found = 0;
  if (value != nullptr) check(api, ort::IsTensor(api, value, &found));
  return found != 0;
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

// Compares the bodies that the runtime has read with those of the graph that was fused.
class Inspector : public Observer {
 public:
  explicit Inspector(const Formals& formals) : formals_(formals) {}

  void see(ort::Api api, const ort::Graph* graph, ort::GraphSupportInfo*) override {
    const std::string lost = lost_between(formals_, formals_of(api, graph));
    if (!lost.empty()) throw Error{ort::ErrorCode::fail, lost};
  }

 private:
  const Formals& formals_;
};

std::vector<const char*> names_of(const std::vector<size_t>& places, const std::vector<std::string>& all) {
  std::vector<const char*> names;
  for (size_t place : places) names.push_back(all[place].c_str());
  return names;
}

}  // namespace

FusedSession::FusedSession(ort::Api api, ort::SessionOptions* options, const std::string& model,
                           const std::vector<Weight>& weights, const Formals& formals)
    : api_(api), operators_(nested_domain(api, model)) {
  check(api, ort::AddCustomOpDomain(api, options, operators_.get()));
  Inspector inspector(formals);
  session_ = make_session(api, model, weights, options, &inspector);
}

ort::Status* FusedSession::run(const Ports& ports, const std::vector<std::string>& inputs,
                               const std::vector<std::string>& outputs, const OutputSizes& sizes, const ort::RunOptions* options,
                               ort::KernelContext* context) const {
  std::vector<const ort::Value*> given(ports.inputs.size());
  std::vector<Shape> shapes(inputs.size());
  for (size_t i = 0; i < given.size(); ++i) {
    check(api_, ort::KernelContext_GetInput(api_, context, i, &given[i]));
    if (is_tensor(api_, given[i])) shapes[ports.inputs[i]] = shape_of(api_, given[i]);
  }
  std::vector<ort::Value*> results(ports.outputs.size());
  std::vector<ValuePtr> owned(results.size());  // the values that are copied afterwards
  std::vector<bool> copied(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const std::optional<Shape> shape = sizes.shape(ports.outputs[i], shapes);
    copied[i] = !shape;
    if (shape) results[i] = output_value(api_, context, i, *shape);
  }
  const auto input_names = names_of(ports.inputs, inputs);
  const auto output_names = names_of(ports.outputs, outputs);
  ort::Status* status =
      ort::Run(api_, session_.session.get(), options, input_names.data(), given.data(), given.size(), output_names.data(),
               results.size(), results.data());
  for (size_t i = 0; i < results.size(); ++i) {
    if (copied[i]) owned[i] = ValuePtr(results[i], {api_});
  }
  if (status != nullptr) return status;
  for (size_t i = 0; i < results.size(); ++i) {
    if (copied[i]) copy_output(api_, context, i, results[i]);
  }
  return nullptr;
}

}  // namespace fa::provider
