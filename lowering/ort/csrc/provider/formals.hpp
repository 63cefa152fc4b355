// A check of what was written and read again: the inputs and outputs of bodies.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ep_abi.hpp"

namespace fa::provider {

// The inputs and outputs of the bodies of Loop, Scan and If in a graph, at any depth.
struct Formal {
  std::string name;
  ort::Element type = ort::Element::undefined;  // of a tensor
  std::optional<size_t> rank;                   // of a tensor, where it is known
};
using Formals = std::multimap<std::string, std::vector<Formal>>;  // by the names of the inputs and outputs
Formals formals_of(ort::Api api, const ort::Graph* graph);

// What the bodies of `made` no longer say of those of `given`: a sentence, or nothing.
std::string lost_between(const Formals& given, const Formals& made);

}  // namespace fa::provider
