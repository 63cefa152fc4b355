#include "value_types.hpp"

#include "owners.hpp"

namespace fa::provider {
namespace {

// 1.23 has no way to tell a scalar from a tensor of unknown rank. There, no dimensions mean the latter.
bool has_shape(ort::Api api, const ort::TensorInfo* info, size_t rank) {
  return rank > 0 || (has_slots_of_1_24(api) && ort::TensorTypeAndShape_HasShape(api, info));
}

}  // namespace

Described described(ort::Api api, const ort::TensorInfo* info) {
  Described result;
  size_t rank = 0;
  check(api, ort::GetTensorElementType(api, info, &result.type));
  check(api, ort::GetDimensionsCount(api, info, &rank));
  result.dims.resize(rank);
  check(api, ort::GetDimensions(api, info, result.dims.data(), rank));
  result.has_shape = has_shape(api, info, rank);
  return result;
}

Described described(ort::Api api, const ort::Value* value) {
  ort::TensorInfo* raw = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &raw));
  const TensorInfoPtr info(raw, {api});
  return described(api, raw);
}

ort::Kind kind_of(ort::Api api, const ort::TypeInfo* type) {
  ort::Kind kind = ort::Kind::unknown;
  if (type != nullptr) check(api, ort::GetOnnxTypeFromTypeInfo(api, type, &kind));
  return kind;
}

const ort::TypeInfo* type_info_of(ort::Api api, const ort::ValueInfo* value) {
  const ort::TypeInfo* type = nullptr;
  check(api, ort::GetValueInfoTypeInfo(api, value, &type));
  return type;
}

const ort::TensorInfo* tensor_info_of(ort::Api api, const ort::TypeInfo* type) {
  const ort::TensorInfo* info = nullptr;
  check(api, ort::CastTypeInfoToTensorInfo(api, type, &info));
  return info;
}

bool is_constant(ort::Api api, const ort::ValueInfo* value) {
  bool constant = false;
  check(api, ort::ValueInfo_IsConstantInitializer(api, value, &constant));
  return constant;
}

bool is_tensor_of_numbers(ort::Api api, const ort::ValueInfo* value) {
  const ort::TypeInfo* type = type_info_of(api, value);
  return kind_of(api, type) == ort::Kind::tensor && described(api, tensor_info_of(api, type)).type != ort::Element::string;
}

std::string name_of(ort::Api api, const ort::ValueInfo* value) {
  if (value == nullptr) return "";
  const char* name = nullptr;
  check(api, ort::GetValueInfoName(api, value, &name));
  return name;
}

}  // namespace fa::provider
