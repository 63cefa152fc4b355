// What the runtime tells of the values of a graph.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../op.hpp"
#include "ep_abi.hpp"

namespace fa::provider {

// The values of a list that the runtime gives by a number and a function: all_of<ort::Node>(api, ort::Graph_GetNumNodes,
// ort::Graph_GetNodes, graph).
template <class Item, class Count, class Get, class Owner>
std::vector<const Item*> all_of(ort::Api api, const Count& count_of, const Get& get, const Owner* owner) {
  size_t count = 0;
  check(api, count_of(api, owner, &count));
  std::vector<const Item*> items(count);
  if (count > 0) check(api, get(api, owner, items.data(), count));
  return items;
}

// The name of a value; empty for an optional input or output that a node does not have.
std::string name_of(ort::Api api, const ort::ValueInfo* value);

// A tensor's element type and shape, from an object that the runtime makes for the question.
struct Described {
  ort::Element type;
  bool has_shape;
  std::vector<int64_t> dims;
};

Described described(ort::Api api, const ort::TensorInfo* info);
Described described(ort::Api api, const ort::Value* value);

// The type of a value; null for one without a type. It belongs to the value.
const ort::TypeInfo* type_info_of(ort::Api api, const ort::ValueInfo* value);

// The kind of a type; unknown for null.
ort::Kind kind_of(ort::Api api, const ort::TypeInfo* type);

// What a type says, which is one of tensors.
const ort::TensorInfo* tensor_info_of(ort::Api api, const ort::TypeInfo* type);

// Whether a value is a constant of the model.
bool is_constant(ort::Api api, const ort::ValueInfo* value);

// Whether a claimed node can have this output.
bool is_tensor_of_numbers(ort::Api api, const ort::ValueInfo* value);

}  // namespace fa::provider
