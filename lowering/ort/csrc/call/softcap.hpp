// The attribute cpu_softcap, which several operators have. op_registry/constraints/softcap.py has the same checks.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

namespace fa {

// What is wrong with cpu_softcap beside the scale; empty if nothing is. The kernels multiply by scale / cpu_softcap.
inline std::string softcap_fault(float softcap, float scale) {
  constexpr float kSmallest = 1e-6f;
  constexpr float kLargest = 1e6f;
  const auto text = [](float x) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(x));
    return std::string(digits);
  };
  if (softcap == 0) return "";
  if (!(softcap >= kSmallest && softcap <= kLargest)) {
    return "cpu_softcap is " + text(softcap) + ", expected 0 or a number from 1e-06 to 1e+06";
  }
  if (scale != 0 && !std::isnormal(scale / softcap)) {
    return "scale_value is " + text(scale) + " beside a cpu_softcap of " + text(softcap) +
           ", expected a quotient that float32 can hold";
  }
  return "";
}

}  // namespace fa
