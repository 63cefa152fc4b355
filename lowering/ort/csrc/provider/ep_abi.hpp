// The part of ONNX Runtime's interface for plugin execution providers that this library uses, by number and signature.
//
// Like ort_abi.hpp, it is declared without ONNX Runtime's headers. All slots and fields exist since 1.23 unless their
// comment says otherwise. A struct begins with the version of the interface that it was made for, and the runtime reads
// the fields that this version has.
#pragma once

#include "../ort_abi.hpp"

namespace ort {

struct DataTransfer;
struct Env;
struct EpDevice;
struct Graph;
struct GraphSupportInfo;
struct HardwareDevice;
struct KeyValuePairs;
struct Logger;
struct MemoryInfo;
struct Node;
struct NodeComputeContext;
struct OpAttr;
struct OptionalTypeInfo;
struct RunOptions;
struct SequenceTypeInfo;
struct Session;
struct TypeInfo;
struct ValueInfo;

// The oldest release whose plugin interface has what the provider needs, and the first with operators of a factory.
inline constexpr int kFirstEpMinor = 23;
inline constexpr int kFirstEpDomainMinor = 24;

enum class Severity : int { info = 1, warning = 2, fatal = 4 };
enum class Kind : int { unknown = 0, tensor = 1, sequence = 2, optional = 6 };
enum class AttributeKind : int {
  integer = 1, integers = 2, number = 3, numbers = 4, string = 5, strings = 6, graph = 7, tensor = 8
};
enum class DeviceKind : int { cpu = 0 };
enum class AllocatorKind : int { device = 0 };

// clang-format off
inline constexpr Slot<Status*(Severity, const char*, Env**)> CreateEnv{3};
inline constexpr Slot<void(Env*)> ReleaseEnv{92};
inline constexpr Slot<Status*(const Env*, const void*, size_t, const SessionOptions*, Session**)> CreateSessionFromArray{8};
inline constexpr Slot<Status*(Session*, const RunOptions*, const char* const*, const Value* const*, size_t, const char* const*, size_t, Value**)> Run{9};
inline constexpr Slot<void(Session*)> ReleaseSession{95};
inline constexpr Slot<Status*(const SessionOptions*, SessionOptions**)> CloneSessionOptions{12};
inline constexpr Slot<void(SessionOptions*)> ReleaseSessionOptions{100};
inline constexpr Slot<Status*(SessionOptions*, const PathChar*)> SetOptimizedModelFilePath{11};
inline constexpr Slot<Status*(SessionOptions*)> DisableProfiling{15};
inline constexpr Slot<Status*(SessionOptions*, int severity)> SetSessionLogSeverityLevel{22};
inline constexpr Slot<Status*(SessionOptions*, const char*, const Value*)> AddInitializer{150};
inline constexpr Slot<Status*(SessionOptions*, const PathChar* const*, char* const*, const size_t*, size_t)> AddExternalInitializersFromFilesInMemory{279};
inline constexpr Slot<void(Value*)> ReleaseValue{96};
inline constexpr Slot<Status*(const MemoryInfo*, void*, size_t, const int64_t*, size_t, Element, Value**)> CreateTensorWithDataAsOrtValue{49};
inline constexpr Slot<Status*(const Value*, int*)> IsTensor{50};
inline constexpr Slot<Status*(const Value*, size_t*)> GetStringTensorDataLength{53};
inline constexpr Slot<Status*(const Value*, void*, size_t, size_t*, size_t)> GetStringTensorContent{54};
inline constexpr Slot<Status*(const TypeInfo*, const TensorInfo**)> CastTypeInfoToTensorInfo{55};
inline constexpr Slot<Status*(const TypeInfo*, Kind*)> GetOnnxTypeFromTypeInfo{56};
inline constexpr Slot<Status*(const TensorInfo*, const char**, size_t)> GetSymbolicDimensions{63};
inline constexpr Slot<Status*(AllocatorKind, MemoryType, MemoryInfo**)> CreateCpuMemoryInfo{69};
inline constexpr Slot<void(MemoryInfo*)> ReleaseMemoryInfo{94};
inline constexpr Slot<void(TypeInfo*)> ReleaseTypeInfo{98};
inline constexpr Slot<Status*(const TypeInfo*, const SequenceTypeInfo**)> CastTypeInfoToSequenceTypeInfo{104};
inline constexpr Slot<Status*(const SequenceTypeInfo*, TypeInfo**)> GetSequenceElementType{107};
inline constexpr Slot<Status*(const Logger*, Severity, const char*, const PathChar*, int, const char*)> Logger_LogMessage{247};
inline constexpr Slot<Status*(const Logger*, Severity*)> Logger_GetLoggingSeverityLevel{248};
inline constexpr Slot<Status*(const TypeInfo*, const OptionalTypeInfo**)> CastTypeInfoToOptionalTypeInfo{250};
inline constexpr Slot<Status*(const OptionalTypeInfo*, TypeInfo**)> GetOptionalContainedTypeInfo{251};
inline constexpr Slot<Status*(const OpAttr*, AttributeKind, void*, size_t, size_t*)> ReadOpAttr{272};
inline constexpr Slot<Status*(const ValueInfo*, const char**)> GetValueInfoName{289};
inline constexpr Slot<Status*(const ValueInfo*, const TypeInfo**)> GetValueInfoTypeInfo{290};
inline constexpr Slot<void(KeyValuePairs**)> CreateKeyValuePairs{295};
inline constexpr Slot<void(KeyValuePairs*, const char*, const char*)> AddKeyValuePair{296};
inline constexpr Slot<void(const KeyValuePairs*, const char* const**, const char* const**, size_t*)> GetKeyValuePairs{298};
inline constexpr Slot<void(KeyValuePairs*)> ReleaseKeyValuePairs{300};
inline constexpr Slot<Status*(const Env*, const EpDevice* const**, size_t*)> GetEpDevices{303};
inline constexpr Slot<Status*(SessionOptions*, Env*, const EpDevice* const*, size_t, const char* const*, const char* const*, size_t)> SessionOptionsAppendExecutionProvider_V2{304};
inline constexpr Slot<DeviceKind(const HardwareDevice*)> HardwareDevice_Type{307};
inline constexpr Slot<const char*(const EpDevice*)> EpDevice_EpName{312};
inline constexpr Slot<Api()> GetEpApi{317};
inline constexpr Slot<Status*(const Value*, size_t*)> GetTensorSizeInBytes{318};
inline constexpr Slot<Status*(const ValueInfo*, const Value**)> ValueInfo_GetInitializerValue{326};
inline constexpr Slot<Status*(const ValueInfo*, bool*)> ValueInfo_IsRequiredGraphInput{328};
inline constexpr Slot<Status*(const ValueInfo*, bool*)> ValueInfo_IsOptionalGraphInput{329};
inline constexpr Slot<Status*(const ValueInfo*, bool*)> ValueInfo_IsConstantInitializer{331};
inline constexpr Slot<Status*(const ValueInfo*, bool*)> ValueInfo_IsFromOuterScope{332};
inline constexpr Slot<Status*(const Graph*, const char**)> Graph_GetName{333};
inline constexpr Slot<Status*(const Graph*, int64_t*)> Graph_GetOnnxIRVersion{335};
inline constexpr Slot<Status*(const Graph*, size_t*)> Graph_GetNumOperatorSets{336};
inline constexpr Slot<Status*(const Graph*, const char**, int64_t*, size_t)> Graph_GetOperatorSets{337};
inline constexpr Slot<Status*(const Graph*, size_t*)> Graph_GetNumInputs{338};
inline constexpr Slot<Status*(const Graph*, const ValueInfo**, size_t)> Graph_GetInputs{339};
inline constexpr Slot<Status*(const Graph*, size_t*)> Graph_GetNumOutputs{340};
inline constexpr Slot<Status*(const Graph*, const ValueInfo**, size_t)> Graph_GetOutputs{341};
inline constexpr Slot<Status*(const Graph*, size_t*)> Graph_GetNumInitializers{342};
inline constexpr Slot<Status*(const Graph*, const ValueInfo**, size_t)> Graph_GetInitializers{343};
inline constexpr Slot<Status*(const Graph*, size_t*)> Graph_GetNumNodes{344};
inline constexpr Slot<Status*(const Graph*, const Node**, size_t)> Graph_GetNodes{345};
inline constexpr Slot<Status*(const Graph*, const Node**)> Graph_GetParentNode{346};
inline constexpr Slot<Status*(const Node*, const char**)> Node_GetName{349};
inline constexpr Slot<Status*(const Node*, const char**)> Node_GetOperatorType{350};
inline constexpr Slot<Status*(const Node*, const char**)> Node_GetDomain{351};
inline constexpr Slot<Status*(const Node*, size_t*)> Node_GetNumInputs{353};
inline constexpr Slot<Status*(const Node*, const ValueInfo**, size_t)> Node_GetInputs{354};
inline constexpr Slot<Status*(const Node*, size_t*)> Node_GetNumOutputs{355};
inline constexpr Slot<Status*(const Node*, const ValueInfo**, size_t)> Node_GetOutputs{356};
inline constexpr Slot<Status*(const Node*, size_t*)> Node_GetNumImplicitInputs{357};
inline constexpr Slot<Status*(const Node*, const ValueInfo**, size_t)> Node_GetImplicitInputs{358};
inline constexpr Slot<Status*(const Node*, size_t*)> Node_GetNumAttributes{359};
inline constexpr Slot<Status*(const Node*, const OpAttr**, size_t)> Node_GetAttributes{360};
inline constexpr Slot<Status*(const OpAttr*, Value**)> OpAttr_GetTensorAttributeAsOrtValue{362};
inline constexpr Slot<Status*(const OpAttr*, AttributeKind*)> OpAttr_GetType{363};
inline constexpr Slot<Status*(const OpAttr*, const char**)> OpAttr_GetName{364};
inline constexpr Slot<Status*(const Node*, size_t*)> Node_GetNumSubgraphs{365};
inline constexpr Slot<Status*(const Node*, const Graph**, size_t, const char**)> Node_GetSubgraphs{366};
inline constexpr Slot<Status*(const Node*, const char**)> Node_GetEpName{368};
inline constexpr Slot<Status*(const SessionOptions*, KeyValuePairs**)> GetSessionOptionsConfigEntries{379};
// Since 1.24.
inline constexpr Slot<bool(const TensorInfo*)> TensorTypeAndShape_HasShape{390};

// The table that GetEpApi returns.
namespace ep {
struct Factory;
struct FusionOptions;
inline constexpr Slot<Status*(Factory*, const HardwareDevice*, const KeyValuePairs*, const KeyValuePairs*, EpDevice**)> CreateEpDevice{0};
inline constexpr Slot<Status*(GraphSupportInfo*, const Node* const*, size_t, const FusionOptions*)> EpGraphSupportInfo_AddNodesToFuse{2};
}  // namespace ep
// clang-format on

namespace ep {

// How claimed nodes become one node.
struct FusionOptions {
  uint32_t version = kFirstEpMinor;
  bool drop_constant_initializers = false;
};

// The functions of a node that the provider has compiled.
struct NodeComputeInfo {
  uint32_t version = kFirstEpMinor;
  Status* (*create_state)(NodeComputeInfo*, NodeComputeContext*, void**) = nullptr;
  Status* (*compute)(NodeComputeInfo*, void*, KernelContext*) = nullptr;
  void (*release_state)(NodeComputeInfo*, void*) = nullptr;
};

// The provider of one session. The fields that stay null are optional.
struct Provider {
  uint32_t version = kFirstEpMinor;
  const char* (*name)(const Provider*) = nullptr;
  Status* (*get_capability)(Provider*, const Graph*, GraphSupportInfo*) = nullptr;
  Status* (*compile)(Provider*, const Graph**, const Node**, size_t, NodeComputeInfo**, Node**) = nullptr;
  void (*release_node_compute_infos)(Provider*, NodeComputeInfo**, size_t) = nullptr;
  void* preferred_layout = nullptr;
  void* should_convert_layout = nullptr;
  void* set_dynamic_options = nullptr;
  Status* (*on_run_start)(Provider*, const RunOptions*) = nullptr;
  Status* (*on_run_end)(Provider*, const RunOptions*, bool synchronise) = nullptr;
  void* create_allocator = nullptr;
  void* create_sync_stream = nullptr;
  void* compiled_model_compatibility = nullptr;
};

// Makes the providers of the sessions.
struct Factory {
  uint32_t version = kFirstEpMinor;
  const char* (*name)(const Factory*) = nullptr;
  const char* (*vendor)(const Factory*) = nullptr;
  Status* (*supported_devices)(Factory*, const HardwareDevice* const*, size_t, EpDevice**, size_t, size_t*) = nullptr;
  Status* (*create_provider)(Factory*, const HardwareDevice* const*, const KeyValuePairs* const*, size_t,
                             const SessionOptions*, const Logger*, Provider**) = nullptr;
  void (*release_provider)(Factory*, Provider*) = nullptr;
  uint32_t (*vendor_id)(const Factory*) = nullptr;
  const char* (*provider_version)(const Factory*) = nullptr;
  void* validate_compatibility = nullptr;
  void* create_allocator = nullptr;
  void* release_allocator = nullptr;
  Status* (*create_data_transfer)(Factory*, DataTransfer**) = nullptr;
  bool (*is_stream_aware)(const Factory*) = nullptr;
  void* create_sync_stream = nullptr;
  // Since 1.24.
  void* incompatibility_details = nullptr;
  void* external_resource_importer = nullptr;
  Status* (*domain_count)(Factory*, size_t*) = nullptr;
  Status* (*domains)(Factory*, CustomOpDomain**, size_t) = nullptr;
};

static_assert(offsetof(Provider, compiled_model_compatibility) == 96 && offsetof(Factory, domains) == 136);

}  // namespace ep
}  // namespace ort
