// The session that runs a fused graph inside the session of the caller.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../op.hpp"
#include "../register.hpp"
#include "graph_model.hpp"
#include "output_sizes.hpp"

namespace fa::provider {

// Owners of the runtime's objects.
template <auto& kRelease>
struct Deleter {
  ort::Api api;
  template <class Object>
  void operator()(Object* object) const {
    kRelease(api, object);
  }
};
using EnvPtr = std::unique_ptr<ort::Env, Deleter<ort::ReleaseEnv>>;
using SessionPtr = std::unique_ptr<ort::Session, Deleter<ort::ReleaseSession>>;
using OptionsPtr = std::unique_ptr<ort::SessionOptions, Deleter<ort::ReleaseSessionOptions>>;
using PairsPtr = std::unique_ptr<ort::KeyValuePairs, Deleter<ort::ReleaseKeyValuePairs>>;
using ValuePtr = std::unique_ptr<ort::Value, Deleter<ort::ReleaseValue>>;

// The inputs and outputs of the node that the graph becomes in the caller's session, as places among those of the graph.
struct Ports {
  std::vector<size_t> inputs, outputs;
};

// A session with the options of the caller's session: the same number of threads, the same optimisations, the same
// other providers.
class FusedSession {
 public:
  // `options` is used here only. The memory of `weights` is copied. Throws an Error if ONNX Runtime refuses the model.
  FusedSession(ort::Api api, ort::SessionOptions* options, const std::string& model, const std::vector<Weight>& weights);

  // Runs the graph with the inputs and outputs of the node that stands for it, and returns the status of the run. `inputs`
  // and `outputs` are the names of the graph, and `sizes` knows its outputs. Re-entrant.
  ort::Status* run(const Ports& ports, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
                   const OutputSizes& sizes, ort::KernelContext* context) const;

 private:
  ort::Api api_;
  EnvPtr env_;
  DomainPtr operators_;
  SessionPtr session_;
};

}  // namespace fa::provider
