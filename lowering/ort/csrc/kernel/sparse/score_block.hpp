// A block of scores of one row: the query heads of a group times up to kGatherKeys keys, in one of two layouts.
//
// HeadsInLanes: [panel of heads][key][kWidth], for groups of many heads. KeysInLanes: [head][kGatherKeys], for groups of few
// heads; its products run along the rows. Both have the same functions. With kPairs the products with keys are of bfloat16,
// two at a time, as they lie in memory. The block itself is always float32.
#pragma once

#include "../others.hpp"
#include "product.hpp"

namespace fa::FA_ISA {

inline constexpr int kMostHeadsOfKeysInLanes = kLanes >= 16 ? 8 : 2;
inline constexpr int kDotHeads = kLanes >= 16 ? 4 : 2;
inline constexpr int kDotKeys = 4;
inline constexpr int kScoreKeys = kMicroRows;

struct KeysInLanes {
  static constexpr bool kPairs = false;
  static int64_t padded_heads(int64_t heads) { return heads; }
  static int64_t query_row(int64_t depth) { return ceil_div(depth, kLanes) * kLanes; }
  static int64_t query_floats(int64_t heads, int64_t depth) { return heads * query_row(depth); }

  static void pack_query(const Rows& rows, int64_t token, int64_t first, int64_t heads, float* out, float*) {
    const int64_t numbers = rows.numbers();
    for (int64_t h = 0; h < heads; ++h) {
      float* row = out + h * query_row(numbers);
      read_numbers(rows, token, first + h, 0, numbers, row);
      for (int64_t d = numbers; d % kLanes != 0; ++d) row[d] = 0;
    }
  }

