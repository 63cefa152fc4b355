// Gradients of keys that many rows select: d_key[j] += sum over heads of W[head][j] query[head].
//
// The rows of a chunk are computed in parallel. Each stores its weights W and its packed query, and puts its selected keys in
// the order of the ranges that they lie in. Then every task adds up one panel of columns of the keys of one range, for all
// rows in their order. These sums and the weights of the range stay in the second-level cache, and memory is written once
// for each chunk. A sum does not depend on the number of threads, and no two threads write the same sums.
//
// Rows that select only few keys of a range would read their query for each of them. Then there are no ranges: each task
// adds to the sums of all keys where they lie in memory.
#pragma once

#include "score_block.hpp"
#include "scratch.hpp"

namespace fa::FA_ISA {

// Where the tokens of a row that lie in a range end.
struct RangeEnd {
  int64_t range;
  int64_t end;
};

// A row of a chunk: its selected tokens in the order of their ranges and, block by block, two kinds of numbers, of which one
// or both are weights.
struct ListedRow {
  int64_t token;
  int64_t head;  // key head
  int64_t count;
  int64_t* tokens;
  float* weights[2];
  RangeEnd* ranges;  // those that have tokens
  int64_t range_count;
};

struct Chunk {
  ListedRow* rows;
  int64_t first, count;
  int64_t most_tokens;  // of a row
  int64_t range_keys;   // tokens of a range
  bool in_memory;       // all tokens are one range, and rows add to the sums where they lie in memory
  bool is_first, is_last;
};

// Puts the tokens of rows in the order of their ranges, in the memory of one thread.
class RangeOrder {
 public:
  RangeOrder(const Runtime& runtime, int64_t tokens, const Chunk& chunk)
      : range_keys_(chunk.range_keys), ranges_(ceil_div(tokens, range_keys_)), list_(runtime, chunk.most_tokens),
        places_(runtime, chunk.most_tokens), next_(runtime, ranges_ + 1) {}

  explicit operator bool() const { return list_ && places_ && next_; }

  // The tokens of a row as they are listed; for the caller to fill in.
  int64_t* list() const { return list_.data(); }
  // The place in the list of each token of the row that was put in order last.
  const int64_t* places() const { return places_.data(); }

  // Fills in the row's tokens, and what it has of ranges. Tokens of a range stay in the order of the list.
  void put(ListedRow& row) {
    int64_t* next = next_.data();
    for (int64_t r = 0; r <= ranges_; ++r) next[r] = 0;
    for (int64_t j = 0; j < row.count; ++j) ++next[list_.data()[j] / range_keys_ + 1];
    row.range_count = 0;
    for (int64_t r = 0; r < ranges_; ++r) {
      const int64_t end = next[r] + next[r + 1];
      if (next[r + 1] > 0) row.ranges[row.range_count++] = {r, end};
      next[r + 1] = end;
    }
    for (int64_t j = 0; j < row.count; ++j) {
      const int64_t to = next[list_.data()[j] / range_keys_]++;
      row.tokens[to] = list_.data()[j];
      places_.data()[to] = j;
    }
  }

 private:
  int64_t range_keys_, ranges_;
  Scratch<int64_t> list_, places_, next_;
};

// The tokens of one row in one range: [first, end) of its tokens.
struct Segment {
  int64_t row;
  int64_t first;
  int64_t end;
};

// The segments of a chunk, for each key head and range in the order of the rows.
class Segments {
 public:
  Segments(const Runtime& runtime, const Chunk& chunk, int64_t heads, int64_t ranges)
      : ranges_(ranges), starts_(runtime, heads * ranges + 1), segments_(runtime, number_of(chunk)) {
    if (!*this) return;
    int64_t* starts = starts_.data();
    for (int64_t n = 0; n <= heads * ranges; ++n) starts[n] = 0;
    each(chunk, [&](int64_t place, Segment) { ++starts[place + 1]; });
    for (int64_t n = 0; n < heads * ranges; ++n) starts[n + 1] += starts[n];
    each(chunk, [&](int64_t place, Segment segment) { segments_.data()[starts[place]++] = segment; });
  }

