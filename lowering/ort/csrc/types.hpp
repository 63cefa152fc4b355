// The types of one combination that an operator is registered for, as descriptors.inc lists them.
#pragma once

#include "ort_abi.hpp"

namespace fa {

struct Types {
  ort::Element inputs[96];
  ort::Element outputs[8];
};

// The required output of an operator whose nodes may leave out any of them.
inline constexpr size_t kNoOutput = ~size_t{0};

}  // namespace fa
