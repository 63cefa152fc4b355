// The products of an int8 cache as products of bytes, four at a time, on processors that have them (VNNI). As floats, the
// numbers of the cache would have to be widened first, and a multiply-add would take a quarter as many of them.
//
// The other factor, a query or the weights of the tokens, becomes a fixed-point number of kDigits bytes: its digits in base
// 256. Each digit is multiplied by the bytes of the cache. The sums are exact integers, and the sums of all digits make one
// float. The fixed-point numbers of a query are relative to its largest number, and are off by at most 2^-23 of it: a unit in
// the last place of a float32. Weights are relative to the largest weight of the step, and are off by at most 2^-24 of it.
//
// The bytes are not packed, because a copy would take a third as long as the products. A vector has blocks of 128 bits, and
// shuffles within the blocks are cheap. For the keys, the rows of four keys are loaded, and their 32-bit words are transposed
// within each block: a lane then belongs to one key. The digits of the queries are stored in the order of these words. For the
// values, the bytes of four tokens are interleaved: a lane then belongs to one column.
#pragma once

#include "attend.hpp"

namespace fa::FA_ISA {

inline constexpr int kDigits = 3;
inline constexpr int kWords = 4;                 // 32-bit words of a block, and bytes of a word
inline constexpr int kBlocks = kLanes / kWords;  // of a vector
inline constexpr int64_t kByteRows = 4;          // query rows whose sums fit the registers

// The largest fixed-point numbers. The highest digit has room for what roundings add to them; a weight may be above 1.
inline constexpr float kLargestQuery = 127 * 65536 + 127 * 256;
inline constexpr float kLargestWeight = 255 * 65536 + 255 * 256;

// Queries whose numbers are larger, or all smaller but not 0, are multiplied as floats.
inline constexpr float kLargestByteQuery = 0x1p60f;
inline constexpr float kSmallestByteQuery = 0x1p-60f;

// Lanes of the unpack instructions: within each block, the lower (upper) halves of a and b alternate.
template <int kUpper>
FA_INLINE Vec unpack_words(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return lane / 4 * 4 + 2 * kUpper + lane % 4 / 2 + lane % 2 * kLanes; });
}
template <int kUpper>
FA_INLINE Vec unpack_doubles(Vec a, Vec b) {
  return shuffle(a, b, [](int lane) { return lane / 4 * 4 + 2 * kUpper + lane % 2 + lane % 4 / 2 * kLanes; });
}
template <int kUpper>
FA_INLINE Vec unpack_shorts(Vec a, Vec b) {
  return (Vec)shuffle((ShortVec)a, (ShortVec)b, [](int lane) {
    return lane / 8 * 8 + 4 * kUpper + lane % 8 / 2 + lane % 2 * 2 * kLanes;
  });
}
template <int kUpper>
FA_INLINE Vec unpack_bytes(Vec a, Vec b) {
  return (Vec)shuffle((ChunkVec)a, (ChunkVec)b, [](int lane) {
    return lane / 16 * 16 + 8 * kUpper + lane % 16 / 2 + lane % 2 * 4 * kLanes;
  });
}

// Transposes the 4 x 4 bytes of each block: word i then has byte i of each of the four words.
FA_INLINE Vec transpose_bytes(Vec v) {
  return (Vec)shuffle((ChunkVec)v, (ChunkVec)v, [](int lane) { return lane / 16 * 16 + lane % 4 * 4 + lane % 16 / 4; });
}

// One float from the sums of each digit.
FA_INLINE Vec joined(const IntVec (&sums)[kDigits]) {
  return __builtin_convertvector(sums[2], Vec) * 65536.0f + __builtin_convertvector((sums[1] << 8) + sums[0], Vec);
}

// Loads once, at this point. GCC would load a vector again for each product, or load many of them early and spill them.
FA_INLINE Vec loaded_here(const float* p) {
  asm volatile("" ::: "memory");
  return rounded(load(p));
}

// The digits of some query rows, in groups of kByteRows. Signed digits are multiplied by unsigned bytes: the bytes of the keys
// plus 128.
struct ByteQueries {
  float* digits;   // [groups][size / kChunk][word of a block][kByteRows][digit][kLanes]: each word kWords times
  float* origins;  // [rows][digit][kLanes]: what the 128 in each byte adds, with the sign changed
  float* scales;   // [rows]

