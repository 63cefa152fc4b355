// A graph that ONNX Runtime shows to a provider, as an ONNX model.
#pragma once

#include <string>
#include <vector>

#include "../op.hpp"
#include "ep_abi.hpp"

namespace fa::provider {

// A weight of the runtime, which stays in the runtime's memory as long as the graph is there. `file` is the name by which
// the model refers to it, as to external data.
struct Weight {
  std::string name, file;
  const void* data;
  size_t bytes;
};

// The serialised model of a main graph. Large weights are not copied: they are external data, each alone in a file, in the
// order of `weights`. The bytes are the same in every process that shows the same graph: they hold no address, and what the
// runtime keeps in hash tables is written in the order of the names.
struct GraphModel {
  std::string bytes;
  std::vector<std::string> inputs, outputs;  // of the graph; inputs that only name a constant are left out
  std::vector<Weight> weights;
};

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

// Throws an Error if the graph holds what a model of tensors cannot express.
GraphModel model_of(ort::Api api, const ort::Graph* graph);

}  // namespace fa::provider
