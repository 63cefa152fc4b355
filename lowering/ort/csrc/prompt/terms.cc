// Masks, biases, the sink and the scales of quantised calls.
#include <algorithm>
#include <cstring>

#include "../call/call.hpp"
#include "call.hpp"

namespace fa::prompt {

// Reads atten_mask. Without it, every row attends every key. With it, and with d = j - i and off = keys - rows of a
// batch entry, row i attends key j if
//
//     mode   condition                                        atten_mask
//     0      mask == 0 and -pre <= d <= next                  of the scores, [S1,S2], [1|B,S1,S2] or [1|B,1,S1,S2]
//            with padding: mask == 0
//     1      mask == 0                                        of the scores
//     2      d <= 0                                           the constant [2048,2048]
//     3      d <= off                                         the constant
//     4      -pre <= d - off <= next                          the constant
//
// With single_row_, the mask is one of keys in every mode: [1|B,..,keys], where the dimensions between are 1. A key is
// attended if its mask is 0.
void Call::read_mask() {
  if (a_.sparse_mode < 0 || a_.sparse_mode > 4) {
    refuse(&Rules::mask, "sparse_mode is " + std::to_string(a_.sparse_mode) + ", expected 0 to 4");
  }
  if (!in_.has(input_atten_mask)) return;
  want_type(&Rules::mask, input_atten_mask, {E::boolean, E::int8, E::uint8});
  const Tensor& mask = in_[input_atten_mask];
  const Dims& d = mask.dims;
  const bool rank_matches = d.size() >= 2 && d.size() <= 4;
  if (single_row_) {
    bool matches = rank_matches && (d[0] == 1 || d[0] == batch()) && d.back() >= mask_columns_;
    for (size_t i = 1; matches && i + 1 < d.size(); ++i) matches = d[i] == 1;
    if (!matches) {
      wrong_shape(&Rules::mask, input_atten_mask,
                  "[" + std::to_string(batch()) + ",..,keys from " + std::to_string(mask_columns_) +
                      " on] with ones between: with one row of query every sparse_mode takes a mask of keys");
    }
    problem_.mask = static_cast<const uint8_t*>(mask.data);
    problem_.mask_column = 1;
    mask_batch_ = d[0] == 1 ? 0 : d.back();
    return;
  }
  if (a_.sparse_mode >= 2) {
    const Signature signature{
        .rules = {.mask = op_.rules.mask}, .names = op_.names, .positions = {}, .statistics_layout = {},
        .forward = true};
    fa::Attributes mode;
    mode.sparse_mode = a_.sparse_mode;
    check_compressed_mask(Diagnostics{node_, signature}, mode, mask, false);
    return;
  }
  int64_t rows = query_.length;
  if (a_.packed()) {
    rows = 0;
    for (const Entry& entry : entries_) rows = std::max(rows, entry.rows);
  }
  const int64_t mask_batch = rank_matches && d.size() > 2 ? d[0] : 1;
  const bool matches = rank_matches && (mask_batch == 1 || mask_batch == batch()) && (d.size() < 4 || d[1] == 1) &&
                       d[d.size() - 2] >= rows && d.back() >= mask_columns_;
  if (!matches) {
    wrong_shape(&Rules::mask, input_atten_mask,
                "[S1,S2], [1 or " + std::to_string(batch()) + ",S1,S2] or the same with a 1 before S1, S1 from " +
                    std::to_string(rows) + " and S2 from " + std::to_string(mask_columns_) + " on");
  }
  problem_.mask = static_cast<const uint8_t*>(mask.data);
  problem_.mask_row = d.back();
  problem_.mask_column = 1;
  mask_batch_ = mask_batch == 1 ? 0 : d[d.size() - 2] * d.back();
}

// Reads pse_shift: a bias [1|B,N1,S1,S2] (pse_type 0), or slopes [N1] or [B,N1] from which a bias is computed (2 and 3,
// see call/bias.cc).
void Call::read_bias() {
  const Tensor& pse = in_[input_pse_shift];
  if (a_.pse_type != 0) {
    if (!pse.present()) {
      refuse(&Rules::bias, "pse_type is " + std::to_string(a_.pse_type) + " without slopes in pse_shift");
    }
    want_type(&Rules::bias, input_pse_shift, {E::float32});
    if (pse.dims != Dims{a_.heads} && pse.dims != Dims{batch(), a_.heads}) {
      wrong_shape(&Rules::bias, input_pse_shift,
                  "slopes, " + text_of({a_.heads}) + " or " + text_of({batch(), a_.heads}));
    }
    slopes_batch_ = pse.rank() == 2 ? a_.heads : 0;
    problem_.slopes = static_cast<const float*>(pse.data);
    problem_.slope_of_root = a_.pse_type == 3;
    const auto start = [this](size_t input) {
      if (!in_.has(input)) return int64_t{0};
      want_type(&Rules::bias, input, {E::int64});
      if (in_[input].rank() != 1) wrong_shape(&Rules::bias, input, "rank 1");
      return *static_cast<const int64_t*>(in_[input].data);
    };
    const int64_t key = start(input_kv_start_idx);
    const int64_t query = start(input_q_start_idx);
    if (__builtin_sub_overflow(key, query, &slope_start_) || slope_start_ != static_cast<int32_t>(slope_start_)) {
      refuse(&Rules::bias, "kv_start_idx less q_start_idx needs more than 32 bits");
    }
    return;
  }
  if (!pse.present()) return;
  if (a_.packed()) want_none(&Rules::packed, {input_pse_shift}, "with a packed layout");
  const E query = in_[input_query].type;
  want_type(&Rules::bias, input_pse_shift, {query == E::int8 ? E::float16 : query});
  const Dims& d = pse.dims;
  const bool matches = d.size() == 4 && (d[0] == 1 || d[0] == batch()) && d[1] == a_.heads && d[2] >= query_.length &&
                       d[3] >= mask_columns_;
  if (!matches) {
    wrong_shape(&Rules::bias, input_pse_shift,
                "[" + std::to_string(batch()) + " or 1," + std::to_string(a_.heads) + ",S1 from " +
                    std::to_string(query_.length) + " on,S2 from " + std::to_string(mask_columns_) + " on]");
  }
  problem_.pse = pse.data;
  problem_.pse_type = type_of(pse.type);
  problem_.pse_column = 1;
  pse_row_ = d[3];
  pse_head_ = d[2] * d[3];
  pse_batch_ = d[0] == 1 ? 0 : d[1] * d[2] * d[3];
}

void Call::read_sink() {
  if (!in_.has(input_learnable_sink)) return;
  want_type(&Rules::types, input_learnable_sink, {E::float32, E::float16, E::bfloat16});
  const Tensor& sink = in_[input_learnable_sink];
  if (sink.dims != Dims{a_.heads}) wrong_shape(&Rules::heads, input_learnable_sink, text_of({a_.heads}));
  sink_ = floats(sink);
  problem_.sink = sink_.data();
}

// The value of a scale with one number. A uint64 has the bits of a float32 in its lower half.
float Call::scalar(size_t input) const {
  want_type(&Rules::scales, input, {E::float32, E::uint64});
  const Tensor& tensor = in_[input];
  if (tensor.count() != 1) wrong_shape(&Rules::scales, input, "[1]");
  if (tensor.type == E::float32) return *static_cast<const float*>(tensor.data);
  const auto bits = static_cast<uint32_t>(*static_cast<const uint64_t*>(tensor.data));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void Call::read_int8_query() {
  if (!has_int8_query()) {
    want_none(&Rules::scales, {input_dequant_scale1, input_quant_scale1, input_dequant_scale2},
              "beside a query of floats");
    return;
  }
  if (op_.fused && !a_.packed() && query_.length == 1) refuse(&Rules::scales, "input query is int8 and has one row");
  if (a_.packed() || a_.statistics || a_.pse_type != 0 || in_.has(input_learnable_sink)) {
    refuse(&Rules::scales,
           "input query is int8 with a packed layout, slopes, learnable_sink or softmax_lse, expected none");
  }
  if (value_.size != key_.size || value_.size > 512) {
    wrong_shape(&Rules::scales, input_value, "the head size of query, at most 512, beside an int8 query");
  }
  for (size_t input : {input_dequant_scale1, input_quant_scale1, input_dequant_scale2}) {
    if (!in_.has(input)) refuse(&Rules::scales, text(input) + " is absent beside an int8 query");
  }
  dequant_scale1_ = scalar(input_dequant_scale1);
  quant_scale1_ = scalar(input_quant_scale1);
  dequant_scale2_ = scalar(input_dequant_scale2);
}

void Call::read_result_scales() {
  const Tensor& scale = in_[input_quant_scale2];
  const Tensor& offset = in_[input_quant_offset2];
  if (!scale.present()) {
    if (offset.present()) refuse(&Rules::scales, "input quant_scale2 is absent beside quant_offset2");
    return;
  }
  for (size_t input : {input_quant_scale2, input_quant_offset2}) {
    if (!in_.has(input)) continue;
    want_type(&Rules::scales, input, {E::float32, E::float16, E::bfloat16});
    const int64_t count = in_[input].count();
    if ((count != 1 && count != a_.heads * value_.size) || count != scale.count()) {
      wrong_shape(&Rules::scales, input,
                  "[1] or one for each of " + std::to_string(a_.heads) + " heads of " + std::to_string(value_.size) +
                      ", the offset as many as the scale");
    }
  }
  if (a_.packed() || listed()) refuse(&Rules::scales, "input quant_scale2 is given with a packed layout or a list");
  if (scale.count() > 1 && (left_padded() || a_.statistics)) {
    refuse(&Rules::rows, "input quant_scale2 is given for channels beside padding or softmax_lse, expected one number");
  }
  quant_scale_ = floats(scale);
  if (offset.present()) quant_offset_ = floats(offset);
}

// Fills in the lengths, the band, the mask and the bias of the sequence of a batch entry. The sequence has only the
// rows that attend a key in sparse_mode; `s.query` becomes the number of rows before them. The caller sets the offsets
// of query, key, value, out and the statistics.
void Call::fill_sequence(int64_t index, Sequence& s) const {
  const Entry& entry = entries_[index];
  const int64_t rows = entry.rows;
  const int64_t keys = keys_of(index);
  const int64_t off = keys - rows;
  if (in_.has(input_atten_mask) && !single_row_) {
    if (a_.sparse_mode == 0 && !left_padded()) {
      s.band_first = -a_.pre_tokens;
      s.band_last = a_.next_tokens;
    } else if (a_.sparse_mode == 2) {
      s.band_last = 0;
    } else if (a_.sparse_mode == 3) {
      s.band_last = off;
    } else if (a_.sparse_mode == 4) {
      s.band_first = off - a_.pre_tokens;
      s.band_last = off + a_.next_tokens;
    }
  }
  const int64_t begin = std::clamp<int64_t>(-s.band_last, 0, rows);
  const int64_t end = s.band_first > s.band_last ? begin : std::clamp<int64_t>(keys - s.band_first, begin, rows);
  const bool all_rows = begin == 0 && end == rows;
  if (!all_rows && !quant_scale_.empty() && (!op_.fused || !quant_offset_.empty())) {
    refuse(&Rules::rows, "sparse_mode " + std::to_string(a_.sparse_mode) + " leaves rows of batch entry " +
                             std::to_string(index) + " without a key, which int8 results do not allow");
  }
  s.query_length = end - begin;
  s.key_length = keys;
  s.band_first += begin;
  s.band_last += begin;
  s.query = begin;
  const int64_t row = (a_.packed() ? 0 : entry.first_row) + begin;
  const int64_t column = a_.packed() ? 0 : entry.first_key;
  s.mask = index * mask_batch_ + row * problem_.mask_row + column;
  s.pse = index * pse_batch_ + row * pse_row_ + column;
  s.pse_head = pse_head_;
  s.pse_row = pse_row_;
  s.slopes = index * slopes_batch_;
  s.start = slope_start_ - begin;
}

}  // namespace fa::prompt
