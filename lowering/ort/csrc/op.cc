#include "op.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "checked.hpp"

namespace fa {

void check(ort::Api api, ort::Status* status) {
  if (status == nullptr) return;
  const std::string text = ort::GetErrorMessage(api, status);
  ort::ReleaseStatus(api, status);
  throw std::runtime_error(text);
}

std::string text_of(std::span<const int64_t> numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(numbers[i]);
  }
  return text + "]";
}

int64_t Tensor::count() const {
  int64_t product = 1;
  for (int64_t dim : dims) product *= dim;
  return product;
}

namespace {

// The greatest number of elements of a tensor. Their size in bytes fits 64 bits, also after multiplication by the small
// factors of statistics and bits.
constexpr int64_t kMaxElements = int64_t{1} << 59;

// Throws if a shape has more than kMaxElements elements. Dimensions of 0 are left out of the product, because products
// of the other dimensions must not overflow either.
void check_elements(const char* what, std::span<const int64_t> dims) {
  Checked product = 1;
  for (int64_t dim : dims) {
    if (dim != 0) product = product * dim;
  }
  if (product.fits_int64() && product.value() <= kMaxElements) return;
  throw Error{ort::ErrorCode::invalid_argument,
              std::string(what) + " has the shape " + text_of(dims) + ", expected sizes that make at most 2^59 numbers"};
}

// The table of a runtime that has the slots of 1.24. A process may also have an older runtime, whose table is another.
std::atomic<ort::Api> api_of_1_24{nullptr};

void set_dims(Tensor& tensor, size_t rank, const int64_t* dims) {
  if (rank > Dims::kMaxRank) {
    throw Error{ort::ErrorCode::invalid_argument, "a tensor of rank " + std::to_string(rank) + ", expected at most " +
                                                      std::to_string(Dims::kMaxRank)};
  }
  tensor.dims = Dims(std::span(dims, rank));
  check_elements("an input", tensor.dims);
}

void read_shape(ort::Api api, const ort::Value* value, Tensor& tensor) {
  if (has_slots_of_1_24(api)) {
    const int64_t* dims = nullptr;
    size_t rank = 0;
    check(api, ort::GetTensorElementTypeAndShapeDataReference(api, value, &tensor.type, &dims, &rank));
    set_dims(tensor, rank, dims);
    return;
  }
  ort::TensorInfo* raw = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &raw));
  const auto release = [api](ort::TensorInfo* info) { ort::ReleaseTensorTypeAndShapeInfo(api, info); };
  const std::unique_ptr<ort::TensorInfo, decltype(release)> info(raw, release);
  check(api, ort::GetTensorElementType(api, raw, &tensor.type));
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, raw, &rank));
  std::vector<int64_t> dims(rank);
  check(api, ort::GetDimensions(api, raw, dims.data(), rank));
  set_dims(tensor, rank, dims.data());
}

}  // namespace

void note_version(ort::Api api, const std::string& version) {
  int major = 0;
  int minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return;
  if (major > 1 || minor >= 24) api_of_1_24.store(api, std::memory_order_relaxed);
}

bool has_slots_of_1_24(ort::Api api) { return api == api_of_1_24.load(std::memory_order_relaxed); }

Tensor tensor_of(ort::Api api, const ort::Value* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  read_shape(api, value, tensor);
  check(api, ort::GetTensorMutableData(api, const_cast<ort::Value*>(value), &tensor.data));
  return tensor;
}

std::vector<Tensor> tensors_of(ort::Api api, const ort::KernelContext* context, size_t least) {
  size_t count = 0;
  check(api, ort::KernelContext_GetInputCount(api, context, &count));
  std::vector<Tensor> tensors(std::max(count, least));
  for (size_t i = 0; i < count; ++i) {
    const ort::Value* value = nullptr;
    check(api, ort::KernelContext_GetInput(api, context, i, &value));
    tensors[i] = tensor_of(api, value);
  }
  return tensors;
}

Type type_of(ort::Element element) {
  if (element == ort::Element::float32) return Type::float32;
  return element == ort::Element::float16 ? Type::float16 : Type::bfloat16;
}