  explicit operator bool() const { return starts_ && segments_; }

  // After the segments are placed, each start is where those of the next range begin.
  const Segment* begin(int64_t head, int64_t range) const {
    const int64_t place = head * ranges_ + range;
    return segments_.data() + (place == 0 ? 0 : starts_.data()[place - 1]);
  }
  const Segment* end(int64_t head, int64_t range) const {
    return segments_.data() + starts_.data()[head * ranges_ + range];
  }

 private:
  static int64_t number_of(const Chunk& chunk) {
    int64_t number = 0;
    for (int64_t i = 0; i < chunk.count; ++i) number += chunk.rows[i].range_count;
    return number;
  }

  template <class F>
  void each(const Chunk& chunk, F f) const {
    for (int64_t i = 0; i < chunk.count; ++i) {
      const ListedRow& row = chunk.rows[i];
      int64_t first = 0;
      for (int64_t n = 0; n < row.range_count; ++n) {
        f(row.head * ranges_ + row.ranges[n].range, Segment{i, first, row.ranges[n].end});
        first = row.ranges[n].end;
      }
    }
  }

  int64_t ranges_;
  Scratch<int64_t> starts_;
  Scratch<Segment> segments_;
};

// The numbers that the weights of a chunk's rows multiply, packed: [panel of columns][row of the chunk][group].
template <class Layout>
class PackedRows {
 public:
  PackedRows(const Runtime& runtime, const Rows& rows, int64_t numbers, int64_t group, int64_t count)
      : rows_(rows), group_(group), panels_(ceil_div(numbers, kPanel)), count_(count),
        floats_(runtime, panels_ * count * Layout::lines_floats(group)) {}

  explicit operator bool() const { return static_cast<bool>(floats_); }

  void pack(int64_t i, const ListedRow& row) {
    for (int64_t panel = 0; panel < panels_; ++panel) {
      float* to = lines(panel, i);
      if (rows_.numbers() < (panel + 1) * kPanel) {
        for (int64_t n = 0; n < Layout::lines_floats(group_); ++n) to[n] = 0;
      }
      Layout::pack_lines(rows_, row.token, row.head * group_, group_, panel * kPanel, to);
    }
  }

  float* lines(int64_t panel, int64_t i) const {
    return floats_.data() + (panel * count_ + i) * Layout::lines_floats(group_);
  }

 private:
  const Rows& rows_;
  int64_t group_, panels_, count_;
  Scratch<float> floats_;
};

// The size of a tensor that caches do not hold until it is read again. It is written past them: a store through the caches
// would first read the line. Measured: half the time.
inline constexpr int64_t kStreamedFloats = 1 << 22;

// The sums for one tensor, which has a plain and a rope part; either is null if nobody reads it. Between chunks the sums are
// panels of columns, each [key heads][key tokens][kPanel], so that a task reads and writes memory in its order.
class KeySums {
 public:
  KeySums(const Runtime& runtime, const Rows& like, void* plain, void* rope, int64_t tokens)
      : like_(like), plain_(plain), rope_(rope), tokens_(tokens),
        panels_(plain != nullptr || rope != nullptr ? ceil_div(like.numbers(), kPanel) : 0),
        streams_(floats() >= kStreamedFloats), sums_(runtime) {}

  int64_t panels() const { return panels_; }
  int64_t numbers() const { return panels_ > 0 ? like_.numbers() : 0; }
  int64_t floats() const { return panels_ * panel_floats(); }

  // Takes the memory that the sums need after `chunk`. Returns false if there is none.
  bool keep(const Chunk& chunk) {
    return !chunk.is_first || (chunk.is_last && !chunk.in_memory) || sums_.allocate(floats());
  }

  // The sums of a panel for the tokens from `first` on.
  float* sums(int64_t panel, int64_t head, int64_t first) const {
    return sums_.data() + panel * panel_floats() + (head * tokens_ + first) * kPanel;
  }

