// The tile registers of amx.hpp, kept in memory by the plain C++ of portable.hpp: for checks on machines that have none.
#pragma once

#include "baseline.hpp"

namespace fa::FA_ISA::isa {

struct tiles_in_memory : baseline {
  static constexpr int kMicroRows = kTileSide;
  static constexpr bool kHasPairs = true;
  static constexpr bool kHasTiles = true;
};

}  // namespace fa::FA_ISA::isa
