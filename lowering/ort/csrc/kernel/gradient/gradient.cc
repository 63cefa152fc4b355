// The fast kernel of the gradient, compiled once for each instruction set: FA_ISA is the namespace of this copy.
#include "driver.hpp"
#include "../others.hpp"

namespace fa::FA_ISA {

Outcome gradient(const Gradients& gradients, const Runtime& runtime) {
  if constexpr (kHasPairs) {
    if (!grad::Shape(gradients.problem).pairs) return FA_OTHERS::gradient(gradients, runtime);
  }
  return grad::Driver(gradients, runtime).run();
}

}  // namespace fa::FA_ISA