  // Adds what a chunk adds to the tokens [first, last) of a key head: `added` [last - first][kPanel]. After the last chunk
  // `added` has the sums.
  void add(const Chunk& chunk, int64_t panel, int64_t head, int64_t first, int64_t last, float* added) const {
    if (chunk.is_first && chunk.is_last) return;
    float* own = sums(panel, head, first);
    float* to = chunk.is_last ? added : own;
    const int64_t count = (last - first) * kPanel;
    if (!chunk.is_first) {
      for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(added + i) + load(own + i));
    } else {
      for (int64_t i = 0; i < count; i += kPanel) put_panel(to + i, added + i);
    }
  }

  // Writes the sums [last - first][kPanel] to the tensor.
  void write(int64_t panel, int64_t head, int64_t first, int64_t last, const float* from) const {
    for (int64_t token = first; token < last; ++token, from += kPanel) write(token * like_.heads + head, panel, from);
  }

 private:
  int64_t panel_floats() const { return like_.heads * tokens_ * kPanel; }

  void write(int64_t row, int64_t panel, const float* from) const {
    const int64_t column = panel * kPanel, size = like_.size;
    const int64_t columns = smaller(kPanel, like_.numbers() - column);
    const int64_t own = smaller(larger(size - column, 0), columns);
    if (own > 0 && plain_ != nullptr) put(plain_, row * size + column, from, own);
    if (own < columns && rope_ != nullptr) {
      put(rope_, row * like_.rope_size + column + own - size, from + own, columns - own);
    }
  }

  void put(void* data, int64_t index, const float* from, int64_t count) const {
    if (like_.type == Type::float32 && count == kPanel) return put_panel(static_cast<float*>(data) + index, from);
    write_floats(data, index, from, count, like_.type);
  }

  void put_panel(float* to, const float* from) const {
    const bool streams = streams_ && reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Vec numbers = load(from + v * kLanes);
      if (streams) {
        Isa::stream(to + v * kLanes, numbers);
      } else {
        store(to + v * kLanes, numbers);
      }
    }
  }

  const Rows& like_;
  void *plain_, *rope_;
  int64_t tokens_, panels_;
  bool streams_;
  Scratch<float> sums_;
};

// Weights of this kind multiply `rows`.
template <class Layout>
struct Factors {
  const PackedRows<Layout>& rows;
  int kind;
};

// Micro-tiles between the prefetch of weights and their use, and of sums in memory. These lie anywhere, and memory needs more
// time to answer.
inline constexpr int64_t kPrefetchTiles = 3;
inline constexpr int64_t kPrefetchSums = 8 * kMicroRows;  // keys

// sums[token - origin] += weights x rows, for the segments [from, to) and one panel. Blocks of weights are `step` floats
// apart.
template <class Layout>
static void add_segments(const Chunk& chunk, const Segment* from, const Segment* to, Factors<Layout> factors,
                         int64_t group, int64_t step, int64_t panel, int64_t origin, float* sums) {
  for (const Segment* segment = from; segment < to; ++segment) {
    const ListedRow& row = chunk.rows[segment->row];
    const float* lines = factors.rows.lines(panel, segment->row);
    if (segment + 1 < to) {
      const char* next = reinterpret_cast<const char*>(factors.rows.lines(panel, segment[1].row));
      prefetch_lines<3>(next, Layout::lines_floats(group) * int64_t{sizeof(float)});
    }
    for (int64_t j = segment->first; j < segment->end;) {
      const int64_t in_block = j % kGatherKeys;
      const int64_t keys = smaller(smaller(kMicroRows, kGatherKeys - in_block), segment->end - j);
      const float* weights = row.weights[factors.kind];
      const float* block = weights + j / kGatherKeys * step;
      const float* ahead = weights + (j + kPrefetchTiles * kMicroRows) * (step / kGatherKeys);
      prefetch_lines<3>(reinterpret_cast<const char*>(ahead), keys * (step / kGatherKeys) * int64_t{sizeof(float)});
      for (int64_t n = j + kPrefetchSums; chunk.in_memory && n < smaller(j + kPrefetchSums + keys, segment->end); ++n) {
        __builtin_prefetch(sums + (row.tokens[n] - origin) * kPanel, 1, 2);
        __builtin_prefetch(sums + (row.tokens[n] - origin) * kPanel + kLanes, 1, 2);
      }
      Layout::scatter_add(block, group, lines, in_block, keys, row.tokens + j, origin, sums);
      j += keys;
    }
  }
}

