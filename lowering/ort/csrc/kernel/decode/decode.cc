// Compiled once for each instruction set; FA_ISA is its namespace.
#include "driver.hpp"

namespace fa::FA_ISA {

Outcome decode(const Decode& decode, const Runtime& runtime) { return Decoder(decode, runtime).run(); }

}  // namespace fa::FA_ISA