  // out[head][key] = query[head] . keys[first + key] for kHeads heads and kDotKeys keys, kLanes numbers at a time.
  template <int kHeads>
  static void dots(const float* query, int64_t query_row, const GatheredRows<false>& keys, int64_t first, int64_t depth,
                   float* out) {
    Vec sum[kDotKeys][kHeads] = {};
    for (int part = 0; depth > 0; ++part) {
      const float* at[kDotKeys];
#pragma GCC unroll 4
      for (int n = 0; n < kDotKeys; ++n) at[n] = keys.rows(part)[first + n];
      const int64_t count = smaller(keys.numbers(part), depth);
      depth -= count;
      for (int64_t d = 0; d < count; d += kLanes) {
        Vec q[kHeads];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) q[h] = load(query + h * query_row + d);
#pragma GCC unroll 4
        for (int n = 0; n < kDotKeys; ++n) {
          const Vec k = load(at[n] + d);
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; ++h) sum[n][h] += k * q[h];
        }
      }
      query += count;
    }
#pragma GCC unroll 4
    for (int n = 0; n < kDotKeys; ++n) {
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) out[h * kGatherKeys + n] = sum_lanes(sum[n][h]);
    }
  }

  template <int kHeads = kDotHeads>
  static void dots_of_heads(int64_t heads, const float* query, int64_t query_row, const GatheredRows<false>& keys,
                            int64_t first, int64_t depth, float* out) {
    if constexpr (kHeads > 1) {
      if (heads < kHeads) return dots_of_heads<kHeads - 1>(heads, query, query_row, keys, first, depth, out);
    }
    dots<kHeads>(query, query_row, keys, first, depth, out);
  }

  // out[head][key] = query[head] . keys[key]. Scores of keys past `count` are those of some other key and not used.
  static void scores(const float* query, int64_t heads, const GatheredRows<false>& keys, int64_t depth, int64_t count,
                     float* out) {
    const int64_t row = query_row(depth);
    for (int64_t j = 0; j < count; j += kDotKeys) {
      for (int64_t h = 0; h < heads; h += kDotHeads) {
        dots_of_heads(smaller(heads - h, kDotHeads), query + h * row, row, keys, j, depth, out + h * kGatherKeys + j);
      }
    }
  }

  // Floats that weighted_sum() needs as a buffer.
  static int64_t weighted_sum_floats(int64_t) { return 0; }

  // out[head][column] = alpha[head] out + sum over keys of block[head][key] keys[key][column].
  static void weighted_sum(const float* block, int64_t heads, const GatheredRows<false>& keys, int64_t columns,
                           int64_t count, float* out, const float* alpha, float*) {
    for (int64_t c = 0; c < columns; c += kPanel) {
      const int part = c < keys.numbers(0) ? 0 : 1;
      const KeyLines lines{keys.rows(part), c - part * keys.numbers(0)};
      weighted_sum_rows<kGatherKeys, 1, false>(heads, block, lines, count, out + c, columns_of(columns), alpha);
    }
  }

  // Turns a block into the weights that scatter_add() reads.
  static void pack_weights(float*, int64_t, int64_t) {}
  // Floats of the lines that pack_lines() writes.
  static int64_t lines_floats(int64_t heads) { return heads * kPanel; }
  // A panel of columns of the heads' rows, from `column` on, as scatter_add() reads them.
  static void pack_lines(const Rows& rows, int64_t token, int64_t first, int64_t heads, int64_t column, float* out) {
    const int64_t columns = smaller(kPanel, rows.numbers() - column);
    for (int64_t h = 0; h < heads; ++h) read_numbers(rows, token, first + h, column, columns, out + h * kPanel);
  }

  // sums[token - origin][column] += sum over heads of block[head][first + key] rows[head][column], for one panel of columns
  // and at most kMicroRows keys.
  static void scatter_add(const float* block, int64_t heads, const float* rows, int64_t first, int64_t keys,
                          const int64_t* tokens, int64_t origin, float* sums) {
    scatter_add_keys<kGatherKeys, 1, false>(keys, block + first, rows, heads, tokens, origin, sums);
  }

  // Replaces each vector of scores of `count` keys by f(vector, head, index). `head` is the first head of its lanes (here
  // all lanes have the same), `index` its place in the block.
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

  // out[key] = sum over heads of f(vector, head).
  template <class F>
  static void over_heads(const float* block, int64_t heads, int64_t count, float* out, F f) {
    for (int64_t j = 0; j < count; j += kLanes) {
      Vec sum{};
      for (int64_t h = 0; h < heads; ++h) sum += f(load(block + h * kGatherKeys + j), h);
      store(out + j, sum);
    }
  }

  // The largest score of each head; NaN if one of them is NaN.
  static void largest(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; ++h) {
      Vec top = splat(-kInfinity);
      IntVec undefined{};
      const float* row = block + h * kGatherKeys;
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) {
        const Vec s = load(row + j);
        top = maximum(s, top);
        undefined |= s != s;
      }
      float best = max_lanes(top);
      bool nan = sum_lanes(undefined ? splat(1.0f) : Vec{}) > 0;
      for (; j < count; ++j) {
        best = row[j] > best ? row[j] : best;
        nan = nan || is_nan(row[j]);
      }
      out[h] = nan ? __builtin_nanf("") : best;
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
  // The keys' numbers `values` in the lanes of the vector at `place` of the block.
  FA_INLINE Vec of_keys(const float* values, int64_t place) { return load(values + place % kGatherKeys); }
};

template <int kVectors, bool kOfPairs>
struct HeadsInLanes {
  static constexpr bool kPairs = kOfPairs;
  static constexpr int kWidth = kVectors * kLanes;
  static constexpr int64_t kPanelFloats = int64_t{kGatherKeys} * kWidth;

  static int64_t padded_heads(int64_t heads) { return ceil_div(heads, kWidth) * kWidth; }
  // Heads of a micro-tile of a weighted sum, such that all micro-tiles of a panel are nearly equal.
  static int64_t tile_of(int64_t heads) {
    const int64_t panel = smaller(heads, kWidth);
    return ceil_div(panel, ceil_div(panel, kMicroRows));
  }
  static int64_t operand_floats(int64_t numbers) { return GatheredRows<kPairs>::operand_floats(numbers); }
  static int64_t query_floats(int64_t heads, int64_t depth) { return padded_heads(heads) * operand_floats(depth); }

