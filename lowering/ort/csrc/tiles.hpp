// What a program needs before it uses tile registers (Intel's AMX).
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fa {

// Asks Linux for the tile registers, for all threads of the process (arch_prctl, ARCH_REQ_XCOMP_PERM). It refuses where a
// thread's stack for signals is too small for them.
inline bool tiles_are_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// The layout that LDTILECFG reads: every tile has all its rows and bytes.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

}  // namespace fa
