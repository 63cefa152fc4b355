// The keys of one block that one query row attends, given the band and the mask.
#pragma once

#include "simd.hpp"

namespace fa::FA_ISA {

// The keys [begin, end) of a block whose byte in `mask` is 0; all of them if `mask` is null. begin, end and `mask` count from
// the block's first key.
struct View {
  int64_t begin = 0;
  int64_t end = 0;
  const uint8_t* mask = nullptr;

  bool empty() const { return begin >= end; }
  bool open(int64_t keys) const { return begin == 0 && end == keys && mask == nullptr; }
};

// Keys [begin, end), counted from the first key of the sequence.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// A range that contains all keys which the band and the prefix let rows [first_row, last_row] attend. `end` is never
// negative, because the prefix is not.
FA_INLINE KeyRange band_range(const Sequence& sequence, int64_t first_row, int64_t last_row) {
  const int64_t begin = larger(0, first_row + sequence.band_first);
  const int64_t end = smaller(sequence.key_length, larger(last_row + sequence.band_last + 1, sequence.prefix));
  return {smaller(begin, end), end < 0 ? 0 : end};
}

FA_INLINE bool no_zero_byte(const uint8_t* p) {
  uint64_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return ((bytes - 0x0101010101010101u) & ~bytes & 0x8080808080808080u) == 0;
}

// How many of the first (last) bytes are not 0, rounded down to a multiple of 8. That is exact enough to skip masked keys.
FA_INLINE int64_t masked_at_begin(const uint8_t* mask, int64_t count) {
  int64_t hidden = 0;
  while (hidden + 8 <= count && no_zero_byte(mask + hidden)) hidden += 8;
  return hidden;
}

FA_INLINE int64_t masked_at_end(const uint8_t* mask, int64_t count) {
  int64_t hidden = 0;
  while (hidden + 8 <= count && no_zero_byte(mask + count - hidden - 8)) hidden += 8;
  return hidden;
}

// The keys of one block that the band lets row i attend.
FA_INLINE View band_view(const Sequence& sequence, int64_t i, int64_t first_key, int64_t keys) {
  const KeyRange range = band_range(sequence, i, i);
  return {larger(0, range.begin - first_key), smaller(keys, range.end - first_key), nullptr};
}

// Narrows the view by the mask of row i.
FA_INLINE View without_masked(View view, const Problem& problem, const Sequence& sequence, int64_t head, int64_t i,
                              int64_t first_key) {
  if (view.empty()) return view;
  const uint8_t* mask = problem.mask + sequence.mask + head * problem.mask_head + i * problem.mask_row;
  if (problem.mask_column == 0) {
    if (*mask != 0) view.end = view.begin;
    return view;
  }
  mask += first_key;
  view.begin += masked_at_begin(mask + view.begin, view.end - view.begin);
  view.end -= masked_at_end(mask + view.begin, view.end - view.begin);
  uint8_t any = 0;
  uint8_t all = 1;
  for (int64_t j = view.begin; j < view.end; ++j) {
    any |= mask[j];
    all &= static_cast<uint8_t>(mask[j] != 0);
  }
  if (all != 0) {
    view.end = view.begin;
  } else if (any != 0) {
    view.mask = mask;
  }
  return view;
}

FA_INLINE View view_of(const Problem& problem, const Sequence& sequence, int64_t head, int64_t i, int64_t first_key,
                       int64_t keys) {
  const View view = band_view(sequence, i, first_key, keys);
  return problem.mask == nullptr ? view : without_masked(view, problem, sequence, head, i, first_key);
}

// Whether the sequence has a bound on j - i. Mode 0 always sets one: the defaults of pre_tockens and next_tockens (2^31 - 1)
// count as a band, too.
FA_INLINE bool has_band(const Sequence& sequence) {
  return sequence.band_first != -kNoLimit || sequence.band_last != kNoLimit;
}

// Whether there is no mask, or all rows of `head_count` heads have the same mask row, which is then read once for each block
// and not once for each row.
FA_INLINE bool rows_share_mask(const Problem& problem, int64_t head_count) {
  return problem.mask == nullptr || (problem.mask_row == 0 && (problem.mask_head == 0 || head_count == 1));
}

// What row i sees. `open` is what the mask leaves of the block, where all rows have the same mask. Where the band cuts off a
// part of `open`, the mask is read again, because it may hide all of the rest.
FA_INLINE View restricted_to_band(const View& open, const Problem& problem, const Sequence& sequence, int64_t head,
                                  int64_t i, int64_t first_key, int64_t keys) {
  const View band = band_view(sequence, i, first_key, keys);
  const View view{larger(band.begin, open.begin), smaller(band.end, open.end), open.mask};
  if (open.mask == nullptr || (view.begin == open.begin && view.end == open.end)) return view;
  return without_masked({view.begin, view.end, nullptr}, problem, sequence, head, i, first_key);
}

}  // namespace fa::FA_ISA
