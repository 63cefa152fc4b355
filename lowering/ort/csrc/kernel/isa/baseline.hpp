// What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64.
#pragma once

namespace fa::FA_ISA {
inline constexpr int kLanes = 4;
}

#include "portable.hpp"

namespace fa::FA_ISA::isa {

struct baseline : Portable {
#if defined(__aarch64__)
  static constexpr int kRegisters = 32;
  static constexpr int kMicroRows = 8;  // 8 x 2 sums, 8 vectors of A and 2 of B fit 32 registers
  static constexpr bool kLaneOperands = true;
#else
  static constexpr int kRegisters = 16;
  static constexpr int kMicroRows = 6;
#endif
};

}  // namespace fa::FA_ISA::isa
