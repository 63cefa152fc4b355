// The sparse family as the kernels see it: plain pointers and numbers, already checked.
//
// Tokens of both layouts are one list: BSND [B,S,N,D] is read as [B*S,N,D] and TND is that already, so that everything
// with one entry for a query token is indexed by the token. The mathematics is in reference.cc.
#pragma once

#include "../attention.hpp"

namespace fa::sparse {

inline constexpr float kEmptyMax = -2e38f;  // softmax_max of a row without a key; its softmax_sum is 0

// Attention's probabilities are divided by what the sinks leave of the heads; if that is less than so much of them, by
// their own sum (see reference.cc).
inline constexpr double kLeastLeft = 0x1p-10;

// A tensor with a row of numbers for each token and head, and optionally a rope part that continues each row.
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
  int64_t query = 0;    // its first query token
  int64_t queries = 0;  // tokens that are computed
  int64_t key = 0;      // its first key token, if keys are not paged
  int64_t keys = 0;
  const int32_t* pages = nullptr;  // its pages of keys, in order; null if keys are not paged
  int64_t statistics = 0;          // where its statistics begin, at row 0 and head 0
  int64_t first_row = 0;           // the computed rows of all sequences before it
};

struct Batch {
  const Sequence* sequences = nullptr;
  int64_t count = 0;
  int64_t rows = 0;        // computed rows of all sequences
  int64_t key_tokens = 0;  // of the key tensor
  int64_t page = 1;        // keys of a page
  bool causal = false;     // sparse_mode 3: row i of n sees the keys up to keys - n + i; else all
};

// Lists of selected blocks: [tokens, heads, count].
struct Lists {
  const int32_t* entries = nullptr;
  int64_t heads = 1;  // 1, or one list for each key head
  int64_t count = 0;
  int64_t block = 1;
  bool capped = false;  // no more entries are read than there are blocks to see
  int64_t room = 0;     // no row selects more tokens
};

struct Attention {
  Batch batch;
  Lists lists;
  Rows query, key, value;
  float scale = 1.0f;
  const float* sinks = nullptr;  // one a head
  EmptyRows empty_rows = EmptyRows::zero;
  // Null if nobody reads them.
  void* out = nullptr;
  float* softmax_max = nullptr;
  float* softmax_sum = nullptr;
  int64_t statistics_head = 0;  // from a key head to the next; rows and query heads of the group follow closely

  int64_t group() const { return query.heads / key.heads; }
};

// `attention` has softmax_max and softmax_sum as inputs and no out of its own.
struct Gradient {
  Attention attention;
  Rows d_out, out;
  bool merged = false;  // value is key without its rope part: key's gradient is that of both
  // Laid out as their operands; null if nobody reads them.
  void* query = nullptr;
  void* query_rope = nullptr;
  void* key = nullptr;
  void* key_rope = nullptr;
  void* value = nullptr;
  float* sinks = nullptr;
};

struct Index {
  Batch batch;
  Rows query, key;
  const void* weights = nullptr;  // [tokens, heads], of `weight_type`
  Type weight_type = Type::float32;
};

struct Selection {
  Index index;
  int64_t count = 0;
  int32_t* indices = nullptr;  // [tokens, count]; null if nobody reads them
  void* values = nullptr;      // of the query's type; null if nobody reads them
};

// The gradient of the index scores of the listed keys: what comes back is `scores` (LightningIndexerGrad), or what the
// loss with attention's distribution gives (SparseLightningIndexerGradKLLoss, `attention` not null).
struct IndexGradient {
  Index index;
  Lists lists;
  const void* scores = nullptr;  // [tokens, lists.count], of the query's type
  const Attention* attention = nullptr;
  void* query = nullptr;
  void* key = nullptr;
  void* weights = nullptr;
  float* loss = nullptr;
  float floor = 1e-8f;  // smaller probabilities count as this in the loss; with 0 there is none, and 0 ln 0 is 0
};

// The kernels of one instruction set.
struct Kernels {
  Outcome (*attention)(const Attention&, const Runtime&);
  Outcome (*gradient)(const Gradient&, const Runtime&);
  Outcome (*select)(const Selection&, const Runtime&);
  Outcome (*index_gradient)(const IndexGradient&, const Runtime&);
};

// Keys that a computed row sees: the first so many of its sequence.
static inline int64_t visible_keys(const Batch& batch, const Sequence& sequence, int64_t row) {
  if (!batch.causal) return sequence.keys;
  const int64_t end = sequence.keys - sequence.queries + row + 1;
  return end < 0 ? 0 : end > sequence.keys ? sequence.keys : end;
}

// The token of a key by its place in its sequence.
static inline int64_t key_token(const Batch& batch, const Sequence& sequence, int64_t place) {
  if (sequence.pages == nullptr) return sequence.key + place;
  return sequence.pages[place / batch.page] * batch.page + place % batch.page;
}

// The tokens that the list of a row selects, as often as it lists them; `out` null only counts them. The list ends at its
// first negative entry; of a block only the visible keys count.
static inline int64_t selected_tokens(const Batch& batch, const Lists& lists, const Sequence& sequence, int64_t row,
                                      int64_t head, int64_t* out) {
  const int64_t visible = visible_keys(batch, sequence, row);
  const int32_t* list = lists.entries + ((sequence.query + row) * lists.heads + head) * lists.count;
  int64_t entries = lists.count;
  const int64_t blocks = visible / lists.block + (visible % lists.block != 0);
  if (lists.capped && blocks < entries) entries = blocks;
  int64_t count = 0;
  for (int64_t e = 0; e < entries && list[e] >= 0; ++e) {
    if (list[e] >= blocks) continue;  // and so no product here exceeds `visible`, however long a block is
    const int64_t first = list[e] * lists.block;
    const int64_t end = visible - first > lists.block ? first + lists.block : visible;
    for (int64_t place = first; place < end; ++place, ++count) {
      if (out != nullptr) out[count] = key_token(batch, sequence, place);
    }
  }
  return count;
}

// The sequence of a computed row of the batch; `row` becomes its row there.
static inline const Sequence& sequence_of(const Batch& batch, int64_t& row) {
  int64_t s = batch.count - 1;
  while (batch.sequences[s].first_row > row) --s;
  row -= batch.sequences[s].first_row;
  return batch.sequences[s];
}

}  // namespace fa::sparse
