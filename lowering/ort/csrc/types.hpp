// The types of one combination that an operator is registered for, as descriptors.inc lists them.
#pragma once

#include "ort_abi.hpp"

namespace fa {

struct Types {
  ort::Element inputs[96];
  ort::Element outputs[8];
};

}  // namespace fa
