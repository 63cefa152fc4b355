// The limits of this processor, for limits.py: multiply-adds, bf16 dot products, bf16 products of tiles, exponentials, and reads
// of two arrays.
//
// This file is compiled on the measured machine, with -march=native or for one instruction set. A rate is measured over `seconds` on `threads`
// threads that start together: it is all work divided by the time from the first start to the last end. The loops have
// enough independent accumulators to hide the latency of a multiply-add (4 cycles on two pipes: 8), or of a product of tiles
// (52 cycles, one every 16: 4); they fit into the registers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <thread>
#include <vector>

// limits.py takes away the macro for an assembler that does not know the instructions.
#if defined(__AMX_BF16__) && defined(__linux__)
#include "../../lowering/ort/csrc/tiles.hpp"
#define FA_TILES
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kBytes = 64, kChains = 24;
#elif defined(__AVX__)
constexpr int kBytes = 32, kChains = 12;
#else
constexpr int kBytes = 16, kChains = 12;
#endif
constexpr int kLanes = kBytes / 4;
typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IntVec __attribute__((vector_size(kBytes)));

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs work(index) on each thread at the same time; returns the seconds from the first start to the last end.
template <class Work>
double together(int threads, Work work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<double> begin(threads), end(threads);
  auto one = [&](int index) {
    ++ready;
    while (!go.load(std::memory_order_acquire)) {
    }
    begin[index] = now();
    work(index);
    end[index] = now();
  };
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index) others.emplace_back(one, index);
  while (ready.load() < threads - 1) {
  }
  go.store(true, std::memory_order_release);
  one(0);
  for (auto& thread : others) thread.join();
  return *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
}

// Repeats block(), which returns its units of work, until `seconds` have passed; returns the units per second.
template <class Block>
double rate(int threads, double seconds, Block block) {
  std::vector<double> done(threads);
  const double took = together(threads, [&](int index) {
    const double stop = now() + seconds;
    do done[index] += block();
    while (now() < stop);
  });
  double all = 0;
  for (double units : done) all += units;
  return all / took;
}

void keep(Vec x) { asm volatile("" ::"m"(x)); }

Vec opaque(float value) {
  asm volatile("" : "+m"(value));
  return value - (Vec){};
}

double fma_block() {
  constexpr int kSteps = 4096;
  const Vec a = opaque(0.5f), b = opaque(0.25f);
  Vec sum[kChains];
  for (auto& each : sum) each = a;
  for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 24
    for (int chain = 0; chain < kChains; ++chain) sum[chain] = sum[chain] * a + b;
  for (auto& each : sum) keep(each);
  return 2.0 * kSteps * kChains * kLanes;
}

#if defined(__AVX512BF16__)
double bf16_block() {
  constexpr int kSteps = 4096;
  const __m512bh a = (__m512bh)opaque(0.5f), b = (__m512bh)opaque(0.25f);
  __m512 sum[kChains];
  for (auto& each : sum) each = (__m512)a;
  for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 24
    for (int chain = 0; chain < kChains; ++chain) sum[chain] = _mm512_dpbf16_ps(sum[chain], a, b);
  for (auto& each : sum) keep((Vec)each);
  return 4.0 * kSteps * kChains * kLanes;
}
#endif

#if defined(FA_TILES)
// Products of tiles 6 and 7 are added to tiles 0 to 5. One instruction multiplies 16 rows of 32 numbers with 32 rows of 16.
double tile_block() {
  constexpr int kSteps = 1024, kSums = 6;
  const fa::TileConfiguration configuration;
  uint16_t halves[16 * 32];
  std::fill(std::begin(halves), std::end(halves), uint16_t{0x3f00});  // 0.5
  asm volatile("ldtilecfg %0" ::"m"(configuration));
  asm volatile("tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7" ::"r"(halves), "r"(int64_t{64}) : "memory");
  asm volatile(
      "tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\ttilezero %tmm4\n\ttilezero %tmm5");
  for (int step = 0; step < kSteps; ++step)
    asm volatile(
        "tdpbf16ps %tmm7, %tmm6, %tmm0\n\ttdpbf16ps %tmm7, %tmm6, %tmm1\n\ttdpbf16ps %tmm7, %tmm6, %tmm2\n\t"
        "tdpbf16ps %tmm7, %tmm6, %tmm3\n\ttdpbf16ps %tmm7, %tmm6, %tmm4\n\ttdpbf16ps %tmm7, %tmm6, %tmm5");
  asm volatile("tilerelease");
  return 2.0 * kSteps * kSums * 16 * 32 * 16;
}
#endif

