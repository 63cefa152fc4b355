#include "processor.hpp"

#include <cpuid.h>

#include "tiles.hpp"

namespace fa::processor {

namespace {

// The bits of XCR0: the registers that the operating system saves. 0 if it does not use XSAVE.
uint32_t saved_state() {
  constexpr uint32_t kOsxsave = 1u << 27;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kOsxsave)) return 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return eax;
}

}  // namespace

bool has(const Feature& feature) {
  uint32_t registers[4] = {};
  auto& [eax, ebx, ecx, edx] = registers;
  // False where the processor has no such leaf. For a subleaf that it does not have, it answers with zeros.
  if (!__get_cpuid_count(feature.leaf, feature.subleaf, &eax, &ebx, &ecx, &edx)) return false;
  const uint32_t bits = registers[static_cast<int>(feature.where)];
  if (!(bits >> feature.bit & 1u) || (saved_state() & feature.state) != feature.state) return false;
  return feature.state != kTileState || tiles_are_granted();
}

bool is_intel() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx &&
         edx == signature_INTEL_edx;
}

}  // namespace fa::processor
