// The attributes of an attention operator, read and checked once, when the session is made.
#pragma once

#include "layout.hpp"
#include "signature.hpp"

namespace fa {

struct Attributes {
  float scale = 1.0f;
  float softcap = 0;
  float keep_prob = 1.0f;
  int64_t pre_tokens = 0;   // pre_tockens, in CANN's spelling
  int64_t next_tokens = 0;  // next_tockens, in CANN's spelling
  int64_t head_num = 0;
  Layout layout = Layout::BSH;
  // 0 if there is no atten_mask. The operator then ignores the mode, pre_tockens and next_tockens.
  int64_t sparse_mode = 0;
  int64_t pse_type = 1;
  bool statistics_like_input = false;  // "same_as_input"
  EmptyRows empty_rows = EmptyRows::zero;
  float mask_value = -__builtin_inff();
  bool masked_bias = false;
  bool masked_values = true;
  bool repeated_masks = false;  // cpu_mask_batch is "repeated"
  NanRows nan_rows = NanRows::nan;

  // Rows of the compressed mask [rows,2048] of sparse_mode; modes 2 to 4 may have a mask of the keys in its place. 0 if the
  // mode takes a mask of the scores only.
  int64_t compressed_mask_rows() const {
    if (sparse_mode == 6) return 3072;
    return sparse_mode < 2 || sparse_mode == 5 ? 0 : 2048;
  }
};

Attributes read_attributes(const NodeInfo& info, const Signature& signature);

}  // namespace fa
