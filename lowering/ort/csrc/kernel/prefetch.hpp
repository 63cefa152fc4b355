// Asking memory for what comes later: the processor's own prefetching stops at the end of a page and does not know where
// the next row of a head lies. Worth a third of the time of decoding.
//
// What is read in the order of memory is asked for into the second-level cache; into the first it gains nothing. Rows that
// lie apart go into the first: on Zen 4, asking for the second waits for the address of a page that is not at hand, 70
// cycles a line, and often brings nothing.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// Keys that lie between the one in work and the one asked for. 16 is slower by a tenth, 64 to 256 are the same.
inline constexpr int64_t kAhead = 32;

inline constexpr int64_t kCacheLine = 64;

// Whoever calls these must be inlined, too: GCC takes a function that does nothing else for one without effect.
template <class Number>
FA_INLINE void ask_for(const Number* p) { __builtin_prefetch(p, 0, 2); }

// The cache lines of some bytes, which may begin within one.
template <int kLocality = 2>
FA_INLINE void ask_for_lines(const char* from, int64_t bytes) {
  const char* end = from + bytes;
  for (from -= reinterpret_cast<uintptr_t>(from) % kCacheLine; from < end; from += kCacheLine) {
    __builtin_prefetch(from, 0, kLocality);
  }
}

// A longer row, of a bias, would push out of the first-level cache what the products read: up to 17 % more time.
inline constexpr int64_t kNearBytes = 512;

// A row that lies apart from others.
FA_INLINE void ask_for_row(const char* from, int64_t bytes) {
  if (bytes <= kNearBytes) {
    ask_for_lines<3>(from, bytes);
  } else {
    ask_for_lines(from, bytes);
  }
}

// Row `row` of a head that begins at element `start`; what is beyond the tensor is not touched.
FA_INLINE void ask_for_row(const Strided& rows, Type type, int64_t start, int64_t row, int64_t size) {
  const int64_t bytes = type == Type::float32 ? 4 : 2;
  const char* from = static_cast<const char*>(rows.data) + (start + row * rows.row) * bytes;
  ask_for_row(from, size * bytes);
}

}  // namespace fa::FA_ISA
