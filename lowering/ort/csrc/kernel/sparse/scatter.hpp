// Gradients of keys that many rows select: d_key[j] += sum over heads of W[head][j] query[head].
//
// The rows of a chunk store their weights W; they are computed in parallel. Then the columns of the result are divided among
// tasks, one panel each, and every task adds all rows in their order. So a sum does not depend on the number of threads, no
// two threads write the same sums, and the panel of sums of all keys stays in the caches.
#pragma once

#include "score_block.hpp"
#include "scratch.hpp"

namespace fa::FA_ISA {

// A row of a chunk: its selected tokens and, block by block, its weights.
struct ListedRow {
  int64_t token;
  int64_t head;  // key head
  int64_t count;
  int64_t* tokens;
  float* weights;
};

inline constexpr int64_t kPrefetchSums = 8 * kMicroRows;  // keys

// The sums for one tensor: panels of columns, each [key heads][key tokens][kPanel].
class KeySums {
 public:
  KeySums(const Runtime& runtime, int64_t numbers, int64_t heads, int64_t tokens)
      : numbers_(numbers), heads_(heads), tokens_(tokens), panels_(ceil_div(numbers, kPanel)),
        sums_(runtime, panels_ * heads * tokens * kPanel) {}

  explicit operator bool() const { return static_cast<bool>(sums_); }
  int64_t panels() const { return panels_; }

  void clear(const Runtime& runtime) {
    auto part = [&](int64_t first, int64_t last) {
      __builtin_memset(sums_.data() + first * panel_floats(), 0,
                       static_cast<size_t>((last - first) * panel_floats()) * sizeof(float));
    };
    in_parallel(runtime, panels_, 1, part);
  }

  // Adds all rows, in their order, to one panel. `rows` are the numbers that the weights multiply, with `group` heads for
  // each key head. The weights of a block begin `offset` floats behind its first one; blocks are `step` floats apart.
  // `packed` has room for group (padded) rows of a panel.
  template <class Layout>
  void add(const ListedRow* listed, int64_t count, const Rows& rows, int64_t group, int64_t offset, int64_t step,
           int64_t panel, float* packed) {
    for (int64_t i = 0; i < Layout::padded_heads(group) * kPanel; ++i) packed[i] = 0;
    for (const ListedRow* row = listed; row < listed + count; ++row) {
      Layout::pack_lines(rows, row->token, row->head * group, group, panel * kPanel, packed);
      float* sums = sums_.data() + panel * panel_floats() + row->head * tokens_ * kPanel;
      for (int64_t j = 0; j < row->count; j += kMicroRows) {
        // Micro-tiles do not cross blocks, whose size is a multiple of theirs.
        const float* block = row->weights + offset + j / kGatherKeys * step;
        const int64_t keys = smaller(kMicroRows, row->count - j);
        // The sums lie anywhere. They are prefetched some micro-tiles ahead, which gives memory the time to answer.
        for (int64_t n = j + kPrefetchSums; n < smaller(j + kPrefetchSums + kMicroRows, row->count); ++n) {
          __builtin_prefetch(sums + row->tokens[n] * kPanel, 1, 2);
          __builtin_prefetch(sums + row->tokens[n] * kPanel + kLanes, 1, 2);
        }
        Layout::scatter_add(block, group, packed, j % kGatherKeys, keys, row->tokens + j, sums);
      }
    }
  }

  // Writes the sums to tensors of the given sizes. Either is null if nobody reads it.
  void write(const Runtime& runtime, void* plain, int64_t size, void* rope, Type type) const {
    auto part = [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {  // i: token and head
        const int64_t token = i / heads_, head = i % heads_;
        for (int64_t p = 0; p < panels_; ++p) {
          const float* from = sums_.data() + p * panel_floats() + (head * tokens_ + token) * kPanel;
          const int64_t column = p * kPanel;
          const int64_t columns = smaller(kPanel, numbers_ - column);
          const int64_t own = smaller(larger(size - column, 0), columns);
          if (own > 0 && plain != nullptr) write_floats(plain, i * size + column, from, own, type);
          if (own < columns && rope != nullptr) {
            write_floats(rope, i * (numbers_ - size) + column + own - size, from + own, columns - own, type);
          }
        }
      }
    };
    in_parallel(runtime, tokens_ * heads_, 256, part);
  }

 private:
  int64_t panel_floats() const { return heads_ * tokens_ * kPanel; }

  int64_t numbers_, heads_, tokens_, panels_;
  Scratch<float> sums_;
};

// The most weights of a chunk. They should still be in the caches when they are added. Measured: 4 MB take a third less time
// than 48. A chunk has at least kLeastChunkRows rows, enough to share among threads.
inline constexpr int64_t kChunkFloats = 1 << 20;
inline constexpr int64_t kLeastChunkRows = 16;

// Goes through all rows in chunks. count_keys(i) returns the number of selected keys of row i, make(listed, first, last)
// computes rows and fills in their tokens and weights, add(listed, count) adds them. Each block of kGatherKeys keys has
// `floats` weights.
template <class Need, class Make, class Add>
static Outcome run_in_chunks(const Runtime& runtime, int64_t rows, int64_t floats, Need count_keys, Make make, Add add) {
  Scratch<int64_t> counts(runtime, rows);
  if (!counts) return Outcome::out_of_memory;
  auto count = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) counts.data()[i] = count_keys(i);
  };
  in_parallel(runtime, rows, 64, count);
  for (int64_t first = 0; first < rows;) {
    int64_t last = first, blocks = 0;
    while (last < rows) {
      const int64_t more = ceil_div(counts.data()[last], kGatherKeys);
      if (last - first >= kLeastChunkRows && (blocks + more) * floats > kChunkFloats) break;
      blocks += more;
      ++last;
    }
    Scratch<ListedRow> listed(runtime, last - first);
    Scratch<int64_t> tokens(runtime, blocks * kGatherKeys);
    Scratch<float> weights(runtime, blocks * floats);
    if (!listed || !tokens || !weights) return Outcome::out_of_memory;
    int64_t at = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = counts.data()[i];
      listed.data()[i - first] = {0, 0, n, tokens.data() + at * kGatherKeys, weights.data() + at * floats};
      at += ceil_div(n, kGatherKeys);
    }
    if (make(listed.data(), first, last) != Outcome::done) return Outcome::out_of_memory;
    if (add(listed.data(), last - first) != Outcome::done) return Outcome::out_of_memory;
    first = last;
  }
  return Outcome::done;
}

}  // namespace fa::FA_ISA