const char* text_of_type(ort::Element element) {
  switch (element) {
    case ort::Element::float32: return "float32";
    case ort::Element::float16: return "float16";
    case ort::Element::bfloat16: return "bfloat16";
    case ort::Element::int8: return "int8";
    case ort::Element::uint8: return "uint8";
    case ort::Element::boolean: return "bool";
    case ort::Element::int32: return "int32";
    case ort::Element::int64: return "int64";
    case ort::Element::uint64: return "uint64";
    default: return "another type";
  }
}

std::string type_fault(ort::Element found, std::initializer_list<ort::Element> expected) {
  std::string alternatives;
  for (ort::Element element : expected) {
    if (element == found) return "";
    alternatives += (alternatives.empty() ? "" : " or ") + std::string(text_of_type(element));
  }
  return std::string(" is ") + text_of_type(found) + ", expected " + alternatives;
}

void* output_of(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims) {
  size_t count = 0;
  check(api, ort::KernelContext_GetOutputCount(api, context, &count));
  if (index >= count) return nullptr;
  check_elements("an output", dims);
  ort::Value* value = nullptr;
  check(api, ort::KernelContext_GetOutput(api, context, index, dims.data(), dims.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  check(api, ort::GetTensorMutableData(api, value, &data));
  return data;
}

void* cleared_output(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear) {
  void* data = output_of(api, context, index, dims);
  if (data != nullptr && clear) std::memset(data, 0, bytes_of(dims, element));
  return data;
}

size_t bytes_of(const Dims& dims, size_t element) {
  size_t count = element;
  for (int64_t dim : dims) count *= static_cast<size_t>(dim);
  return count;
}

namespace {

// Reads a text from a getter. The first call of the getter returns the size, the second one the text with a final 0.
template <class Getter>
ort::Status* read_text(std::string& text, Getter getter) {
  size_t size = 0;
  ort::Status* status = getter(nullptr, &size);
  if (status != nullptr) return status;
  text.resize(size);
  status = getter(text.data(), &size);
  if (status == nullptr && !text.empty()) text.pop_back();
  return status;
}

}  // namespace

void refuse(const std::string& node, Rule rule, const std::string& text) {
  throw Error{ort::ErrorCode::invalid_argument,
              node + ": " + text + " (" + rule.list + "." + std::to_string(rule.number) + ")"};
}

void check_shape(const std::string& node, Rule rule, const char* name, const Tensor& tensor, const Dims& expected) {
  if (!tensor.present() || tensor.dims == expected) return;
  refuse(node, rule, std::string("input ") + name + " has the shape " + text_of(tensor.dims) + ", expected " + text_of(expected));
}

std::string text_of_range(int64_t least, int64_t most) {
  return std::to_string(least) + (most == kAny ? " or more" : " to " + std::to_string(most));
}

NodeInfo::NodeInfo(ort::Api api, const ort::KernelInfo* info, const char* op_type) : api_(api), info_(info) {
  std::string name;
  check(api_, read_text(name, [this](char* out, size_t* size) {
    return ort::KernelInfo_GetNodeName(api_, info_, out, size);
  }));
  title_ = "node '" + name + "' (" + op_type + ")";
}

bool NodeInfo::has_input(size_t index) const {
  size_t count = 0;
  check(api_, ort::KernelInfo_GetInputCount(api_, info_, &count));
  return index < count && is_named(ort::KernelInfo_GetInputName, index);
}

bool NodeInfo::has_output(size_t index) const {
  size_t count = 0;
  check(api_, ort::KernelInfo_GetOutputCount(api_, info_, &count));
  return index < count && is_named(ort::KernelInfo_GetOutputName, index);
}

// An absent optional input or output before a present one has an empty name.
bool NodeInfo::is_named(const NameOf& name_of, size_t index) const {
  std::string text;
  check(api_, read_text(text, [&](char* out, size_t* size) { return name_of(api_, info_, index, out, size); }));
  return !text.empty();
}

Tensor NodeInfo::constant_input(size_t index) const {
  if (!has_input(index)) return {};
  int is_constant = 0;
  const ort::Value* value = nullptr;
  check(api_, ort::KernelInfoGetConstantInput_tensor(api_, info_, index, &is_constant, &value));
  return tensor_of(api_, is_constant != 0 ? value : nullptr);
}

// Whether the node has the attribute, by the status of its getter. ONNX Runtime fails for an absent attribute and for
// one of another type. This throws for one of another type, and for an absent one that is required.
bool NodeInfo::found(ort::Status* status, const char* name, bool required) const {
  if (status == nullptr) return true;
  const std::string text = ort::GetErrorMessage(api_, status);
  ort::ReleaseStatus(api_, status);
  if (text.find("don't match") != std::string::npos) {
    throw Error{ort::ErrorCode::invalid_argument, title_ + ": attribute " + name + " has the wrong type"};
  }
  if (required) {
    throw Error{ort::ErrorCode::invalid_argument, title_ + ": the required attribute " + name + " is absent"};
  }
  return false;
}

int64_t NodeInfo::get(const Attribute<int64_t>& attribute) const {
  int64_t value = 0;
  ort::Status* status = ort::KernelInfoGetAttribute_int64(api_, info_, attribute.name, &value);
  return found(status, attribute.name, attribute.required) ? value : attribute.fallback;
}

bool NodeInfo::get(const Attribute<bool>& attribute) const {
  return get(Attribute<int64_t>{attribute.name, attribute.fallback, attribute.required}) != 0;
}

// No attribute of an operator may be NaN or infinite. Only a default may be infinite.
float NodeInfo::get(const Attribute<float>& attribute) const {
  float value = 0;
  ort::Status* status = ort::KernelInfoGetAttribute_float(api_, info_, attribute.name, &value);
  if (!found(status, attribute.name, attribute.required)) return attribute.fallback;
  if (!std::isfinite(value)) {
    throw Error{ort::ErrorCode::invalid_argument, title_ + ": attribute " + attribute.name + " is " +
                                                      std::to_string(value) + ", expected a finite number"};
  }
  return value;
}

std::string NodeInfo::get(const Attribute<const char*>& attribute) const {
  std::string text;
  ort::Status* status = read_text(text, [&](char* out, size_t* size) {
    return ort::KernelInfoGetAttribute_string(api_, info_, attribute.name, out, size);
  });
  return found(status, attribute.name, attribute.required) ? text : attribute.fallback;
}

static AllocatorPtr allocator_of(ort::Api api, const ort::KernelInfo* info) {
  ort::Allocator* allocator = nullptr;
  check(api, ort::KernelInfoGetAllocator(api, info, ort::MemoryType::standard, &allocator));
  return AllocatorPtr(allocator, AllocatorDeleter{api});
}

NodeResources::NodeResources(ort::Api api, const ort::KernelInfo* info) : allocator(allocator_of(api, info)) {}

Runtime CallRuntime::runtime() {
  // A session may have more threads than the machine has processors.
  static const int64_t processors = std::max<int64_t>(8, std::thread::hardware_concurrency());
  return {this, allocate, release, parallel, processors, &node_.workers_seen};
}

#if defined(FA_SANITIZE)
void* CallRuntime::allocate(void*, size_t bytes) { return std::malloc(bytes); }
void CallRuntime::release(void*, void* memory) { std::free(memory); }
#else
void* CallRuntime::allocate(void* self, size_t bytes) {
  auto& call = *static_cast<CallRuntime*>(self);
  void* memory = nullptr;
  ort::Status* status = ort::AllocatorAlloc(call.api_, call.node_.allocator.get(), bytes, &memory);
  if (status != nullptr) {
    ort::ReleaseStatus(call.api_, status);
    return nullptr;
  }
  return memory;
}

void CallRuntime::release(void* self, void* memory) {
  if (memory == nullptr) return;
  auto& call = *static_cast<CallRuntime*>(self);
  ort::Status* status = ort::AllocatorFree(call.api_, call.node_.allocator.get(), memory);
  if (status != nullptr) ort::ReleaseStatus(call.api_, status);
}
#endif

void CallRuntime::parallel(void* self, void (*task)(void*, size_t), void* data, size_t count) {
  auto& call = *static_cast<CallRuntime*>(self);
  constexpr size_t kOneByOne = 0;  // each thread takes one task at a time
  ort::Status* status = ort::KernelContext_ParallelFor(call.api_, call.context_, task, count, kOneByOne, data);
  if (status == nullptr) return;
  call.failure_ = ort::GetErrorMessage(call.api_, status);
  ort::ReleaseStatus(call.api_, status);
}

void CallRuntime::finish(Outcome outcome, const std::string& node) const {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  if (outcome == Outcome::out_of_memory) throw Error{ort::ErrorCode::fail, node + ": out of memory"};
}

}  // namespace fa