  static constexpr int64_t kRowFloats = kDigits * kLanes;  // of one word
  static constexpr int64_t kWordFloats = kByteRows * kRowFloats;
  static constexpr int64_t kChunkFloats = kWords * kWordFloats;

  static int64_t group_floats(int64_t size) { return size / kChunk * kChunkFloats; }
  static int64_t groups(int64_t rows) { return ceil_div(rows, kByteRows); }
  static int64_t floats(int64_t rows, int64_t size) {
    return groups(rows) * (group_floats(size) + kByteRows * (kRowFloats + 1));
  }
  ByteQueries(float* memory, int64_t rows, int64_t size)
      : digits(memory), origins(digits + groups(rows) * group_floats(size)),
        scales(origins + groups(rows) * kByteRows * kRowFloats) {}

  ByteQueries group(int64_t n, int64_t size) const {
    ByteQueries rows = *this;
    rows.digits += n * group_floats(size);
    rows.origins += n * kByteRows * kRowFloats;
    rows.scales += n * kByteRows;
    return rows;
  }

  // Sets one row. False if its numbers have no such digits.
  bool set(int64_t row, const float* query, int64_t size) const;
};

inline bool ByteQueries::set(int64_t row, const float* query, int64_t size) const {
  const ByteQueries to = group(row / kByteRows, size);
  const int64_t in_group = row % kByteRows;
  Vec largest_of_lane{};
  IntVec ordinary = first_lanes(kLanes);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec magnitude = (Vec)((BitVec)load(query + i) & 0x7fffffffu);
    ordinary &= magnitude <= kLargestByteQuery;  // not NaN, either
    largest_of_lane = maximum(magnitude, largest_of_lane);
  }
  const float largest = max_lanes(largest_of_lane);
  if (!Isa::all(ordinary) || (largest != 0 && largest < kSmallestByteQuery)) return false;
  to.scales[in_group] = largest / kLargestQuery;
  const float inverse = largest == 0 ? 0.0f : kLargestQuery / largest;
  int8_t digits[kDigits][kMostByteColumns];
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec scaled = load(query + i) * inverse;
    const IntVec nearest = __builtin_convertvector(scaled + (scaled < Vec{} ? splat(-0.5f) : splat(0.5f)), IntVec);
    // With 128 added to each digit, the digits are unsigned. The carries are then right for digits from -128 on.
    const BitVec biased = (BitVec)nearest + 0x808080u;
    for (int n = 0; n < kDigits; ++n) {
      const auto digit = (IntVec)(biased >> 8 * n & 0xffu) - 128;
      store_as(digits[n] + i, __builtin_convertvector(digit, Int8Vec));
    }
  }
  const IntVec ones = 0x01010101 - IntVec{};
  for (int n = 0; n < kDigits; ++n) {
    IntVec sum{};
    for (int64_t chunk = 0; chunk < size / kChunk; ++chunk) {
      const Vec words = load_as<Vec>(digits[n] + chunk * kChunk);
      float* out = to.digits + chunk * kChunkFloats + in_group * kRowFloats + n * kLanes;
      const Vec repeated[kWords] = {shuffle(words, words, [](int lane) { return lane / 4 * 4; }),
                                    shuffle(words, words, [](int lane) { return lane / 4 * 4 + 1; }),
                                    shuffle(words, words, [](int lane) { return lane / 4 * 4 + 2; }),
                                    shuffle(words, words, [](int lane) { return lane / 4 * 4 + 3; })};
      for (int w = 0; w < kWords; ++w) {
        store(out + w * kWordFloats, repeated[w]);
        sum = Isa::add_byte_products(sum, (Vec)ones, repeated[w]);
      }
    }
    store(to.origins + in_group * kRowFloats + n * kLanes, (Vec)(sum * -128));
  }
  return true;
}

// The bytes of K or V of one key head: token t begins at data + offsets[t].
struct ByteRows {
  const int8_t* data;
  const int64_t* offsets;

  [[gnu::always_inline]] Vec load(int64_t token, int64_t column) const { return load_as<Vec>(data + offsets[token] + column); }
};

// Prefetches the rows of tokens [0, last], one line after the other; then the last row again. While keys are multiplied, their
// values are prefetched, and then the keys of the next step. Measured: without these prefetches, a step takes half as long
// again; into the first-level cache, it takes a tenth longer.
struct RowPrefetches {
  ByteRows rows;
  int64_t size;
  int64_t last;
  int64_t token = 0;
  int64_t column = 0;