// 2^n * p(r) with a polynomial of degree 5, which needs the fewest instructions. Its relative error of a few 1e-6 is
// too large for a real softmax. n is rounded by adding a large number, and the exponent is set as an integer.
Vec exp_by_integers(Vec x) {
  const Vec shifted = x * 1.44269504f + 12582912.0f;
  const Vec r = x - (shifted - 12582912.0f) * 0.69314718f;
  Vec p = r * 8.3333e-3f + 4.16667e-2f;
  p = p * r + 1.66667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Vec)((IntVec)p + ((IntVec)shifted << 23));
}

#if defined(__AVX512F__)
Vec exp_by_scaling(Vec x) {
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = x - n * 0.69314718f;
  Vec p = r * 8.3333e-3f + 4.16667e-2f;
  p = p * r + 1.66667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif

// The inner pass of a softmax in the first-level cache: load, subtract the maximum, exponential, store, sum.
template <class Exp>
double exp_block(Exp exp) {
  constexpr int kCount = 4096 / kLanes, kStreams = 4;
  static thread_local Vec in[kCount], out[kCount];
  const Vec maximum = opaque(1.0f);
  Vec sum[kStreams] = {};
  for (int at = 0; at < kCount; at += kStreams)
#pragma GCC unroll 4
    for (int stream = 0; stream < kStreams; ++stream) {
      const Vec value = exp(in[at + stream] - maximum);
      out[at + stream] = value;
      sum[stream] += value;
    }
  for (auto& each : sum) keep(each);
  asm volatile("" ::"r"(in), "r"(out) : "memory");  // the input might change, the output might be read
  return 1.0 * kCount * kLanes;
}

// Adds up whole vectors of both arrays in parallel; a few bytes at the end may be left out.
void read_both(const char* first, const char* second, size_t bytes) {
  constexpr size_t kStep = 8 * kBytes;
  typedef float Loose __attribute__((vector_size(kBytes), aligned(4)));
  Vec sum[8] = {};
  for (size_t at = 0; at + kStep <= bytes; at += kStep)
#pragma GCC unroll 8
    for (int part = 0; part < 8; ++part)
      sum[part] += *(const Loose*)(first + at + part * kBytes) + *(const Loose*)(second + at + part * kBytes);
  for (auto& each : sum) keep(each);
}

}  // namespace

extern "C" {

double fma_flops(int threads, double seconds) { return rate(threads, seconds, fma_block); }

// 0 if the processor does not have the instruction, or if the compiler does not know it.
double bf16_flops(int threads, double seconds) {
#if defined(__AVX512BF16__)
  return rate(threads, seconds, bf16_block);
#else
  return 0 * threads * seconds;
#endif
}

// 0 if the processor, the operating system or the compiler does not have tile registers. No tile is loaded in the loop: this is
// the rate of the instruction alone, as for the other products.
double tile_flops(int threads, double seconds) {
#if defined(FA_TILES)
  if (fa::tiles_are_granted()) return rate(threads, seconds, tile_block);
#endif
  return 0 * threads * seconds;
}

// The better of two methods.
double exp_rate(int threads, double seconds) {
  double best = rate(threads, seconds / 2, [] { return exp_block(exp_by_integers); });
#if defined(__AVX512F__)
  best = std::max(best, rate(threads, seconds / 2, [] { return exp_block(exp_by_scaling); }));
#endif
  return best;
}

// The seconds in which the threads read two arrays of `bytes` bytes each once.
double read_seconds(const char* first, const char* second, size_t bytes, int threads) {
  const size_t share = bytes / threads / 64 * 64;
  return together(threads, [&](int index) {
    const size_t start = share * index, length = index + 1 < threads ? share : bytes - start;
    read_both(first + start, second + start, length);
  });
}

}  // extern "C"
