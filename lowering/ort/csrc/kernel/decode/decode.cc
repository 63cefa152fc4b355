// Compiled once for each instruction set; FA_ISA is its namespace.
#include "driver.hpp"
#include "../others.hpp"

namespace fa::FA_ISA {

Outcome decode(const Decode& decode, const Runtime& runtime) {
  if constexpr (!kDecodes<Cell::float32>) {
    constexpr Cell kCell = kDecodes<Cell::int8> ? Cell::int8 : Cell::bfloat16;
    if (decode.cell != kCell) return FA_OTHERS::decode(decode, runtime);
  }
  return Decoder(decode, runtime).run();
}

}  // namespace fa::FA_ISA