  // [panel][number or pair][kWidth]. Heads past the last one are 0. `row` has room for one row.
  static void pack_query(const Rows& rows, int64_t token, int64_t first, int64_t heads, float* out, float* row) {
    const int64_t lines = operand_floats(rows.numbers());
    for (int64_t h = 0; h < padded_heads(heads); ++h) {
      float* to = out + h / kWidth * lines * kWidth + h % kWidth;
      if (h < heads) {
        read_operand<kPairs>(rows, token, first + h, row);
        for (int64_t d = 0; d < lines; ++d) to[d * kWidth] = row[d];
      } else {
        for (int64_t d = 0; d < lines; ++d) to[d * kWidth] = 0;
      }
    }
  }

  static void scores(const float* query, int64_t heads, const GatheredRows<kPairs>& keys, int64_t depth, int64_t count,
                     float* out) {
    for (int64_t p = 0; p * kWidth < heads; ++p) {
      for (int64_t j = 0; j < count; j += kScoreKeys) {
        score_tile<kScoreKeys, kVectors>(keys, j, query + p * operand_floats(depth) * kWidth, depth,
                                         out + p * kPanelFloats + j * kWidth);
      }
    }
  }

  static int64_t weighted_sum_floats(int64_t heads) { return kPairs ? padded_heads(heads) * kPairsOfBlock : 0; }

  static void weighted_sum(const float* block, int64_t heads, const GatheredRows<kPairs>& keys, int64_t columns,
                           int64_t count, float* out, const float* alpha, float* weights) {
    const int64_t out_row = columns_of(columns), tile = tile_of(heads);
    if constexpr (kPairs) pair_keys(block, heads, count, weights);
    for (int64_t c = 0; c < columns; c += kPanel) {
      const int part = c < keys.numbers(0) ? 0 : 1;
      const KeyLines lines{keys.rows(part), GatheredRows<kPairs>::operand_floats(c - part * keys.numbers(0))};
      alignas(64) float pairs[kPairs ? kPairsOfBlock * kPanel : 1];
      if constexpr (kPairs) pair_lines(lines, count, pairs);
      for (int64_t p = 0; p * kWidth < heads; ++p) {
        const int64_t end = smaller(heads, (p + 1) * kWidth);
        for (int64_t h = p * kWidth; h < end; h += tile) {
          const int64_t rows = smaller(tile, end - h);
          float* to = out + h * out_row + c;
          if constexpr (kPairs) {
            const float* from = weights + p * kPairsOfBlock * kWidth + h % kWidth;
            weighted_sum_rows<1, kWidth, true>(rows, from, PairLines{pairs}, ceil_div(count, 2), to, out_row, alpha + h);
          } else {
            const float* from = block + p * kPanelFloats + h % kWidth;
            weighted_sum_rows<1, kWidth, false>(rows, from, lines, count, to, out_row, alpha + h);
          }
        }
      }
    }
  }

  // With kPairs the weights are rounded to bfloat16 in place, two heads in each float.
  static void pack_weights(float* block, int64_t heads, int64_t count) {
    if constexpr (!kPairs) return;
    for (int64_t h = 0; h < heads; h += kWidth) {
      float* panel = block + h / kWidth * kPanelFloats;
      for (int64_t i = 0; i < count * kWidth; i += kPanel) {
        store(panel + i / 2, Isa::narrow_operands(load(panel + i), load(panel + i + kLanes)));
      }
    }
  }

  static int64_t lines_floats(int64_t heads) { return ceil_div(heads, kPairs ? 2 : 1) * kPanel; }

