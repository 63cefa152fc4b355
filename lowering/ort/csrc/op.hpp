// The part that all operators share: calls of ONNX Runtime that throw, tensors with their shapes, and errors that name
// the node and the input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention.hpp"
#include "decode.hpp"
#include "ort_abi.hpp"

namespace fa {

// An error for the user. ONNX Runtime gets it as a status and throws an exception with this text.
struct Error {
  ort::ErrorCode code;
  std::string text;
};

// Called when a runtime loads the library. Notes which newer slots the table of this version has.
void note_version(ort::Api api, const std::string& version);

// Whether the table has the slots that came with 1.24.
bool has_slots_of_1_24(ort::Api api);

// Throws std::runtime_error with the text of `status`, and releases it. Null is success.
void check(ort::Api api, ort::Status* status);

// Runs `body`, and returns the exception that it throws as a status, or null.
template <class Body>
ort::Status* guarded(ort::Api api, Body body) {
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return ort::CreateStatus(api, error.code, error.text.c_str());
  } catch (const std::exception& error) {
    return ort::CreateStatus(api, ort::ErrorCode::fail, error.what());
  }
}

// A shape of at most kMaxRank dimensions, which is more than any operator here takes. It does not allocate memory,
// because a call makes a dozen of them.
class Dims {
 public:
  static constexpr size_t kMaxRank = 8;

  Dims() {}  // elements of dims_ beyond the rank are not initialised
  Dims(std::initializer_list<int64_t> dims) { append(dims); }
  explicit Dims(std::span<const int64_t> dims) { append(dims); }

  void append(std::span<const int64_t> more) {
    std::copy(more.begin(), more.end(), dims_ + rank_);
    rank_ += more.size();
  }

  size_t size() const { return rank_; }
  const int64_t* data() const { return dims_; }
  const int64_t* begin() const { return dims_; }
  const int64_t* end() const { return dims_ + rank_; }
  int64_t operator[](size_t i) const { return dims_[i]; }
  int64_t& operator[](size_t i) { return dims_[i]; }
  int64_t back() const { return dims_[rank_ - 1]; }
  int64_t& back() { return dims_[rank_ - 1]; }
  bool operator==(const Dims& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  size_t rank_ = 0;
  int64_t dims_[kMaxRank];
};

std::string text_of(std::span<const int64_t> numbers);
inline std::string text_of(const Dims& dims) { return text_of(std::span(dims)); }

struct Tensor {
  ort::Element type = ort::Element::undefined;
  Dims dims;
  void* data = nullptr;

  bool present() const { return type != ort::Element::undefined; }
  size_t rank() const { return dims.size(); }
  int64_t count() const;
};

// The numbers of an int32 tensor.
inline const int32_t* integers_of(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.data); }

// A null `value` gives a tensor that is not present. Throws if the rank exceeds Dims::kMaxRank.
Tensor tensor_of(ort::Api api, const ort::Value* value);

// The inputs of a call. Absent inputs are not present. If the node has fewer than `least` inputs, absent ones are
// added.
std::vector<Tensor> tensors_of(ort::Api api, const ort::KernelContext* context, size_t least = 0);

// The type of an element that is float32, float16 or bfloat16.
Type type_of(ort::Element element);

inline Cell cell_of(Type type) {
  return type == Type::float32 ? Cell::float32 : type == Type::float16 ? Cell::float16 : Cell::bfloat16;
}

// The type and the size in bytes of an element that is float32, float16, bfloat16 or int8.
inline Cell cell_of(ort::Element element) {
  return element == ort::Element::int8 ? Cell::int8 : cell_of(type_of(element));
}
inline int64_t bytes_of(ort::Element element) { return bytes_of(cell_of(element)); }

// The name of an element type, as in NumPy.
const char* text_of_type(ort::Element element);

// The end of an error message, such as " is int8, expected float32 or float16". Empty if `expected` contains `found`.
std::string type_fault(ort::Element found, std::initializer_list<ort::Element> expected);

// The memory of an output of this shape; null if nobody reads the output.
void* output_of(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims);