  template <int kLines>
  [[gnu::always_inline]] void issue() {
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) {
      prefetch(rows.data + rows.offsets[token] + column);
      column += kCacheLine;
      token += column >= size && token < last ? 1 : 0;
      column = column >= size ? 0 : column;
    }
  }
};

// Adds the products of the digits with half of a chunk of columns of kGroups * kWords keys from `key` on. `digits` are those
// of these columns.
template <int kHalf, int kRows, int kGroups>
FA_INLINE void add_key_words(const float* digits, ByteRows keys, int64_t key, int64_t column,
                             IntVec (&sum)[kRows][kGroups][kDigits]) {
  const auto flip = (IntVec)(0x80808080u - BitVec{});
  Vec words[kGroups][2];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g, key += kWords) {
    const Vec even = unpack_words<kHalf>(keys.load(key, column), keys.load(key + 1, column));
    const Vec odd = unpack_words<kHalf>(keys.load(key + 2, column), keys.load(key + 3, column));
    words[g][0] = (Vec)((IntVec)unpack_doubles<0>(even, odd) ^ flip);
    words[g][1] = (Vec)((IntVec)unpack_doubles<1>(even, odd) ^ flip);
  }
#pragma GCC unroll 2
  for (int w = 0; w < 2; ++w) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int n = 0; n < kDigits; ++n) {
        const int64_t word = (2 * kHalf + w) * ByteQueries::kWordFloats;
        const Vec digit = loaded_here(digits + word + r * ByteQueries::kRowFloats + n * kLanes);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) sum[r][g][n] = Isa::add_byte_products(sum[r][g][n], words[g][w], digit);
      }
    }
  }
}

// scores[r][key] = scale of the row * (digits of row r) . keys[key], for `count` keys and kRows rows. Whole vectors of scores
// are written. Meanwhile as many rows of `ahead` are prefetched.
template <int kRows>
static void multiply_byte_keys(const ByteQueries& queries, ByteRows keys, int64_t count, int64_t size, float* scores,
                               int64_t score_stride, RowPrefetches ahead) {
  constexpr int kGroups = kRows == 1 || kBlocks == 1 ? kBlocks : kBlocks / 2;  // of kWords keys, at a time
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec parts[kRows][kBlocks];
#pragma GCC unroll 1
    for (int first = 0; first < kBlocks; first += kGroups) {
      IntVec sum[kRows][kGroups][kDigits];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 3
          for (int n = 0; n < kDigits; ++n) {
            sum[r][g][n] = load_as<IntVec>(queries.origins + r * ByteQueries::kRowFloats + n * kLanes);
          }
        }
      }
      const float* digits = queries.digits;
      const int64_t key = c + first * kWords;
      for (int64_t column = 0; column < size; column += kChunk) {
        ahead.issue<kGroups * kWords / 2>();
        add_key_words<0>(digits, keys, key, column, sum);
        ahead.issue<kGroups * kWords / 2>();
        add_key_words<1>(digits, keys, key, column, sum);
        digits += ByteQueries::kChunkFloats;
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) parts[r][first + g] = joined(sum[r][g]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(scores + r * score_stride + c, fold<kBlocks, kWords>(parts[r]) * queries.scales[r]);
    }
  }
}

// Weights become fixed-point numbers in place: for each four tokens, four words with the bytes of one digit each.
FA_INLINE void weights_to_digits(float* weights, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec scaled = load(weights + j) * kLargestWeight + 0.5f;
    store(weights + j, transpose_bytes((Vec)__builtin_convertvector(scaled, IntVec)));
  }
}

// Words of a chunk of columns of V: byte n of a word belongs to token `token` + n. Word w of each block is in words[w]; if
// kHalves is 1, only the two words of the half kFirst.
template <int kFirst, int kHalves>
FA_INLINE void load_value_words(ByteRows values, int64_t token, int64_t column, Vec (&words)[kHalves * 2]) {
  const Vec rows[kWords] = {values.load(token, column), values.load(token + 1, column), values.load(token + 2, column),
                            values.load(token + 3, column)};
  if constexpr (kFirst == 0) {
    const Vec even = unpack_bytes<0>(rows[0], rows[1]);
    const Vec odd = unpack_bytes<0>(rows[2], rows[3]);
    words[0] = unpack_shorts<0>(even, odd);
    words[1] = unpack_shorts<1>(even, odd);
  }
  if constexpr (kFirst + kHalves == 2) {
    const Vec even = unpack_bytes<1>(rows[0], rows[1]);
    const Vec odd = unpack_bytes<1>(rows[2], rows[3]);
    words[kHalves * 2 - 2] = unpack_shorts<0>(even, odd);
    words[kHalves * 2 - 1] = unpack_shorts<1>(even, odd);
  }
}