// For each panel of the tensors and each range of keys, in parallel: sum(from, to, tensor, panel, origin, sums) adds what the
// segments [from, to) add to the keys from `origin` on. After the last chunk the sums are written to the tensors.
template <class Sum>
static Outcome add_ranges(const Runtime& runtime, const Chunk& chunk, const Segments& segments, int64_t heads,
                          int64_t tokens, KeySums* tensors, int64_t tensor_count, Sum sum) {
  const int64_t ranges = ceil_div(tokens, chunk.range_keys);
  int64_t panels = 0;
  for (int64_t n = 0; n < tensor_count; ++n) {
    if (!tensors[n].keep(chunk)) return Outcome::out_of_memory;
    panels += tensors[n].panels();
  }
  Failure failure;
  auto part = [&](int64_t i, int64_t) {
    int64_t panel = i % panels, tensor = 0;
    for (; panel >= tensors[tensor].panels(); ++tensor) panel -= tensors[tensor].panels();
    const int64_t range = i / panels % ranges, head = i / panels / ranges;
    const Segment *from = segments.begin(head, range), *to = segments.end(head, range);
    if (from == to && !chunk.is_first && !chunk.is_last) return;
    const int64_t first = range * chunk.range_keys, last = smaller(first + chunk.range_keys, tokens);
    const KeySums& of_tensor = tensors[tensor];
    Scratch<float> scratch(runtime, chunk.in_memory ? 0 : (last - first) * kPanel);
    if (!scratch) return failure.set();
    float* sums = chunk.in_memory ? of_tensor.sums(panel, head, first) : scratch.data();
    if (chunk.is_first || !chunk.in_memory) {
      for (int64_t n = 0; n < (last - first) * kPanel; n += kLanes) store(sums + n, Vec{});
    }
    sum(from, to, tensor, panel, first, sums);
    if (!chunk.in_memory) of_tensor.add(chunk, panel, head, first, last, sums);
    if (chunk.is_last) of_tensor.write(panel, head, first, last, sums);
    Isa::finish_streams();
  };
  in_parallel(runtime, heads * ranges * panels, 1, part);
  return failure.outcome();
}

// The most floats of a chunk are as many as the sums have, which are read and written once for each chunk, but within these
// limits. Measured: 64 MB are better than 128, which the third-level cache does not hold, and than 16. Fewer sums are added to
// more often at the same cost, and the weights of less than 4 MB stay in the caches. A chunk has at least kLeastChunkRows
// rows, enough to share among threads.
inline constexpr int64_t kLeastChunkFloats = 1 << 20;
inline constexpr int64_t kMostChunkFloats = 1 << 24;
inline constexpr int64_t kLeastChunkRows = 16;

// The weights of one kind that the rows of a chunk have in a range, on average, and the tokens of a range. 512 KB of weights
// and 256 KB of sums (with the widest vectors) fit into a second-level cache of 1 MB, and a row has some micro-tiles of keys
// in a range.
inline constexpr int64_t kRangeFloats = 1 << 17;
inline constexpr int64_t kLeastRangeKeys = 64;
inline constexpr int64_t kMostRangeKeys = 2048;

// If rows have fewer tokens in a range on average, there are no ranges. Measured at 65536 keys, with many rows: with 8 tokens
// both ways take the same time, with 4 ranges take a twentieth more, and with 1 almost twice as much.
inline constexpr int64_t kLeastRangeTokens = 8;

