// A block of scores of one row: the query heads of a group times up to kGatherKeys keys, in one of two forms.
//
// Wide: heads lie in the lanes, [panel of heads][key][kWidth]; for groups of many heads. Narrow: keys lie in the lanes,
// [head][kGatherKeys]; for groups of few heads, whose products run along the rows. Both have the same operations.
#pragma once

#include "gather.hpp"

namespace fa::FA_ISA {

inline constexpr int kNarrowHeads = kLanes >= 16 ? 4 : 2;
inline constexpr int kDotKeys = 4;

struct Narrow {
  static constexpr bool kIsNarrow = true;
  static int64_t padded(int64_t heads) { return heads; }
  static int64_t query_floats(int64_t heads, int64_t depth) { return heads * chunks_of(depth) * kChunk; }

  static void pack_query(const Rows& rows, int64_t token, int64_t first, int64_t heads, float* out, float*) {
    const int64_t numbers = rows.numbers();
    for (int64_t h = 0; h < heads; ++h) {
      float* row = out + h * chunks_of(numbers) * kChunk;
      read_numbers(rows, token, first + h, 0, numbers, row);
      for (int64_t d = numbers; d % kLanes != 0; ++d) row[d] = 0;
    }
  }

  template <int kHeads>
  static void dots(const float* query, int64_t query_row, const float* keys, int64_t depth, int64_t count, float* out,
                   const Ahead& ahead) {
    for (int64_t j = 0; j < count; j += kDotKeys) {
      ahead.fetch(j, j + kDotKeys);
      Vec sum[kDotKeys][kHeads] = {};
      for (int64_t d = 0; d < depth; d += kLanes) {
        const float* at = keys + d / kChunk * kChunk * kGatherKeys + d % kChunk + j * kChunk;
        Vec q[kHeads];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) q[h] = load(query + h * query_row + d);
#pragma GCC unroll 4
        for (int n = 0; n < kDotKeys; ++n) {
          const Vec k = load(at + n * kChunk);
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; ++h) sum[n][h] += k * q[h];
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < kDotKeys; ++n) {
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) out[h * kGatherKeys + j + n] = sum_lanes(sum[n][h]);
      }
    }
  }

  // Keys past `count` get scores of what the buffer happens to hold; nobody reads them.
  static void scores(const float* query, int64_t heads, const float* keys, int64_t depth, int64_t count, float* out,
                     const Ahead& ahead) {
    const int64_t row = chunks_of(depth) * kChunk;
    if (heads == 1) dots<1>(query, row, keys, depth, count, out, ahead);
    if (heads == 2) dots<2>(query, row, keys, depth, count, out, ahead);
    if constexpr (kNarrowHeads > 2) {
      if (heads == 3) dots<3>(query, row, keys, depth, count, out, ahead);
      if (heads == 4) dots<4>(query, row, keys, depth, count, out, ahead);
    }
  }

  // out[head][column] = alpha[head] out + sum over keys of block[head][key] rows[key][column].
  static void weigh(const float* block, int64_t heads, const float* rows, int64_t columns, int64_t count, float* out,
                    const float* alpha) {
    const int64_t out_row = blocks_of(columns, kPanel) * kPanel;
    for (int64_t c = 0; c < columns; c += kPanel) {
      const float* at = rows + c / kChunk * kChunk * kGatherKeys + c % kChunk;
      product<2, kGatherKeys, 1, kChunk, Sum::scaled>(heads, block, at, count, out + c, out_row, alpha);
    }
  }

  // tile[key][column] = sum over heads of block[head][first + key] rows[head][column], for one panel of columns.
  static void spread(const float* block, int64_t heads, const float* rows, int64_t first, int64_t keys, float* tile) {
    product<2, 1, kGatherKeys, kPanel, Sum::fresh>(keys, block + first, rows, heads, tile, kPanel);
  }

  // Calls f(vector, head) for the scores of `count` keys, `head` telling where its lanes' heads begin (each lane the same
  // here), and stores what f makes of the vector.
  template <class F>
  static void each(float* block, int64_t heads, int64_t count, F f) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = 0; j < count; j += kLanes) {
        float* at = block + h * kGatherKeys + j;
        store(at, f(load(at), h, at - block));
      }
    }
  }
  FA_INLINE Vec of_heads(const float* values, int64_t head) { return splat(values[head]); }
  static float at(const float* block, int64_t head, int64_t key) { return block[head * kGatherKeys + key]; }

  // out[key] = sum over heads of block, each lane of which f changes first.
  template <class F>
  static void over_heads(const float* block, int64_t heads, int64_t count, float* out, F f) {
    for (int64_t j = 0; j < count; j += kLanes) {
      Vec sum{};
      for (int64_t h = 0; h < heads; ++h) sum += f(load(block + h * kGatherKeys + j), h);
      store(out + j, sum);
    }
  }

  // f(head vector or number) over keys: largest and sum of each head.
  static void largest(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; ++h) {
      Vec top = splat(-kInfinity);
      const float* row = block + h * kGatherKeys;
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) top = greater(load(row + j), top);
      float best = max_lanes(top);
      for (; j < count; ++j) best = row[j] > best ? row[j] : best;
      out[h] = best;
    }
  }
  static void sums(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; ++h) {
      Vec sum{};
      const float* row = block + h * kGatherKeys;
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) sum += load(row + j);
      float rest = 0;
      for (; j < count; ++j) rest += row[j];
      out[h] = sum_lanes(sum) + rest;
    }
  }
  // out[head] += sum over keys of block[head][key] values[key].
  static void dot_keys(const float* block, const float* values, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* row = block + h * kGatherKeys;
      float sum = 0;
      for (int64_t j = 0; j < count; ++j) sum += row[j] * values[j];
      out[h] += sum;
    }
  }
  // block[head][key] times what belongs to the key, where the condition on the score holds.
  FA_INLINE Vec of_keys(const float* values, int64_t place) { return load(values + place % kGatherKeys); }
};

