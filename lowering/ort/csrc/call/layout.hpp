// The input layouts and their strides. Layouts of all operators:
//
//     BSH [B,S,N*D]   SBH [S,B,N*D]   BSND [B,S,N,D]   BNSD [B,N,S,D]   TND [T,N,D], batches back to back
//
// Layouts of the inference operators only:
//
//     NTD [N,T,D]   NSD [N,S,D], a batch of 1   NBSD [N,B,S,D], results only
#pragma once

#include "../op.hpp"

namespace fa {

enum class Layout { BSH, SBH, BSND, BNSD, TND, NTD, NSD, NBSD };

size_t rank_of(Layout layout);
const char* text_of(Layout layout);
inline bool folds_heads(Layout layout) { return layout == Layout::BSH || layout == Layout::SBH; }

// The logical shape of query, key or value, with strides (in elements) for their layout.
struct Operand {
  int64_t batch = 0;  // of TND, NTD and NSD: 1
  int64_t heads = 0;
  int64_t length = 0;  // of TND and NTD: all tokens
  int64_t size = 0;
  int64_t batch_stride = 0;  // 0 for a batch of 1, which every entry of the common batch reads
  int64_t head_stride = 0;
  int64_t row_stride = 0;

  Strided strided(void* data) const { return {data, head_stride, row_stride}; }
};

// `heads` is used only if the layout folds heads and head size into one dimension. Other layouts have the heads in
// `dims`.
Operand operand_of(Layout layout, const Dims& dims, int64_t heads);

// The shape of attention_out: the query's shape with the given batch and head size.
Dims output_dims(Layout layout, const Dims& query, int64_t batch, int64_t heads, int64_t value_size);

}  // namespace fa
