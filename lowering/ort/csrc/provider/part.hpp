// The part of a graph that the provider claims.
#pragma once

#include <vector>

#include "ep_abi.hpp"

namespace fa::provider {

// The nodes of a main graph that the provider can take as one, in the order of the graph, and the outputs of this part:
// values that nodes outside it read, or that are outputs of the graph.
struct Part {
  std::vector<const ort::Node*> nodes;
  std::vector<const ort::ValueInfo*> outputs;
};

// The part of a main graph without the nodes that make what a provider cannot hand back, and those that read of it: a claimed
// node gives tensors of numbers only. So a graph whose output is a sequence is taken up to the nodes that make the sequence.
Part part_of(ort::Api api, const ort::Graph* graph);

}  // namespace fa::provider