template <int kVectors>
struct Wide {
  static constexpr bool kIsNarrow = false;
  static constexpr int kWidth = kVectors * kLanes;
  static constexpr int64_t kPanelFloats = int64_t{kGatherKeys} * kWidth;

  static int64_t padded(int64_t heads) { return blocks_of(heads, kWidth) * kWidth; }
  static int64_t query_floats(int64_t heads, int64_t depth) { return padded(heads) * depth; }

  // [panel][number][kWidth]; heads past the last are 0. `row` has room for one row.
  static void pack_query(const Rows& rows, int64_t token, int64_t first, int64_t heads, float* out, float* row) {
    const int64_t numbers = rows.numbers();
    for (int64_t h = 0; h < padded(heads); ++h) {
      float* to = out + h / kWidth * numbers * kWidth + h % kWidth;
      if (h < heads) {
        read_numbers(rows, token, first + h, 0, numbers, row);
        for (int64_t d = 0; d < numbers; ++d) to[d * kWidth] = row[d];
      } else {
        for (int64_t d = 0; d < numbers; ++d) to[d * kWidth] = 0;
      }
    }
  }

  static void scores(const float* query, int64_t heads, const float* keys, int64_t depth, int64_t count, float* out,
                     const Ahead& ahead) {
    for (int64_t p = 0; p * kWidth < heads; ++p) {
      for (int64_t j = 0; j < count; j += kTileRows) {
        if (p == 0) ahead.fetch(j, j + kTileRows);
        product<kVectors, kChunk, 1, kWidth, Sum::fresh, true>(smaller(kTileRows, count - j), keys + j * kChunk,
                                                               query + p * depth * kWidth, depth,
                                                               out + p * kPanelFloats + j * kWidth, kWidth);
      }
    }
  }

  static void weigh(const float* block, int64_t heads, const float* rows, int64_t columns, int64_t count, float* out,
                    const float* alpha) {
    const int64_t out_row = blocks_of(columns, kPanel) * kPanel;
    for (int64_t c = 0; c < columns; c += kPanel) {
      const float* at = rows + c / kChunk * kChunk * kGatherKeys + c % kChunk;
      for (int64_t p = 0; p * kWidth < heads; ++p) {
        const int64_t end = smaller(heads, (p + 1) * kWidth);
        for (int64_t h = p * kWidth; h < end; h += kTileRows) {
          product<2, 1, kWidth, kChunk, Sum::scaled>(smaller(kTileRows, end - h),
                                                     block + p * kPanelFloats + h % kWidth, at, count,
                                                     out + h * out_row + c, out_row, alpha + h);
        }
      }
    }
  }

  static void spread(const float* block, int64_t heads, const float* rows, int64_t first, int64_t keys, float* tile) {
    for (int64_t i = 0; i < keys * kPanel; ++i) tile[i] = 0;
    for (int64_t p = 0; p * kWidth < heads; ++p) {
      product<2, kWidth, 1, kPanel, Sum::added>(keys, block + p * kPanelFloats + first * kWidth,
                                                rows + p * kWidth * kPanel, smaller(kWidth, heads - p * kWidth), tile,
                                                kPanel);
    }
  }

  template <class F>
  static void each(float* block, int64_t heads, int64_t count, F f) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      float* at = block + h / kWidth * kPanelFloats + h % kWidth;
      for (int64_t j = 0; j < count; ++j, at += kWidth) store(at, f(load(at), h, at - block));
    }
  }
  FA_INLINE Vec of_heads(const float* values, int64_t head) { return load(values + head); }
  static float at(const float* block, int64_t head, int64_t key) {
    return block[head / kWidth * kPanelFloats + key * kWidth + head % kWidth];
  }

  template <class F>
  static void over_heads(const float* block, int64_t heads, int64_t count, float* out, F f) {
    for (int64_t j = 0; j < count; ++j) {
      Vec sum{};
      for (int64_t h = 0; h < heads; h += kLanes) {
        const Vec changed = f(load(block + h / kWidth * kPanelFloats + j * kWidth + h % kWidth), h);
        sum += clear_where(~first_lanes(heads - h), changed);
      }
      out[j] = sum_lanes(sum);
    }
  }

  static void largest(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      const float* at = block + h / kWidth * kPanelFloats + h % kWidth;
      Vec top = splat(-kInfinity);
      for (int64_t j = 0; j < count; ++j) top = greater(load(at + j * kWidth), top);
      store(out + h, top);
    }
  }
  static void sums(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      const float* at = block + h / kWidth * kPanelFloats + h % kWidth;
      Vec sum{};
      for (int64_t j = 0; j < count; ++j) sum += load(at + j * kWidth);
      store(out + h, sum);
    }
  }
  static void dot_keys(const float* block, const float* values, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      const float* at = block + h / kWidth * kPanelFloats + h % kWidth;
      Vec sum = load(out + h);
      for (int64_t j = 0; j < count; ++j) sum += load(at + j * kWidth) * values[j];
      store(out + h, sum);
    }
  }
  FA_INLINE Vec of_keys(const float* values, int64_t place) { return splat(values[place % kPanelFloats / kWidth]); }
};

// Calls f with the form that suits a group of so many heads: few in the lanes' other direction, else panels of one or
// two vectors, whichever leaves fewer lanes idle.
template <class F>
static void with_form(int64_t heads, F& f) {
  if (heads <= kNarrowHeads) return f(Narrow{});
  if (blocks_of(heads, kLanes) % 2 == 1) return f(Wide<1>{});
  return f(Wide<2>{});
}

}  // namespace fa::FA_ISA
