#include "formals.hpp"

#include <algorithm>

#include "value_types.hpp"

namespace fa::provider {
namespace {

Formal formal_of(ort::Api api, const ort::ValueInfo* value) {
  Formal formal{name_of(api, value), ort::Element::undefined, std::nullopt};
  const ort::TypeInfo* type = type_info_of(api, value);
  if (kind_of(api, type) != ort::Kind::tensor) return formal;
  const Described found = described(api, tensor_info_of(api, type));
  formal.type = found.type;
  if (found.has_shape) formal.rank = found.dims.size();
  return formal;
}

void add_formals(ort::Api api, const ort::Graph* graph, bool is_body, Formals& formals) {
  if (is_body) {
    std::string names;
    std::vector<Formal> all;
    const auto inputs = all_of<ort::ValueInfo>(api, ort::Graph_GetNumInputs, ort::Graph_GetInputs, graph);
    const auto outputs = all_of<ort::ValueInfo>(api, ort::Graph_GetNumOutputs, ort::Graph_GetOutputs, graph);
    for (const auto* values : {&inputs, &outputs}) {
      for (const auto* value : *values) {
        all.push_back(formal_of(api, value));
        names += all.back().name + '\n';
      }
      names += '\n';
    }
    formals.emplace(std::move(names), std::move(all));
  }
  for (const auto* node : all_of<ort::Node>(api, ort::Graph_GetNumNodes, ort::Graph_GetNodes, graph)) {
    size_t count = 0;
    check(api, ort::Node_GetNumSubgraphs(api, node, &count));
    if (count == 0) continue;
    std::vector<const ort::Graph*> graphs(count);
    std::vector<const char*> attributes(count);
    check(api, ort::Node_GetSubgraphs(api, node, graphs.data(), count, attributes.data()));
    for (const auto* body : graphs) add_formals(api, body, true, formals);
  }
}

std::string lost_between(const std::vector<Formal>& given, const std::vector<Formal>& made) {
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string value = "'" + given[i].name + "', an input or output of a body, ";
    if (given[i].type != made[i].type) return value + "has another type in the fused graph";
    if (given[i].rank && given[i].rank != made[i].rank) return value + "has lost its shape in the fused graph";
  }
  return "";
}

}  // namespace

Formals formals_of(ort::Api api, const ort::Graph* graph) {
  Formals formals;
  add_formals(api, graph, false, formals);
  return formals;
}

std::string lost_between(const Formals& given, const Formals& made) {
  for (const auto& [names, bodies] : made) {
    const auto [begin, end] = given.equal_range(names);
    std::string lost;
    for (auto found = begin; found != end; ++found) {
      lost = lost_between(found->second, bodies);
      if (lost.empty()) break;
    }
    if (!lost.empty()) return lost;
  }
  return "";
}

}  // namespace fa::provider