// How many floats a chunk keeps of each kind for a block of kGatherKeys keys, and for each row; and those of all sums.
struct ChunkSizes {
  int64_t block[2];
  int64_t row;
  int64_t sums;
};

// The tokens among which those of a row lie.
FA_INLINE int64_t span_of(const sparse::Batch& batch) {
  int64_t longest = 1;
  for (int64_t n = 0; n < batch.count; ++n) {
    if (batch.sequences[n].pages != nullptr) return batch.key_tokens;
    longest = larger(longest, batch.sequences[n].keys);
  }
  return longest;
}

// Goes through all rows in chunks, at least one. count_keys(i) returns the number of selected keys of row i; work(chunk)
// fills in the rows of a chunk, of which only `count` and the addresses are known, and adds them.
template <class Need, class Work>
static Outcome run_in_chunks(const Runtime& runtime, int64_t rows, const sparse::Batch& batch, ChunkSizes sizes,
                             Need count_keys, Work work) {
  const int64_t block = sizes.block[0] + sizes.block[1];
  Scratch<int64_t> counts(runtime, rows);
  if (!counts) return Outcome::out_of_memory;
  auto count = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) counts.data()[i] = count_keys(i);
  };
  in_parallel(runtime, rows, 64, count);
  const int64_t tokens = batch.key_tokens, span = span_of(batch);
  int64_t all = 0;
  for (int64_t i = 0; i < rows; ++i) all += counts.data()[i];
  const bool in_memory = span > kMostRangeKeys && all < kLeastRangeTokens * rows * (span / kMostRangeKeys);
  const int64_t most = in_memory ? kLeastChunkFloats : smaller(larger(sizes.sums, kLeastChunkFloats), kMostChunkFloats);
  // Without ranges the packed rows are read once for each panel, and only the weights have to stay in the caches.
  const int64_t of_row = in_memory ? 0 : sizes.row;
  int64_t first = 0;
  do {
    int64_t last = first, blocks = 0, most_tokens = 0;
    while (last < rows) {
      const int64_t more = ceil_div(counts.data()[last], kGatherKeys);
      if (last - first >= kLeastChunkRows && (blocks + more) * block + (last + 1 - first) * of_row > most) break;
      blocks += more;
      most_tokens = larger(most_tokens, counts.data()[last]);
      ++last;
    }
    const int64_t fitting = kRangeFloats * span / larger(blocks * sizes.block[0], 1);
    const int64_t range_keys = in_memory ? tokens : smaller(larger(fitting, kLeastRangeKeys), kMostRangeKeys);
    const int64_t ranges = ceil_div(tokens, range_keys);
    int64_t in_ranges = 0;
    for (int64_t i = first; i < last; ++i) in_ranges += smaller(counts.data()[i], ranges);
    Scratch<ListedRow> listed(runtime, last - first);
    Scratch<RangeEnd> ends(runtime, in_ranges);
    Scratch<int64_t> listed_tokens(runtime, blocks * kGatherKeys);
    Scratch<float> weights(runtime, blocks * block);
    if (!listed || !ends || !listed_tokens || !weights) return Outcome::out_of_memory;
    int64_t at = 0;
    RangeEnd* end = ends.data();
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = counts.data()[i];
      float* second = weights.data() + blocks * sizes.block[0] + at * sizes.block[1];
      listed.data()[i - first] = {
          0, 0, n, listed_tokens.data() + at * kGatherKeys, {weights.data() + at * sizes.block[0], second}, end, 0};
      at += ceil_div(n, kGatherKeys);
      end += smaller(n, ranges);
    }
    const Chunk chunk{listed.data(), first, last - first, most_tokens, range_keys, in_memory, first == 0, last == rows};
    if (work(chunk) != Outcome::done) return Outcome::out_of_memory;
    first = last;
  } while (first < rows);
  return Outcome::done;
}

}  // namespace fa::FA_ISA
