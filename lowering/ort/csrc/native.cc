// Prints the name of the best variant that this machine runs. CMakeLists.txt runs this program where FA_VARIANTS is native.
#include <cstdio>

#include "processor.cc"  // CMake compiles one source here

namespace fa {

const char* best_variant() {
#define FA_VARIANT(isa, attention, gradient, sparse, decode, linear, supported, preferred) \
  if ((supported) && (preferred)) return #isa;
#include "variants.inc"
#undef FA_VARIANT
  return "";
}

}  // namespace fa

int main() { std::fputs(fa::best_variant(), stdout); }
