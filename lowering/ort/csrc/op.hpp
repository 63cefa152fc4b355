// What the operators share: calls into ONNX Runtime that throw, tensors with their shapes, and errors that
// name the node and the input.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.hpp"
#include "ort_abi.hpp"

namespace fa {

// Becomes the status that ONNX Runtime turns into an exception with this text.
struct Error {
  ort::ErrorCode code;
  std::string text;
};

void check(ort::Api api, ort::Status* status);

// Runs `body` and turns what it throws into a status; null is success.
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

using Dims = std::vector<int64_t>;

std::string text_of(const Dims& dims);

struct Tensor {
  ort::Element type = ort::Element::undefined;
  Dims dims;
  void* data = nullptr;

  bool present() const { return type != ort::Element::undefined; }
  size_t rank() const { return dims.size(); }
  int64_t count() const;
};

// `value` null gives a tensor that is not present.
Tensor tensor_of(ort::Api api, const ort::Value* value);

// The inputs of a call, absent ones not present; at least `least` of them.
std::vector<Tensor> tensors_of(ort::Api api, const ort::KernelContext* context, size_t least = 0);

// float32, float16 or bfloat16.
Type type_of(ort::Element element);

// The memory of an output of this shape; null if nobody reads the output.
void* output_of(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims);

// The same, all 0 if `clear`; `element` is the bytes of a number.
void* cleared_output(ort::Api api, ort::KernelContext* context, size_t index, const Dims& dims, size_t element, bool clear);

// Bytes of a tensor of this shape whose elements take `element` bytes.
size_t bytes_of(const Dims& dims, size_t element);

// Reads attributes and inputs of a node while its kernel is made.
class NodeInfo {
 public:
  NodeInfo(ort::Api api, const ort::KernelInfo* info, const char* op_type);

  // "node 'layer0/attention' (FlashAttentionScore)", as every message begins.
  const std::string& title() const { return title_; }
  bool has_input(size_t index) const;
  Tensor constant_input(size_t index) const;  // not present if the input is no constant

  // `fallback` when the node does not carry the attribute.
  int64_t integer(const char* name, int64_t fallback) const;
  float number(const char* name, float fallback) const;
  std::string string(const char* name, const std::string& fallback) const;

 private:
  bool found(ort::Status* status, const char* name) const;

  ort::Api api_;
  const ort::KernelInfo* info_;
  std::string title_;
};

struct AllocatorDeleter {
  ort::Api api;
  void operator()(ort::Allocator* allocator) const { ort::ReleaseAllocator(api, allocator); }
};
using AllocatorPtr = std::unique_ptr<ort::Allocator, AllocatorDeleter>;

AllocatorPtr allocator_of(ort::Api api, const ort::KernelInfo* info);

// A kernel of ONNX Runtime. It is made from its node (or an Error names what it does not take) and computes re-entrantly:
// ONNX Runtime calls one kernel from several threads.
class OpKernel {
 public:
  virtual ~OpKernel() = default;
  virtual void compute(ort::KernelContext* context) const = 0;
};

// Threads and memory of one call, as the kernels ask for them. The allocator is the session's arena.
class CallRuntime {
 public:
  CallRuntime(ort::Api api, const ort::KernelContext* context, ort::Allocator* allocator)
      : api_(api), context_(context), allocator_(allocator) {}

  Runtime runtime() { return {this, allocate, release, parallel}; }

  // Throws if ONNX Runtime refused to run the tasks.
  void rethrow() const;

 private:
  static void* allocate(void* self, size_t bytes);
  static void release(void* self, void* memory);
  static void parallel(void* self, void (*task)(void*, size_t), void* data, size_t count);

  ort::Api api_;
  const ort::KernelContext* context_;
  ort::Allocator* allocator_;
  std::string failure_;
};

}  // namespace fa
