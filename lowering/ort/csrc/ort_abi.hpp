// The part of ONNX Runtime's C interface that this library uses, declared by number and signature.
//
// The onnxruntime wheels contain no headers. The interface is one table of function pointers. Releases only append to
// it, so a slot keeps its number, and a call needs only this number and the signature. Every slot below exists since
// 1.18 or earlier unless its comment says otherwise. The library supports ONNX Runtime 1.20 and newer. A test compares
// all that is declared here with what ONNX Runtime's headers declare (tests/lowering/test_abi.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

struct Status;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct Allocator;
struct SessionOptions;
struct CustomOpDomain;

using Api = const void* const*;

// A character of a path or a file name.
#if defined(_WIN32)
using PathChar = wchar_t;
#else
using PathChar = char;
#endif

struct ApiBase {
  Api (*get_api)(uint32_t version);
  const char* (*version)();
};

// The version of the oldest table that has every slot below without a comment, and every field of CustomOp.
inline constexpr uint32_t kApiVersion = 18;

enum class ErrorCode : int { fail = 1, invalid_argument = 2, not_implemented = 9 };

enum class Element : int {
  undefined = 0,  // in a descriptor, any type
  float32 = 1, uint8 = 2, int8 = 3, int32 = 6, int64 = 7, string = 8, boolean = 9, float16 = 10, uint64 = 13,
  bfloat16 = 16,
};

enum class Characteristic : int { required = 0, optional = 1 };
enum class MemoryType : int { standard = 0 };

// One entry of the table. A call of the object calls the function in this slot.
template <class Signature>
struct Slot;

template <class Result, class... Args>
struct Slot<Result(Args...)> {
  size_t index;
  Result operator()(Api api, Args... args) const {
    return reinterpret_cast<Result (*)(Args...)>(const_cast<void*>(api[index]))(args...);
  }
};

// clang-format off
inline constexpr Slot<Status*(ErrorCode, const char*)> CreateStatus{0};
inline constexpr Slot<const char*(const Status*)> GetErrorMessage{2};
inline constexpr Slot<void(Status*)> ReleaseStatus{93};
inline constexpr Slot<Status*(const char*, CustomOpDomain**)> CreateCustomOpDomain{26};
inline constexpr Slot<Status*(CustomOpDomain*, const struct CustomOp*)> CustomOpDomain_Add{27};
inline constexpr Slot<Status*(SessionOptions*, CustomOpDomain*)> AddCustomOpDomain{28};
inline constexpr Slot<Status*(SessionOptions*, const char*, const char*)> AddSessionConfigEntry{130};
inline constexpr Slot<Status*(const SessionOptions*, const char*, int*)> HasSessionConfigEntry{237};
inline constexpr Slot<Status*(const SessionOptions*, const char*, char*, size_t*)> GetSessionConfigEntry{238};
inline constexpr Slot<void(CustomOpDomain*)> ReleaseCustomOpDomain{101};
inline constexpr Slot<Status*(Value*, void**)> GetTensorMutableData{51};
inline constexpr Slot<Status*(const TensorInfo*, Element*)> GetTensorElementType{60};
inline constexpr Slot<Status*(const TensorInfo*, size_t*)> GetDimensionsCount{61};
inline constexpr Slot<Status*(const TensorInfo*, int64_t*, size_t)> GetDimensions{62};
inline constexpr Slot<Status*(const Value*, TensorInfo**)> GetTensorTypeAndShape{65};
inline constexpr Slot<void(TensorInfo*)> ReleaseTensorTypeAndShapeInfo{99};
inline constexpr Slot<Status*(Allocator*, size_t, void**)> AllocatorAlloc{75};
inline constexpr Slot<Status*(Allocator*, void*)> AllocatorFree{76};
inline constexpr Slot<void(Allocator*)> ReleaseAllocator{132};
inline constexpr Slot<Status*(const KernelInfo*, const char*, float*)> KernelInfoGetAttribute_float{85};
inline constexpr Slot<Status*(const KernelInfo*, const char*, int64_t*)> KernelInfoGetAttribute_int64{86};
inline constexpr Slot<Status*(const KernelInfo*, const char*, char*, size_t*)> KernelInfoGetAttribute_string{87};
inline constexpr Slot<Status*(const KernelContext*, size_t*)> KernelContext_GetInputCount{88};
inline constexpr Slot<Status*(const KernelContext*, size_t*)> KernelContext_GetOutputCount{89};
inline constexpr Slot<Status*(const KernelContext*, size_t, const Value**)> KernelContext_GetInput{90};
inline constexpr Slot<Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)> KernelContext_GetOutput{91};
inline constexpr Slot<Status*(const KernelInfo*, size_t*)> KernelInfo_GetInputCount{230};
inline constexpr Slot<Status*(const KernelInfo*, size_t*)> KernelInfo_GetOutputCount{231};
inline constexpr Slot<Status*(const KernelInfo*, size_t, char*, size_t*)> KernelInfo_GetInputName{232};
inline constexpr Slot<Status*(const KernelInfo*, size_t, char*, size_t*)> KernelInfo_GetOutputName{233};
inline constexpr Slot<Status*(const KernelInfo*, char*, size_t*)> KernelInfo_GetNodeName{244};
inline constexpr Slot<Status*(const KernelInfo*, size_t, int*, const Value**)> KernelInfoGetConstantInput_tensor{249};
inline constexpr Slot<Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)> KernelContext_ParallelFor{274};
inline constexpr Slot<Status*(const KernelInfo*, MemoryType, Allocator**)> KernelInfoGetAllocator{278};
// Since 1.24. Returns a pointer to the shape, without a TensorInfo.
inline constexpr Slot<Status*(const Value*, Element*, const int64_t**, size_t*)> GetTensorElementTypeAndShapeDataReference{414};
// clang-format on

