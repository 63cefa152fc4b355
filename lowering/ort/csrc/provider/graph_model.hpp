// A graph that ONNX Runtime shows to a provider, as an ONNX model.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "../op.hpp"
#include "ep_abi.hpp"
#include "part.hpp"

namespace fa::provider {

// Weights of up to this many bytes are copied into the model: the matcher looks at many of them.
constexpr size_t kCopied = 1024;

// A weight of the runtime, which stays in the runtime's memory as long as the graph is there. `file` is the name by which
// the model refers to it, as to external data.
struct Weight {
  std::string name, file;
  const void* data;
  size_t bytes;
};

// A constant of a main graph that may be external data: all but strings and empty tensors. `tensor` is the message of such
// a tensor, and `input` that of a graph input with its name and type.
struct Constant {
  Weight weight;
  std::string tensor, input;

  // Whether the constant is not copied into the model, and is one of its `weights`.
  bool is_large() const { return weight.bytes > kCopied; }
};

// The serialised model of a part of a main graph. Large weights are not copied: they are external data, each alone in a
// file, in the order of `weights`. The bytes are the same in every process that shows the same graph: they hold no address,
// and what the runtime keeps in hash tables is written in the order of the names.
struct GraphModel {
  std::string bytes;
  std::vector<std::string> inputs, outputs;  // of the part; inputs that only name a constant are left out
  std::vector<Weight> weights;
  std::vector<Constant> constants;
  std::set<std::string> copied;  // the names of the constants whose values are in the bytes, also of those in subgraphs
};

// Throws an Error if the part holds what a model cannot express here, such as an attribute that is a type.
GraphModel model_of(ort::Api api, const ort::Graph* graph, const Part& part);

// The model of a fused part with all `constants` of the part as external data. Those that the fused part does not have become
// inputs with a default, so that ONNX Runtime keeps them. Throws an Error if the bytes are no model.
std::string with_constants_outside(std::string_view model, const std::vector<Constant>& constants);

// A model of one node that has these constants in the same way.
std::string trial_model(const std::vector<Constant>& constants);

}  // namespace fa::provider
