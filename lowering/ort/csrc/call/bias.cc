// The bias of the scores: a tensor (pse_type 0 and 1), or one that is computed from slopes (pse_type 2 and 3). With
// A = q_i . k_j, the scores are
//
//     pse_type 1   S = scale * (A + pse)        pse_type 0   S = scale * A + pse
//     pse_type 2   S = scale * A - slope * |(j + kv_start) - (i + q_start)|
//     pse_type 3   S = scale * A - slope * sqrt(|(j + kv_start) - (i + q_start)|)
//
// The type of a bias tensor is the query's or float32 (EXT-SHIFT-FLOAT). Its shape is one of
//
//     [B,N1,S1,S2]     any dimension may be 1 (EXT-SHIFT-BROADCAST), B also a divisor (EXT-MASK-BATCH); not in TND
//     [B,N1,1024,S2]   the last 1024 rows (compressed ALiBi); B, N1 and S2 may be 1; in TND, S2 is the longest
//     flat             TND only: see read_packed_bias
#include <algorithm>
#include <limits>

#include "../checked.hpp"
#include "call.hpp"

namespace fa {

void Call::read_pse() {
  if (a_.pse_type >= 2) {
    read_slopes();
    return;
  }
  const Tensor& pse = in(Role::pse);
  problem_.pse = pse.data;
  problem_.pse_type = type_of(pse.type);
  problem_.pse_inside_scale = a_.pse_type == 1;
  problem_.pse_column = 1;
  const bool compressed = pse.rank() == 4 && pse.dims[2] == kCompressedPseRows &&
                          (packed() || query_.length > kCompressedPseRows);
  problem_.pse_compressed = compressed;
  if (packed() && !compressed) {
    read_packed_bias();
  } else {
    read_bias();
  }
}

// Reads start_ = kv_start_idx - q_start_idx, which shifts the diagonal of a bias from slopes. A value of more than 32
// bits is refused even if the call has no slopes.
void Call::read_start() {
  const int64_t query_start = first_integer(Role::query_start);
  const int64_t key_start = first_integer(Role::key_start);
  if (__builtin_sub_overflow(key_start, query_start, &start_) || start_ < std::numeric_limits<int32_t>::min() ||
      start_ > std::numeric_limits<int32_t>::max()) {
    invalid(&Rules::starts,
            text(Role::key_start) + " less " + signature_.name(Role::query_start) + " needs more than 32 bits");
  }
}

// Slopes are float32, [N1] or [B,N1].
void Call::read_slopes() {
  const Tensor& slopes = in(Role::pse);
  const Dims full = {static_cast<int64_t>(lengths_.size()), query_.heads};
  const bool by_batch = slopes.rank() == 2;
  if (slopes.type != ort::Element::float32) {
    invalid(&Rules::slopes,
            text(Role::pse) + " of pse_type " + std::to_string(a_.pse_type) + " holds slopes, expected float32");
  }
  if (slopes.dims != full && slopes.dims != Dims{query_.heads}) {
    wrong_shape(&Rules::slopes, Role::pse,
                "slopes " + fa::text_of({query_.heads}) + " or " + fa::text_of(full) + " for pse_type " +
                    std::to_string(a_.pse_type));
  }
  const int64_t mode = has_mask() ? a_.sparse_mode : 0;
  if (!packed() && query_.length != key_.length) {
    invalid(&Rules::slopes, "pse_type " + std::to_string(a_.pse_type) + " needs as many queries as keys, found " +
                                std::to_string(query_.length) + " and " + std::to_string(key_.length));
  }
  if (mode == 7) invalid(&Rules::slopes, "sparse_mode 7 takes no slopes, expected pse_type 0 or 1");
  const int64_t start = start_;
  for (size_t b = 0; mode == 8 && b < lengths_.size(); ++b) {
    if (lengths_[b].key - lengths_[b].query != (b == 0 ? -start : 0)) {
      invalid(&Rules::slopes, "pse_type " + std::to_string(a_.pse_type) + " in sparse_mode 8 needs batch " +
                                  std::to_string(b) + " to end its queries and keys at the same position");
    }
  }
  problem_.slopes = static_cast<const float*>(slopes.data);
  problem_.slope_of_root = a_.pse_type == 3;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    if (by_batch) sequences_[n].slopes = static_cast<int64_t>(batch_of_[n]) * query_.heads;
    // In mode 8 only the first sequence may begin at another position, so the starts do not apply to the others.
    if (mode != 8 || batch_of_[n] == 0) sequences_[n].start = start;
  }
}