// The same. The output is set to 0 if `clear`. `element` is the size of an element in bytes.
void* cleared_output(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear);

// The size in bytes of a tensor of this shape. `element` is the size of an element in bytes.
size_t bytes_of(const Dims& dims, size_t element);

// A constraint: {"FA", 11} is FA.11. In descriptors.inc, the constraints of an operator are in its namespace `rule`.
struct Rule {
  const char* list = "";
  int number = 0;
};

// Throws an error that begins with the node's title and ends with the violated constraint.
[[noreturn]] void refuse(const std::string& node, Rule rule, const std::string& text);

// Refuses the input `name` if it is present and has another shape.
void check_shape(const std::string& node, Rule rule, const char* name, const Tensor& tensor, const Dims& expected);

// How an error tells a range of numbers: "1 to 64" or, if any larger one will do, "1 or more".
inline constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
std::string text_of_range(int64_t least, int64_t most);

// An attribute and its default, which has no meaning if the attribute is required. In descriptors.inc, the attributes
// of an operator are in its namespace `attr`.
template <class Value>
struct Attribute {
  const char* name;
  Value fallback;
  bool required = false;
};

// Reads the attributes and constant inputs of a node, while its kernel is made.
class NodeInfo {
 public:
  NodeInfo(ort::Api api, const ort::KernelInfo* info, const char* op_type);

  // The beginning of every message: "node 'layer0/attention' (FlashAttentionScore)".
  const std::string& title() const { return title_; }
  bool has_input(size_t index) const;
  bool has_output(size_t index) const;
  Tensor constant_input(size_t index) const;  // not present if the input is not a constant

  // The attribute's value, or its default if the node does not have it. Throws if a required attribute is absent.
  int64_t get(const Attribute<int64_t>& attribute) const;
  bool get(const Attribute<bool>& attribute) const;
  float get(const Attribute<float>& attribute) const;
  std::string get(const Attribute<const char*>& attribute) const;

 private:
  using NameOf = ort::Slot<ort::Status*(const ort::KernelInfo*, size_t, char*, size_t*)>;

  bool is_named(const NameOf& name_of, size_t index) const;
  bool found(ort::Status* status, const char* name, bool required) const;

  ort::Api api_;
  const ort::KernelInfo* info_;
  std::string title_;
};

struct AllocatorDeleter {
  ort::Api api;
  void operator()(ort::Allocator* allocator) const { ort::ReleaseAllocator(api, allocator); }
};
using AllocatorPtr = std::unique_ptr<ort::Allocator, AllocatorDeleter>;

// A kernel of ONNX Runtime, made from its node. The constructor throws an Error if it does not take the node. `compute`
// is re-entrant, because ONNX Runtime calls one kernel from several threads.
class OpKernel {
 public:
  virtual ~OpKernel() = default;
  virtual void compute(ort::KernelContext* context) const = 0;
};

// Makes the kernel of a node. `info` and `node` belong to the same node. Each operator's namespace has such a function.
using MakeKernel = std::unique_ptr<OpKernel>(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

// What the calls of a node share.
struct NodeResources {
  NodeResources(ort::Api api, const ort::KernelInfo* info);

  AllocatorPtr allocator;            // the session's arena
  mutable int64_t workers_seen = 1;  // see Runtime
};

// Threads and memory for the kernels in one call.
class CallRuntime {
 public:
  CallRuntime(ort::Api api, const ort::KernelContext* context, const NodeResources& node)
      : api_(api), context_(context), node_(node) {}

  Runtime runtime();

  // Throws if ONNX Runtime failed to run the tasks, or `outcome` is out_of_memory. `node` is the node's title.
  void finish(Outcome outcome, const std::string& node) const;

 private:
  static void* allocate(void* self, size_t bytes);
  static void release(void* self, void* memory);
  static void parallel(void* self, void (*task)(void*, size_t), void* data, size_t count);

  ort::Api api_;
  const ort::KernelContext* context_;
  const NodeResources& node_;
  std::string failure_;
};

}  // namespace fa
