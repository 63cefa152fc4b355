// The session that runs a fused graph inside the session of the caller.
#pragma once

#include <string>
#include <vector>

#include "../register.hpp"
#include "formals.hpp"
#include "graph_model.hpp"
#include "output_sizes.hpp"
#include "nested.hpp"

namespace fa::provider {

// The inputs and outputs of the node that the graph becomes in the caller's session, as places among those of the graph.
struct Ports {
  std::vector<size_t> inputs, outputs;
};

// A session with the options of the caller's session: the same number of threads, the same optimisations, the same
// other providers.
class FusedSession {
 public:
  // `options` is used here only. The memory of `weights` is copied. Throws an Error if ONNX Runtime refuses the model, or if
  // it reads other bodies in it than `formals`, those of the graph that was fused.
  FusedSession(ort::Api api, ort::SessionOptions* options, const std::string& model, const std::vector<Weight>& weights,
               const Formals& formals);

  // Runs the graph with the inputs and outputs of the node that stands for it, and returns the status of the run. `inputs`
  // and `outputs` are the names of the graph, and `sizes` knows its outputs. `options` may be null. Re-entrant.
  ort::Status* run(const Ports& ports, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
                   const OutputSizes& sizes, const ort::RunOptions* options, ort::KernelContext* context) const;

 private:
  ort::Api api_;
  DomainPtr operators_;
  MadeSession session_;
};

}  // namespace fa::provider
