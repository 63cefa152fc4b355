// The input of the kernels of the sparse family: pointers and numbers, already checked. The formulas are in
// reference.cc.
//
// Both layouts are read as [tokens,N,D]: BSND [B,S,N,D] is [B*S,N,D], and TND is [T,N,D]. A tensor with one entry for
// each query token is indexed by the token.
#pragma once

#include "../attention.hpp"

namespace fa::sparse {

inline constexpr float kEmptyMax = -2e38f;  // softmax_max of a row that selects no key; its softmax_sum is 0

// The loss divides the sum of attention's probabilities by the number of heads minus the probabilities of the sinks. If
// this is less than the fraction kLeastLeft of the heads, it divides by the sum itself (see reference.cc).
inline constexpr double kLeastLeft = 0x1p-10;

// A tensor with a row of numbers for each token and head. An optional rope tensor continues each row.
struct Rows {
  const void* plain = nullptr;
  const void* rope = nullptr;
  int64_t size = 0;
  int64_t rope_size = 0;
  int64_t heads = 0;
  Type type = Type::float32;

  int64_t numbers() const { return size + rope_size; }
};

// One entry of the batch.
struct Sequence {
  int64_t query = 0;    // first query token
  int64_t queries = 0;  // query tokens that are computed
  int64_t key = 0;      // first key token, if keys are not paged
  int64_t keys = 0;
  const int32_t* pages = nullptr;  // pages of the keys, in order; null if keys are not paged
  int64_t statistics = 0;          // index of the statistics of row 0 and head 0
  int64_t first_row = 0;           // number of computed rows of the sequences before
};

struct Batch {
  const Sequence* sequences = nullptr;
  int64_t count = 0;
  int64_t rows = 0;        // computed rows of all sequences
  int64_t key_tokens = 0;  // of the key tensor
  int64_t page = 1;        // keys of a page
  bool causal = false;     // sparse_mode 3: row i of n sees the keys up to keys - n + i; otherwise it sees all keys
};

// sparse_indices: lists of selected blocks of keys, [tokens, heads, count].
struct Lists {
  const int32_t* entries = nullptr;
  int64_t heads = 1;  // key heads, or 1 if they share a list
  int64_t count = 0;
  int64_t block = 1;    // keys of a block
  bool capped = false;  // a row reads at most as many entries as it sees blocks
  int64_t room = 0;     // upper bound of the tokens that a row selects
};

struct Attention {
  Batch batch;
  Lists lists;
  Rows query, key, value;
  float scale = 1.0f;
  const float* sinks = nullptr;  // [query heads]
  EmptyRows empty_rows = EmptyRows::zero;
  // Null if nobody reads them.
  void* out = nullptr;
  float* softmax_max = nullptr;
  float* softmax_sum = nullptr;
  int64_t statistics_head = 0;  // stride of key heads in the statistics [key heads, rows, group]

  int64_t group() const { return query.heads / key.heads; }
};

// In `attention`, softmax_max and softmax_sum are inputs, and `out` is not used.
struct Gradient {
  Attention attention;
  Rows d_out, out;
  bool merged = false;  // value is key without its rope part, and the gradient of key is the sum of both
  // Each has the layout of its operand; null if nobody reads it.
  void* query = nullptr;
  void* query_rope = nullptr;
  void* key = nullptr;
  void* key_rope = nullptr;
  void* value = nullptr;
  float* sinks = nullptr;
};

// The inputs of the index scores.
struct Index {
  Batch batch;
  Rows query, key;
  const void* weights = nullptr;  // [tokens, heads], of `weight_type`
  Type weight_type = Type::float32;
};

// LightningIndexer: the keys with the `count` highest index scores.
struct Selection {
  Index index;
  int64_t count = 0;
  bool nan_first = false;      // where keys rank whose score is NaN: first, or behind all others
  int32_t* indices = nullptr;  // [tokens, count]; null if nobody reads them
  void* values = nullptr;      // of the query's type; null if nobody reads them
};

// The gradients of the inputs of the index scores. The gradients of the scores of the listed keys are the input
// `scores` (LightningIndexerGrad), or are computed from the loss with attention's distribution
// (SparseLightningIndexerGradKLLoss, `attention` not null).
struct IndexGradient {
  Index index;
  Lists lists;
  const void* scores = nullptr;  // [tokens, lists.count], of the query's type
  const Attention* attention = nullptr;
  void* query = nullptr;
  void* key = nullptr;
  void* weights = nullptr;
  float* loss = nullptr;
  float floor = 1e-8f;  // least probability in the loss; smaller ones count as this. 0: no least one, and 0 ln 0 is 0
};

// The kernels of one instruction set.
struct Kernels {
  Outcome (*attention)(const Attention&, const Runtime&);
  Outcome (*gradient)(const Gradient&, const Runtime&);
  Outcome (*select)(const Selection&, const Runtime&);
  Outcome (*index_gradient)(const IndexGradient&, const Runtime&);
};

// The number of keys that a computed row sees. They are the first keys of its sequence.
static inline int64_t visible_keys(const Batch& batch, const Sequence& sequence, int64_t row) {
  if (!batch.causal) return sequence.keys;
  const int64_t end = sequence.keys - sequence.queries + row + 1;
  return end < 0 ? 0 : end > sequence.keys ? sequence.keys : end;
}

// The token of key number `place` of a sequence.
static inline int64_t key_token(const Batch& batch, const Sequence& sequence, int64_t place) {
  if (sequence.pages == nullptr) return sequence.key + place;
  return sequence.pages[place / batch.page] * batch.page + place % batch.page;
}

// Writes the tokens that a row's list selects to `out`, unless it is null, and returns their number. A token that is
// listed several times is selected several times. The list ends at its first negative entry. Only the visible keys of a
// block are selected.
static inline int64_t selected_tokens(const Batch& batch, const Lists& lists, const Sequence& sequence, int64_t row,
                                      int64_t head, int64_t* out) {
  const int64_t visible = visible_keys(batch, sequence, row);
  const int32_t* list = lists.entries + ((sequence.query + row) * lists.heads + head) * lists.count;
  int64_t entries = lists.count;
  const int64_t blocks = visible / lists.block + (visible % lists.block != 0);
  if (lists.capped && blocks < entries) entries = blocks;
  int64_t count = 0;
  for (int64_t e = 0; e < entries && list[e] >= 0; ++e) {
    if (list[e] >= blocks) continue;  // so list[e] * lists.block below is less than `visible`
    const int64_t first = list[e] * lists.block;
    const int64_t end = visible - first > lists.block ? first + lists.block : visible;
    for (int64_t place = first; place < end; ++place, ++count) {
      if (out != nullptr) out[count] = key_token(batch, sequence, place);
    }
  }
  return count;
}

// The sequence that computed row `row` of the batch belongs to. `row` becomes the row's number in the sequence.
static inline const Sequence& sequence_of(const Batch& batch, int64_t& row) {
  int64_t s = batch.count - 1;
  while (batch.sequences[s].first_row > row) --s;
  row -= batch.sequences[s].first_row;
  return batch.sequences[s];
}

}  // namespace fa::sparse