// A custom operator for ONNX Runtime. The runtime passes the address of this struct to each function, so a derived
// struct can have more data. The runtime reads the fields that exist in `version`.
struct CustomOp {
  uint32_t version = kApiVersion;
  void* (*create)(const CustomOp*, Api, const KernelInfo*) = nullptr;  // superseded by create_v2
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*execution_provider)(const CustomOp*) = nullptr;
  Element (*input_type)(const CustomOp*, size_t) = nullptr;
  size_t (*input_count)(const CustomOp*) = nullptr;
  Element (*output_type)(const CustomOp*, size_t) = nullptr;
  size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;  // superseded by compute_v2
  void (*destroy)(void*) = nullptr;
  Characteristic (*input_characteristic)(const CustomOp*, size_t) = nullptr;
  Characteristic (*output_characteristic)(const CustomOp*, size_t) = nullptr;
  MemoryType (*input_memory_type)(const CustomOp*, size_t) = nullptr;
  int (*variadic_input_min_arity)(const CustomOp*) = nullptr;
  int (*variadic_input_homogeneity)(const CustomOp*) = nullptr;
  int (*variadic_output_min_arity)(const CustomOp*) = nullptr;
  int (*variadic_output_homogeneity)(const CustomOp*) = nullptr;
  Status* (*create_v2)(const CustomOp*, Api, const KernelInfo*, void**) = nullptr;
  Status* (*compute_v2)(void*, KernelContext*) = nullptr;
  // This function stays null. With it, ONNX Runtime before 1.24 crashes if an optional input is absent. A fused model
  // has its shapes in value_info, so it is not needed.
  Status* (*infer_shapes)(const CustomOp*, ShapeInferContext*) = nullptr;
  int (*first_version)(const CustomOp*) = nullptr;
  int (*last_version)(const CustomOp*) = nullptr;
  size_t (*may_inplace)(int**, int**) = nullptr;
  void (*release_may_inplace)(int*, int*) = nullptr;
  size_t (*alias_map)(int**, int**) = nullptr;
  void (*release_alias_map)(int*, int*) = nullptr;
};

static_assert(offsetof(CustomOp, create_v2) == 136 && offsetof(CustomOp, release_alias_map) == 200);

}  // namespace ort
