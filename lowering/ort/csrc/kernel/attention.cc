// The fast kernel, compiled once for each instruction set: FA_ISA is the namespace of this copy.
#include "driver.hpp"
#include "others.hpp"

namespace fa::FA_ISA {

Outcome attention(const Problem& problem, const Runtime& runtime) {
  if constexpr (kHasPairs) {
    if (!Shape(problem).pairs()) return FA_OTHERS::attention(problem, runtime);
  }
  return Driver(problem, runtime).run();
}

}  // namespace fa::FA_ISA