  static void pack_lines(const Rows& rows, int64_t token, int64_t first, int64_t heads, int64_t column, float* out) {
    if constexpr (!kPairs) return KeysInLanes::pack_lines(rows, token, first, heads, column, out);
    const bool plain = column < rows.size;
    const auto row = [&](int64_t head) {
      const int64_t at = token * rows.heads + first + head;
      const auto* numbers = static_cast<const uint16_t*>(plain ? rows.plain : rows.rope);
      numbers += plain ? at * rows.size + column : at * rows.rope_size + column - rows.size;
      return load_as<Vec>(numbers);
    };
    for (int64_t h = 0; h < heads; h += 2, out += kPanel) {
      Vec low, high;
      interleave(row(h), h + 1 < heads ? row(h + 1) : Vec{}, low, high);
      store(out, low);
      store(out + kLanes, high);
    }
  }

  static void scatter_add(const float* block, int64_t heads, const float* rows, int64_t first, int64_t keys,
                          const int64_t* tokens, int64_t origin, float* sums) {
    constexpr int64_t kHeads = kPairs ? 2 : 1;  // heads in a float
    constexpr int kStepOfKey = kWidth / kHeads;
    for (int64_t p = 0; p * kWidth < heads; ++p) {
      scatter_add_keys<1, kStepOfKey, kPairs>(keys, block + p * kPanelFloats + first * kStepOfKey,
                                              rows + p * kStepOfKey * kPanel,
                                              ceil_div(smaller(kWidth, heads - p * kWidth), kHeads), tokens, origin, sums);
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
      IntVec undefined{};
      for (int64_t j = 0; j < count; ++j) {
        const Vec s = load(at + j * kWidth);
        top = maximum(s, top);
        undefined |= s != s;
      }
      store(out + h, undefined ? splat(__builtin_nanf("")) : top);
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

 private:
  static constexpr int64_t kPairsOfBlock = kGatherKeys / 2;

  // The block rounded to bfloat16, two keys in each float: [panel][pair of keys][kWidth]. An odd last key is paired with
  // zeros.
  static void pair_keys(const float* block, int64_t heads, int64_t count, float* out) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      const float* from = block + h / kWidth * kPanelFloats + h % kWidth;
      narrow_lines_to_pairs<kLanes>(from, kWidth, count, out + h / kWidth * kPairsOfBlock * kWidth + h % kWidth, kWidth);
    }
  }

  // A panel of columns of two keys each. An odd last key is paired with zeros and not with another key, which could hold an
  // infinity.
  static void pair_lines(KeyLines keys, int64_t count, float* out) {
    for (int64_t j = 0; j < count; j += 2, out += kPanel) {
      Vec low, high;
      interleave(load(keys.at(j)), j + 1 < count ? load(keys.at(j + 1)) : Vec{}, low, high);
      store(out, low);
      store(out + kLanes, high);
    }
  }
};

// Calls f with the layout that suits a group of so many heads. Few heads do not fill the lanes; of one or two vectors of
// heads, the one is taken that leaves fewer lanes unused.
template <bool kPairs, class F>
static void with_layout(int64_t heads, F& f) {
  if constexpr (!kPairs) {
    if (heads <= kMostHeadsOfKeysInLanes) return f(KeysInLanes{});
  }
  const bool one = ceil_div(heads, kLanes) % 2 == 1;
  return one ? f(HeadsInLanes<1, kPairs>{}) : f(HeadsInLanes<2, kPairs>{});
}

// The same where a variant with products of pairs needs the other layouts, too.
template <class F>
static void with_layout(int64_t heads, bool pairs, F& f) {
  if constexpr (kHasPairs) {
    if (pairs) return with_layout<true>(heads, f);
  }
  with_layout<false>(heads, f);
}

// Whether a group of so many heads multiplies pairs with these keys: rows of bfloat16 in whole panels.
FA_INLINE bool multiplies_pairs(int64_t heads, const Rows& keys) {
  return heads > kMostHeadsOfKeysInLanes && is_panel_aligned(keys, Type::bfloat16);
}

// The same for attention. Query and key have one type.
FA_INLINE bool multiplies_pairs(const sparse::Attention& a) {
  return multiplies_pairs(a.group(), a.key) && is_panel_aligned(a.value, Type::bfloat16);
}

}  // namespace fa::FA_ISA
