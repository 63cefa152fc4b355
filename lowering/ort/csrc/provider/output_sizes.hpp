// The sizes of the outputs of a fused graph, as far as they are known before it runs.
//
// With them the outputs are written to the memory that the caller's session provides. An output whose sizes are not
// known is copied.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fa::provider {

using Shape = std::vector<int64_t>;

class OutputSizes {
 public:
  OutputSizes() = default;

  // Reads what fa_compiler/provider/matching.py writes:
  //
  //   numbers := pairs:count (input axis input axis)* output*   dimensions that have one name, and so one size
  //   output  := -1 | rank dimension*                            -1: the sizes are not known
  //   dimension := terms:count term*                             a sum
  //   term    := coefficient factors:count (input axis)*         a product of sizes of inputs
  //
  // Throws an Error if the numbers end too early or name an input that there is not.
  OutputSizes(std::span<const int64_t> numbers, size_t inputs, size_t outputs);

  // The shape of an output in a run with these inputs. Empty if it is not known, if inputs that name one size give
  // two, or if an input is empty.
  std::optional<Shape> shape(size_t output, std::span<const Shape> inputs) const;

 private:
  struct Place {
    size_t input, axis;
  };
  struct Term {
    int64_t coefficient;
    std::vector<Place> factors;
  };
  using Dimension = std::vector<Term>;

  static bool read(const Place& place, std::span<const Shape> inputs, int64_t& size);

  std::vector<std::pair<Place, Place>> equal_;
  std::vector<std::optional<std::vector<Dimension>>> outputs_;
};

}  // namespace fa::provider
