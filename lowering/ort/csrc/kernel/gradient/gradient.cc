// The fast kernel of the gradient, compiled once for each instruction set: FA_ISA is the namespace of this copy.
#include "driver.hpp"

namespace fa::FA_ISA {

Outcome gradient(const Gradients& gradients, const Runtime& runtime) {
  return grad::Driver(gradients, runtime).run();
}

}  // namespace fa::FA_ISA
