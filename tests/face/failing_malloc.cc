// A malloc, to be preloaded, that fails once: at a chosen call from the library of kernels.
#include <link.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" void* __libc_malloc(size_t bytes);

namespace {

std::atomic<bool> counting{false};
std::atomic<long> calls{0};
long failing = 0;
uintptr_t code_begin = 0, code_end = 0;  // of the library

int find_library(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "libfa_compiler_ort") == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    code_begin = info->dlpi_addr + part.p_vaddr;
    code_end = code_begin + part.p_memsz;
  }
  return 1;
}

}  // namespace

// From now on calls are counted, and the one with this number fails. 0: none fails.
extern "C" void fail_allocation(long number) {
  dl_iterate_phdr(find_library, nullptr);
  failing = number;
  calls = 0;
  counting = true;
}

// Ends the counting, and returns how many calls there were.
extern "C" long count_allocations() {
  counting = false;
  return calls;
}

extern "C" void* malloc(size_t bytes) {
  const auto caller = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (counting && caller >= code_begin && caller < code_end && ++calls == failing) return nullptr;
  return __libc_malloc(bytes);
}
