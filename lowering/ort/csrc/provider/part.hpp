// The part of a graph that the provider claims.
#pragma once

#include <vector>

#include "ep_abi.hpp"

namespace fa::provider {

// The nodes of a main graph that the provider can take as one, in the order of the graph; the inputs of the graph that this
// part may read, without those that only name a constant; and its outputs, values that nodes outside it read, or that are
// outputs of the graph.
struct Part {
  std::vector<const ort::Node*> nodes;
  std::vector<const ort::ValueInfo*> inputs, outputs;
};

// The part of a main graph that a claimed node can stand for, which is given tensors and sequences, and gives tensors of
// numbers. Left out are the nodes that make an output of another kind, or read an input of another kind, and those behind
// them: a graph whose output is a sequence is taken up to the nodes that make the sequence. An optional value is left out as
// an input because no session can be given one without content in a node.
Part part_of(ort::Api api, const ort::Graph* graph);

}  // namespace fa::provider