// The sums of these words' columns over `count` tokens: parts[r][word].
template <int kFirst, int kHalves, int kRows>
FA_INLINE void multiply_value_words(const float* weights, int64_t weight_stride, ByteRows values, int64_t count,
                                    int64_t column, RowPrefetches& ahead, Vec (&parts)[kRows][kWords]) {
  IntVec sum[kRows][kHalves * 2][kDigits] = {};
  for (int64_t j = 0; j < count; j += kWords) {
    ahead.issue<kHalves * 2>();
    Vec words[kHalves * 2];
    load_value_words<kFirst, kHalves>(values, j, column, words);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int n = 0; n < kDigits; ++n) {
        const Vec digit = splat_pair(weights[r * weight_stride + j + n]);
#pragma GCC unroll 4
        for (int w = 0; w < kHalves * 2; ++w) sum[r][w][n] = Isa::add_byte_products(sum[r][w][n], digit, words[w]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < kHalves * 2; ++w) parts[r][2 * kFirst + w] = joined(sum[r][w]) * (1.0f / kLargestWeight);
  }
}

// sums[r] = weights[r] V for `count` tokens, a multiple of kWords, and kRows rows of digits. Meanwhile as many rows of `ahead`
// are prefetched.
template <int kRows>
static void multiply_byte_values(const float* weights, int64_t weight_stride, ByteRows values, int64_t count, int64_t size,
                                 float* sums, int64_t columns, RowPrefetches ahead) {
  for (int64_t column = 0; column < size; column += kChunk) {
    Vec parts[kRows][kWords];
    if constexpr (kRows <= 2) {
      multiply_value_words<0, 2>(weights, weight_stride, values, count, column, ahead, parts);
    } else {
      multiply_value_words<0, 1>(weights, weight_stride, values, count, column, ahead, parts);
      multiply_value_words<1, 1>(weights, weight_stride, values, count, column, ahead, parts);
    }
    for (int r = 0; r < kRows; ++r) {
      float* out = sums + r * columns + column;
      for (int b = 0; b < kBlocks; ++b) {
        for (int w = 0; w < kWords; ++w) {
          __builtin_memcpy(out + (b * kWords + w) * kWords, reinterpret_cast<const float*>(&parts[r][w]) + b * kWords,
                           kWords * sizeof(float));
        }
      }
    }
  }
}

// Calls pass.operator()<kRows>(r) for kByteRows rows from r on, and for those that are left.
template <class Pass>
FA_INLINE void in_byte_passes(int64_t rows, Pass pass) {
  int64_t r = 0;
  for (; r + kByteRows <= rows; r += kByteRows) pass.template operator()<kByteRows>(r);
  if (rows - r == 3) pass.template operator()<3>(r);
  if (rows - r == 2) pass.template operator()<2>(r);
  if (rows - r == 1) pass.template operator()<1>(r);
}

// The memory of one worker, beside that of DecodeScratch.
struct ByteScratch {
  float* queries;    // ByteQueries of all rows of a task
  float* states;     // of one step
  int64_t* offsets;  // [2][kByteTokens]: where the rows of the step's tokens begin, and those of the next step's

  // `rows` of `key_heads` each.
  static size_t bytes(int64_t key_heads, int64_t rows, int64_t size, int64_t state_floats) {
    const int64_t floats = key_heads * ByteQueries::floats(rows, size) + state_floats;
    return kCacheLine + 2 * kByteTokens * sizeof(int64_t) + static_cast<size_t>(floats) * sizeof(float);
  }
  ByteScratch(void* memory, int64_t key_heads, int64_t rows, int64_t size) {
    offsets = reinterpret_cast<int64_t*>((reinterpret_cast<uintptr_t>(memory) + kCacheLine - 1) / kCacheLine * kCacheLine);
    queries = reinterpret_cast<float*>(offsets + 2 * kByteTokens);
    states = queries + key_heads * ByteQueries::floats(rows, size);
  }
};

