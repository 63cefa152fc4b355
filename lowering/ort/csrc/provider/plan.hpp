// Plans: files that hold the matcher's answers, for programs that have no matcher.
//
// `fa-compiler plan` makes a session, and writes down what the matcher answers in it. A session that is shown the same
// graph takes the answer from the file.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph_model.hpp"

namespace fa::provider {

// The release of this package. A plan of another one is not used.
inline constexpr const char* kVersion = "0.1.0";

// What the matcher says of a graph.
struct Answer {
  std::string model;  // empty: nothing is to be replaced
  std::vector<int64_t> sizes;
  std::vector<uint64_t> read;  // the places of the large weights whose values the matcher has read
  ort::Severity severity = ort::Severity::info;
  std::string message;
};

// A file with a plan, or a folder with files whose names end with ".plan".
class Plans {
 public:
  // `runtime` is the version of ONNX Runtime, such as "1.32.0".
  Plans(std::string place, std::string runtime) : place_(std::move(place)), runtime_(std::move(runtime)) {}

  // Reads what fa_compiler/provider/plan.py writes, and returns the answer for this graph. It is empty if no plan has
  // one; `refused` then gets the reasons. It also gets those of the files of a folder that cannot be used at all.
  //
  //   file    := "fa_compiler plan 2\n" digest content               the digest of the content
  //   content := text text text text entries:number entry*           the versions of this package and of ONNX Runtime,
  //                                                                  the level of optimisation, the name of the model
  //   entry   := digest text text sizes:number number* weights:number weight*
  //                                                                  the digest of the graph, the line for the log, the
  //                                                                  fused model, the numbers of output_sizes.hpp
  //   weight  := number digest                                       the place and content of a weight that was read
  //   text    := bytes:number byte*
  //   number  := eight bytes, the lowest first
  //
  // The digest of the graph is that of GraphModel::bytes, so it covers all but the values of large weights. The answer
  // depends on the values of those that the matcher has read, and on no others.
  std::optional<Answer> answer(const GraphModel& graph, const std::function<void(const std::string&)>& refused) const;

 private:
  std::string place_, runtime_;
};

}  // namespace fa::provider
