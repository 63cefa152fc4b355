// What the processor can do, asked of the processor itself. __builtin_cpu_supports relies on tables that the compiler's own
// runtime library fills; some toolchains, such as Zig's, leave them empty, and the answer is then always no.
#pragma once

#include <cstdint>

namespace fa::processor {

// Where CPUID reports a feature (Intel's Software Developer's Manual, volume 2A, CPUID).
enum class Register { eax, ebx, ecx, edx };
struct Feature {
  uint32_t leaf, subleaf;
  Register where;
  int bit;
  uint32_t state;  // the bits of XCR0 that the operating system has to set to save the registers of the feature
};

inline constexpr uint32_t kAvxState = 0x6;      // XMM and YMM
inline constexpr uint32_t kAvx512State = 0xe6;  // also the mask registers and both parts of ZMM

inline constexpr uint32_t kTileState = 0x60000;  // the tile registers and their configuration

// The names are those that GCC's option -m takes, with _ for -.
inline constexpr Feature fma{1, 0, Register::ecx, 12, kAvxState};
inline constexpr Feature f16c{1, 0, Register::ecx, 29, kAvxState};
inline constexpr Feature avx2{7, 0, Register::ebx, 5, kAvxState};
inline constexpr Feature avx512f{7, 0, Register::ebx, 16, kAvx512State};
inline constexpr Feature avx512dq{7, 0, Register::ebx, 17, kAvx512State};
inline constexpr Feature avx512bw{7, 0, Register::ebx, 30, kAvx512State};
inline constexpr Feature avx512vl{7, 0, Register::ebx, 31, kAvx512State};
inline constexpr Feature avx512vnni{7, 0, Register::ecx, 11, kAvx512State};
inline constexpr Feature avx512bf16{7, 1, Register::eax, 5, kAvx512State};
inline constexpr Feature amx_tile{7, 0, Register::edx, 24, kTileState};
inline constexpr Feature amx_bf16{7, 0, Register::edx, 22, kTileState};

// Whether the processor has the feature and the operating system saves its registers. Linux saves tile registers only for a
// process that asks for them, which this function does. Only for x86-64.
bool has(const Feature& feature);

bool is_intel();

}  // namespace fa::processor