// Where the rows of the step's tokens begin at the first key head of the task. The last one is repeated up to whole vectors.
FA_INLINE void find_tokens(const DecodeTask& h, const DecodeStep& t, int64_t* offsets) {
  for (int64_t j = 0; j < t.count;) {
    const int64_t count = h.contiguous(t.first + j, t.first + t.count);
    const int64_t at = h.at(0, t.first + j);
    for (int64_t i = 0; i < count; ++i) offsets[j + i] = at + i * h.d.row_stride;
    j += count;
  }
  for (int64_t j = t.count; j % kLanes != 0; ++j) offsets[j] = offsets[t.count - 1];
}

// Prefetches the keys of the first step of a task, of its first key head. The keys of the later steps are prefetched while
// values are multiplied.
FA_INLINE void prefetch_first_keys(const DecodeTask& h, int64_t begin, const ByteScratch& b) {
  const DecodeStep t{begin, smaller(kByteTokens, h.end - begin), nullptr, false};
  find_tokens(h, t, b.offsets);
  RowPrefetches keys{{static_cast<const int8_t*>(h.entry.key), b.offsets}, h.d.size, t.count - 1};
  for (int64_t j = 0; j < t.count; ++j) {
    for (int64_t column = 0; column < h.d.size; column += kCacheLine) keys.issue<1>();
  }
}

// One step: products with the keys, soft cap, online softmax, weighted values. The softmax is that of the step alone, so that
// the weights are relative to its largest one; the state of the step is then merged with that of the task. The last step
// prefetches the first keys of the task `after`, from token `after_first` on, if there is one.
static void attend_byte_step(const DecodeTask& h, const DecodeStep& t, const DecodeScratch& s, const ByteScratch& b,
                             const DecodeTask* after, int64_t after_first) {
  const int64_t size = h.d.size;
  const int64_t groups = ByteQueries::groups(h.rows);
  const int64_t end = t.first + t.count;
  const bool last = end == h.end;
  const DecodeTask& next_task = last && after != nullptr ? *after : h;
  const int64_t next_first = last && after != nullptr ? after_first : end;
  const DecodeStep next{next_first, smaller(kByteTokens, next_task.end - next_first), nullptr, false};
  const int64_t* offsets = b.offsets;
  find_tokens(h, t, b.offsets);
  const int64_t* next_offsets = offsets;
  if (next.count > 0) {
    find_tokens(next_task, next, b.offsets + kByteTokens);
    next_offsets = b.offsets + kByteTokens;
  }
  const auto rows_of = [&](const void* data, int64_t n, const int64_t* of) {
    return ByteRows{static_cast<const int8_t*>(data) + n * h.entry.head_stride, of};
  };
  const ByteQueries queries(b.queries, h.count * groups * kByteRows, size);
  for (int64_t n = 0; n < h.count; ++n) {
    const ByteRows keys = rows_of(h.entry.key, n, offsets);
    const RowPrefetches values{rows_of(h.entry.value, n, offsets), size, t.count - 1};
    in_byte_passes(h.rows, [&]<int kRows>(int64_t r) {
      multiply_byte_keys<kRows>(queries.group(n * groups + r / kByteRows, size), keys, t.count, size, h.scores_of(n, r),
                                h.score_stride, values);
    });
  }
  add_key_offsets(h, t);
  if (h.d.softcap != 0) cap_products(h, t);
  DecodeTask step = h;
  step.states = b.states;
  for (int64_t n = 0; n < h.count; ++n) step.state(n).clear(h.rows, h.columns);
  softmax_step(step, t, s);
  const int64_t tokens = ceil_div(t.count, kWords) * kWords;
  for (int64_t n = 0; n < h.count; ++n) {
    const ByteRows values = rows_of(h.entry.value, n, offsets);
    const RowPrefetches keys{rows_of(next_task.entry.key, n, next_offsets), size, larger(1, next.count) - 1};
    for (int64_t r = 0; r < h.rows; ++r) weights_to_digits(h.scores_of(n, r), t.count);
    in_byte_passes(h.rows, [&]<int kRows>(int64_t r) {
      multiply_byte_values<kRows>(h.scores_of(n, r), h.score_stride, values, tokens, size, step.state(n).sums + r * h.columns,
                                  h.columns, keys);
    });
    merge(h.state(n), step.state(n), h.rows, h.columns);
  }
}

}  // namespace fa::FA_ISA
