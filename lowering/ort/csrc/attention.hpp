// The input of the kernel of FlashAttentionScore: pointers, strides and numbers, already checked.
//
// Scores are S(i, j) = scale * A + pse or scale * (A + pse) with A = q_i . k_j + q_rope_i . k_rope_j, and with a soft cap c
// they are c * tanh(scale * A / c) + pse. The softmax is over the keys that row i attends and the sink of its head. Dropout
// follows, then O = P V.
//
// All strides are in elements; the innermost dimension (head size) is contiguous.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa {

enum class Type : uint8_t { float32, float16, bfloat16 };

// The result of a row that attends no key: the operator extension `cpu_empty_rows`.
enum class EmptyRows : uint8_t { zero, mean, unmasked, nan };

// The result of a row that attends keys but whose softmax is undefined (a NaN or +inf score, or all scores -inf): the
// operator extension `cpu_nan_rows`. `infinite` gives 0 for the last kind only.
enum class NanRows : uint8_t { nan, zero, infinite };

inline constexpr int64_t kNoLimit = int64_t{1} << 62;
inline constexpr int64_t kStatisticsWidth = 8;       // equal copies of each softmax_max and softmax_sum
inline constexpr int64_t kCompressedPseRows = 1024;  // stored rows of a compressed ALiBi bias

// A tensor with heads and rows. `head` and `row` are strides: element d of row i of head n is data[n * head + i * row + d].
struct Strided {
  void* data = nullptr;
  int64_t head = 0;
  int64_t row = 0;
};

// One entry of the batch: offsets (in elements) of its row 0 at head 0 in each tensor.
struct Sequence {
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t query = 0;
  int64_t key = 0;
  int64_t value = 0;
  int64_t out = 0;
  int64_t query_rope = 0;
  int64_t key_rope = 0;
  int64_t mask = 0;
  int64_t pse = 0;
  int64_t pse_head = 0;
  int64_t pse_row = 0;
  int64_t slopes = 0;
  int64_t start = 0;  // added to j - i in a bias computed from slopes
  int64_t drop = 0;   // index of the first bit in drop_mask; heads and rows follow without padding
  int64_t statistics = 0;
  int64_t statistics_head = 0;
  int64_t statistics_row = 0;
  // Row i attends key j only if band_first <= j - i and (j - i <= band_last or j < prefix).
  int64_t band_first = -kNoLimit;
  int64_t band_last = kNoLimit;
  int64_t prefix = 0;
};

struct Problem {
  Type type = Type::float32;  // of query, key, value and out
  int64_t heads = 0;
  int64_t key_heads = 0;  // query head n reads key head n / (heads / key_heads)
  int64_t head_size = 0;
  int64_t value_size = 0;
  Strided query, key, value, out;
  int64_t rope_size = 0;  // 0: there is no rope part
  Strided query_rope, key_rope;
  const Sequence* sequences = nullptr;
  int64_t sequence_count = 0;

  const uint8_t* mask = nullptr;  // a byte that is not 0 hides the key from the row; the next three are strides
  int64_t mask_head = 0;
  int64_t mask_row = 0;
  int64_t mask_column = 0;  // 0 or 1

  const void* pse = nullptr;
  Type pse_type = Type::float32;
  int64_t pse_column = 0;  // 0 or 1
  bool pse_compressed = false;
  int64_t pse_first_stored = 0;  // compressed: the query row that the first stored row belongs to
  bool pse_inside_scale = false;
  const float* slopes = nullptr;  // a bias of -slope * distance, with one slope for each head
  bool slope_of_root = false;     // -slope * sqrt(distance)

  const uint8_t* drop_mask = nullptr;  // bit 1 keeps the probability, divided by keep_prob
  float keep_prob = 1.0f;
  const float* sink = nullptr;  // one score for each head that takes part in the softmax and has no value

  bool rounded_products = false;  // float32 may be rounded to bfloat16 before it is multiplied, if that is faster
  float scale = 1.0f;
  float softcap = 0;  // 0: none; otherwise pse is not inside the scale
  EmptyRows empty_rows = EmptyRows::zero;
  NanRows nan_rows = NanRows::nan;
  float mask_value = -__builtin_inff();  // the score of a key that is not attended: the extension `cpu_mask_value`
  bool masked_bias = false;              // whether the key's bias is added to that score: the extension `cpu_masked_bias`
  bool masked_values = true;             // whether such a key also adds its value: the extension `cpu_masked_values`
  float* softmax_max = nullptr;          // null if nobody reads them
  float* softmax_sum = nullptr;

  // Whether the gradient may use the statistics. It computes the scores again and subtracts softmax_max. So both passes
  // must add up products in the same order and round the same numbers: with scores of 1e5, another order changes every
  // probability by a percent.
  bool keeps_statistics() const { return softmax_max != nullptr || softmax_sum != nullptr; }
};

// Memory and threads for a kernel. `parallel` runs task(data, i) for every i below count, in any order and on any
// thread, and returns when all are done. `allocate` is thread-safe and returns null if there is no memory.
//
// `most_workers` is the number of processors: more tasks at once are of no use. `workers_seen` is a memory of the node: how
// many threads worked on one of its earlier calls, at most. A kernel reads and writes it atomically. It may decide by it how
// large tasks are, but no result may depend on it.
struct Runtime {
  void* self;
  void* (*allocate)(void* self, size_t bytes);
  void (*release)(void* self, void* memory);
  void (*parallel)(void* self, void (*task)(void*, size_t), void* data, size_t count);
  int64_t most_workers;
  int64_t* workers_seen;
};

enum class Outcome { done, out_of_memory };

using Attention = Outcome (*)(const Problem&, const Runtime&);

// The bias row of query row i, as an offset from the head's first row. With a compressed bias, the rows before the
// first stored one continue it along its diagonals. (static: each translation unit keeps its own copy, compiled for its
// instruction set)
static inline int64_t pse_row_offset(const Problem& problem, const Sequence& sequence, int64_t i) {
  if (!problem.pse_compressed) return i * sequence.pse_row;
  const int64_t above = problem.pse_first_stored - i;
  return above <= 0 ? -above * sequence.pse_row : above;
}

}  // namespace fa
