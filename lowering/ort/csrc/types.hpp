// The types of one registered combination of inputs and outputs. descriptors.inc lists the combinations of each
// operator.
#pragma once

#include "ort_abi.hpp"

namespace fa {

struct Types {
  ort::Element inputs[96];
  ort::Element outputs[8];
};

// Stands for the required output of an operator that has none.
inline constexpr size_t kNoOutput = ~size_t{0};

}  // namespace fa