// Reads a bias tensor of rank 4 (see above): its strides, and its offset in each sequence.
void Call::read_bias() {
  const Dims& d = in(Role::pse).dims;
  const bool compressed = problem_.pse_compressed;
  const int64_t keys = packed() ? longest_key_ : key_.length;
  const Dims full = {static_cast<int64_t>(lengths_.size()), query_.heads,
                     compressed ? kCompressedPseRows : query_.length, keys};
  bool matches = d.size() == 4 && is_mask_batch(d[0]);
  for (size_t i = 1; matches && i < 4; ++i) matches = is_one_or(d[i], full[i]);
  if (!matches) wrong_shape(&Rules::bias, Role::pse, fa::text_of(full) + smaller_masks());
  if (compressed) check_compressed_bias();
  problem_.pse_first_stored = keys - kCompressedPseRows;
  problem_.pse_column = d[3] == keys ? 1 : 0;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    Sequence& s = sequences_[n];
    s.pse = static_cast<int64_t>(batch_of_[n]) % d[0] * d[1] * d[2] * d[3];
    s.pse_head = d[1] == 1 ? 0 : d[2] * d[3];
    s.pse_row = d[2] == 1 ? 0 : d[3];
  }
}

// A compressed bias defines only the elements on and below the diagonal. The mask must hide all keys above it.
void Call::check_compressed_bias() const {
  const std::string input = text(Role::pse) + " of " + std::to_string(kCompressedPseRows) + " rows (compressed) ";
  for (const Lengths& lengths : lengths_) {
    if (lengths.query != lengths.key) {
      invalid(&Rules::bias, input + "needs as many queries as keys, found " + std::to_string(lengths.query) + " and " +
                                std::to_string(lengths.key));
    }
  }
  const int64_t mode = a_.sparse_mode;
  const bool causal_band = a_.next_tokens == 0 && a_.pre_tokens >= longest_query_;
  const bool causal = mode == 2 || mode == 3 || ((mode == 0 || (mode == 4 && packed())) && causal_band);
  if (!has_mask() || !causal) {
    invalid(&Rules::bias, input + "needs a causal atten_mask: sparse_mode 2 or 3, or next_tockens 0 and pre_tockens " +
                              "at least S1 in mode 0");
  }
}

// Reads a flat bias of TND: the elements of one batch after another, without gaps. Each batch has [N1,S1,S2], or
// [N1,S2] if its queries share one row. The forward operator takes a tensor of rank 2 or more with all elements on
// dimension 0, the gradient a tensor of rank 1.
void Call::read_packed_bias() {
  const Dims& d = in(Role::pse).dims;
  Checked all = 0;
  Checked one_row = 0;
  bool several_rows = false;
  for (const Lengths& lengths : lengths_) {
    all = all + Checked(query_.heads) * lengths.query * lengths.key;
    one_row = one_row + Checked(query_.heads) * lengths.key;
    several_rows = several_rows || lengths.query != 1;
  }
  if (!all.fits_int64() || !one_row.fits_int64()) {
    invalid(&Rules::bias, text(Role::pse) + " has " + std::to_string(in(Role::pse).count()) +
                              " elements, fewer than these sequences have scores");
  }
  const int64_t full = all.value();
  const int64_t rows = one_row.value();
  const int64_t count = in(Role::pse).count();
  const bool rank_matches = signature_.forward ? d.size() >= 2 : d.size() == 1;
  if (!rank_matches || d[0] != count || (count != full && count != rows)) {
    wrong_shape(&Rules::bias, Role::pse,
                "[B or 1,N1,1024,maxS2] (compressed), or " + std::to_string(rows) + " or " + std::to_string(full) +
                    " elements on dimension 0" + (signature_.forward ? " of 2 or more" : ""));
  }
  if (full == rows && several_rows) {
    invalid(&Rules::bias, text(Role::pse) + " could be one row or a matrix for each batch with these lengths");
  }
  int64_t offset = 0;
  size_t n = 0;
  for (size_t b = 0; b < lengths_.size(); ++b) {
    const int64_t matrix = (count == full ? lengths_[b].query : 1) * lengths_[b].key;
    if (n < sequences_.size() && batch_of_[n] == b) {
      sequences_[n].pse = offset;
      sequences_[n].pse_head = matrix;
      sequences_[n].pse_row = count == full ? lengths_[b].key : 0;
      ++n;
    }
    offset += query_.heads * matrix;
  }
}

}  // namespace fa
