// Sessions that the provider makes itself while ONNX Runtime makes the caller's session: the one that runs the fused graph,
// and one that tries whether the options allow a claimed node at all.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ep_abi.hpp"
#include "graph_model.hpp"
#include "owners.hpp"

namespace fa::provider {

inline constexpr const char* kName = "FaCompilerExecutionProvider";

// An entry of the options of such a session.
inline constexpr const char* kNested = "fa_compiler.nested";

// The provider of such a session. It shows the graph to the observer of make_session in this thread.
ort::ep::Provider* nested_provider();

// Is shown the graphs of a session that is made.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void see(ort::Api api, const ort::Graph* graph, ort::GraphSupportInfo* support) = 0;
};

// A copy of the options of a session for a session inside it. It writes no files, and no errors and warnings to the log: the
// provider or the caller's session says them. Where the log tells more than these, it tells of this session, too.
OptionsPtr nested_options(ort::Api api, const ort::SessionOptions* options, const ort::Logger* logger);

// A session, and the environment that it needs.
struct MadeSession {
  EnvPtr env;
  SessionPtr session;
};

// A session of a model that has `weights` as external data. Their memory is copied. Throws an Error if ONNX Runtime refuses
// the model, and what the observer throws.
MadeSession make_session(ort::Api api, std::string_view model, const std::vector<Weight>& weights,
                         ort::SessionOptions* options, Observer* observer);

// Whether ONNX Runtime makes a session with these options, and a model of one node, in which a provider claims the node: the
// reason why not, or nothing. It makes none that is to write the optimised model, for example.
std::string fault_of_claims(ort::Api api, const ort::SessionOptions* options, const std::vector<Constant>& constants);

// Whether it makes a session without a claim, with `options` of nested_options.
bool makes_a_session(ort::Api api, ort::SessionOptions* options);

// The names of the constants that the caller has given to the options, by AddInitializer. They cannot be asked for, but a
// copy of the options does not take a name again.
class SharedNames {
 public:
  SharedNames(ort::Api api, const ort::SessionOptions* options);

  // Whether a name is among them. Each name may be asked for once.
  bool has(const std::string& name);

 private:
  ort::Api api_;
  float number_ = 0;
  OptionsPtr options_;
  ValuePtr value_;
};

// The constants as weights.
std::vector<Weight> weights_of(const std::vector<Constant>& constants);

}  // namespace fa::provider
