#include "part.hpp"

#include <map>
#include <set>
#include <string>

#include "value_types.hpp"

namespace fa::provider {
namespace {

using Values = std::vector<const ort::ValueInfo*>;

Values outputs_of(ort::Api api, const ort::Node* node) {
  Values values = all_of<ort::ValueInfo>(api, ort::Node_GetNumOutputs, ort::Node_GetOutputs, node);
  std::erase(values, nullptr);
  return values;
}

// Also by the graphs of its attributes.
Values read_by(ort::Api api, const ort::Node* node) {
  Values values = all_of<ort::ValueInfo>(api, ort::Node_GetNumInputs, ort::Node_GetInputs, node);
  const auto captured = all_of<ort::ValueInfo>(api, ort::Node_GetNumImplicitInputs, ort::Node_GetImplicitInputs, node);
  values.insert(values.end(), captured.begin(), captured.end());
  std::erase(values, nullptr);
  return values;
}

// Divides the nodes of a graph.
class Division {
 public:
  Division(ort::Api api, const std::vector<const ort::Node*>& nodes) : api_(api) {
    for (const auto* node : nodes) {
      for (const auto* value : outputs_of(api, node)) makers_.emplace(name_of(api, value), node);
      for (const auto* value : read_by(api, node)) readers_.emplace(name_of(api, value), node);
    }
  }

  bool is_left_out(const ort::Node* node) const { return left_out_.contains(node); }

  // Leaves out all nodes that read a value.
  void leave_out_readers(const ort::ValueInfo* value) {
    const auto [begin, end] = readers_.equal_range(name_of(api_, value));
    for (auto reader = begin; reader != end; ++reader) leave_out(reader->second);
  }

  // The node that makes a value; null for an input and a constant.
  const ort::Node* maker_of(const ort::ValueInfo* value) const {
    const auto found = makers_.find(name_of(api_, value));
    return found == makers_.end() ? nullptr : found->second;
  }

  // Leaves out a node and all nodes behind it. No other value than a tensor of numbers may go from the part to what is left
  // out, so the nodes that make one are left out, too.
  void leave_out(const ort::Node* first) {
    std::vector<const ort::Node*> open{first};
    while (!open.empty()) {
      const ort::Node* node = open.back();
      open.pop_back();
      if (node == nullptr || !left_out_.insert(node).second) continue;
      for (const auto* value : outputs_of(api_, node)) {
        const auto [begin, end] = readers_.equal_range(name_of(api_, value));
        for (auto reader = begin; reader != end; ++reader) open.push_back(reader->second);
      }
      for (const auto* value : read_by(api_, node)) {
        if (!is_tensor_of_numbers(api_, value)) open.push_back(maker_of(value));
      }
    }
  }

 private:
  ort::Api api_;
  std::map<std::string, const ort::Node*> makers_;
  std::multimap<std::string, const ort::Node*> readers_;
  std::set<const ort::Node*> left_out_;
};

}  // namespace

Part part_of(ort::Api api, const ort::Graph* graph) {
  const auto nodes = all_of<ort::Node>(api, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph);
  const auto outputs = all_of<ort::ValueInfo>(api, ort::Graph_GetNumOutputs, ort::Graph_GetOutputs, graph);
  Division division(api, nodes);
  Part part;
  for (const auto* value : all_of<ort::ValueInfo>(api, ort::Graph_GetNumInputs, ort::Graph_GetInputs, graph)) {
    if (is_constant(api, value)) continue;  // an old model lists its constants, too
    const ort::Kind kind = kind_of(api, type_info_of(api, value));
    if (kind == ort::Kind::tensor || kind == ort::Kind::sequence) {
      part.inputs.push_back(value);
    } else {
      division.leave_out_readers(value);
    }
  }
  for (const auto* value : outputs) {
    if (!is_tensor_of_numbers(api, value)) division.leave_out(division.maker_of(value));
  }
  std::set<const ort::ValueInfo*> added;
  const auto add_output = [&](const ort::ValueInfo* value) {
    const ort::Node* maker = division.maker_of(value);
    if (maker != nullptr && division.is_left_out(maker)) return;
    if (is_tensor_of_numbers(api, value) && added.insert(value).second) part.outputs.push_back(value);
  };
  for (const auto* value : outputs) add_output(value);
  for (const auto* node : nodes) {
    if (!division.is_left_out(node)) {
      part.nodes.push_back(node);
      continue;
    }
    for (const auto* value : read_by(api, node)) {
      if (division.maker_of(value) != nullptr) add_output(value);
    }
  }
  return part;
}

}  // namespace fa::provider
