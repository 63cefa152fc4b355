// The cases that bench/threads.py gives to the programs that simulate schedules.
#pragma once

#include <cstdint>
#include <cstdio>

#include "../attention.hpp"

namespace fa::check {

struct ScheduleCase {
  int64_t batch, heads, key_heads, workers;
  Sequence sequence;  // each of the batch

  int64_t group() const { return heads / key_heads; }
};

// Reads a line; schedule.cc says what it holds. False at the end.
inline bool read_case(ScheduleCase& to) {
  long long batch, heads, key_heads, rows, keys, band, workers;
  if (std::scanf("%lld %lld %lld %lld %lld %lld %lld", &batch, &heads, &key_heads, &rows, &keys, &band, &workers) != 7) {
    return false;
  }
  to = {batch, heads, key_heads, workers, {}};
  to.sequence.query_length = rows;
  to.sequence.key_length = keys;
  to.sequence.band_first = band > 0 ? keys - rows - band + 1 : -kNoLimit;
  to.sequence.band_last = band != 0 ? keys - rows : kNoLimit;
  return true;
}

// Prints how many tasks there were, and the idle share.
inline void print_idle(int64_t tasks, double share) { std::printf("%lld %.2f\n", static_cast<long long>(tasks), 100 * share); }

}  // namespace fa::check
