// Software prefetching. The hardware prefetcher stops at the end of a page and does not know where the next row of a head
// lies. Prefetching by software saves a third of the time of decoding.
//
// Rows that are read in the order of memory are prefetched into the second-level cache; the first level gains nothing. Rows
// that lie apart go into the first level: on Zen 4, a prefetch into the second level waits for the translation of an address
// whose page is not in the TLB (70 cycles a line), and often brings nothing. prefetch_queue.hpp looks up the pages first.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Prefetch distance in rows of K or V. Measured: 16 is slower by a tenth, 64 to 256 are the same.
inline constexpr int64_t kPrefetchDistance = 32;

inline constexpr int64_t kCacheLine = 64;

// The callers of these functions must be inlined, too. GCC removes calls of a
// function that only prefetches, because it considers it to have no effect.
template <class Number>
FA_INLINE void prefetch(const Number* p) { __builtin_prefetch(p, 0, 2); }

// Prefetches the cache lines of `bytes` bytes, which may begin within a line.
template <int kLocality = 2>
FA_INLINE void prefetch_lines(const char* from, int64_t bytes) {
  const char* end = from + bytes;
  for (from -= reinterpret_cast<uintptr_t>(from) % kCacheLine; from < end; from += kCacheLine) {
    __builtin_prefetch(from, 0, kLocality);
  }
}

// The longest row that is prefetched into the first-level cache. Longer rows, of a bias, would evict what the products read:
// up to 17 % more time.
inline constexpr int64_t kMostL1Bytes = 512;

// Prefetches a row that does not follow the row before it in memory.
FA_INLINE void prefetch_row(const char* from, int64_t bytes) {
  if (bytes <= kMostL1Bytes) {
    prefetch_lines<3>(from, bytes);
  } else {
    prefetch_lines(from, bytes);
  }
}

// Prefetches row `row` of a head that begins at element `start`. A prefetch beyond the end of the tensor does no harm.
FA_INLINE void prefetch_row(const Strided& rows, Type type, int64_t start, int64_t row, int64_t size) {
  const int64_t bytes = type == Type::float32 ? 4 : 2;
  const char* from = static_cast<const char*>(rows.data) + (start + row * rows.row) * bytes;
  prefetch_row(from, size * bytes);
}

}  // namespace fa::FA_ISA
