// The keys that a row attends: atten_mask, sparse_mode, pre_tockens, next_tockens and prefix.
//
// With d = j - i and off = S2 - S1 of the sequence:
//
//     mode   row i attends key j if                 atten_mask
//     none   always                                 absent; the mode is ignored
//     0      mask == 0 and -pre <= d <= next        of the scores
//     1, 5   mask == 0                              of the scores
//     2      d <= 0                                 compressed, or of the keys
//     3      d <= off                               compressed, or of the keys
//     4      off - pre <= d <= off + next           compressed, or of the keys
//     6      d <= off or j < prefix                 compressed
//     7      as mode 3, but the last sequence with queries as mode 4     compressed (TND)
//     8      as mode 2, but the first sequence with queries as mode 4    compressed (TND)
//
// A mask of the scores is [B,N1,S1,S2] or [S1,S2], and any dimension may be 1 (EXT-MASK-BROADCAST). In TND it is
// [maxS1,maxS2] or [sum of S1, sum of S2]; query and key may have more rows than these sums. A mask of the keys is
// [B,N1,1,S2], where B, N1 and S2 may be 1 (EXT-BAND-MASK). In both, B may be a divisor of the batch (EXT-MASK-BATCH). Row i
// then attends key j if the band allows it and the mask is 0. A band may contain no key of a row (EXT-BAND-OUTSIDE); the row
// then attends nothing.
#include <algorithm>
#include <cstring>

#include "call.hpp"

namespace fa {
namespace {

constexpr int64_t kCompressedMaskColumns = 2048;

// Whether all bytes are 0 (`zero`), or no byte is 0. Eight bytes at a time, because a mask that is not a constant of
// the model is checked on every call.
bool all_bytes(const uint8_t* p, int64_t count, bool zero) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  constexpr uint64_t kHighBits = 0x8080808080808080u;
  int64_t n = 0;
  uint64_t mismatch = 0;
  for (; n + 8 <= count; n += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, p + n, sizeof bytes);
    mismatch |= zero ? bytes : (bytes - kOnes) & ~bytes & kHighBits;
  }
  for (; n < count; ++n) mismatch |= (p[n] == 0) != zero;
  return mismatch == 0;
}

}  // namespace

bool needs_compressed_mask(const Attributes& a, const Dims& mask) {
  const bool of_keys = mask.size() == 4 && mask[2] == 1 && a.sparse_mode >= 2 && a.sparse_mode <= 4;
  return a.compressed_mask_rows() != 0 && !of_keys;
}

void check_compressed_mask(const Diagnostics& diagnostics, const Attributes& a, const Tensor& mask,
                           bool content_checked) {
  const Dims& d = mask.dims;
  const int64_t rows = a.compressed_mask_rows();
  const bool shape_matches = d.size() >= 2 && mask.count() == rows * kCompressedMaskColumns &&
                             d.back() == kCompressedMaskColumns && d[d.size() - 2] == rows;
  const std::string input = "input atten_mask of sparse_mode " + std::to_string(a.sparse_mode);
  if (!shape_matches) {
    diagnostics.invalid(&Rules::mask,
                        input + " has shape " + fa::text_of(d) + ", expected " +
                            fa::text_of({rows, kCompressedMaskColumns}));
  }
  if (content_checked) return;
  const auto* row = static_cast<const uint8_t*>(mask.data);
  for (int64_t i = 0; i < rows; ++i, row += kCompressedMaskColumns) {
    const int64_t visible = i < kCompressedMaskColumns ? i + 1 : kCompressedMaskColumns / 2;
    const int64_t hidden = kCompressedMaskColumns - visible;
    if (all_bytes(row, visible, true) && all_bytes(row + visible, hidden, false)) continue;
    const char* expected = i < kCompressedMaskColumns ? " from the expected 1 above the diagonal and 0 elsewhere"
                                                : " from the expected 0 in its left half and 1 in its right";
    diagnostics.invalid(&Rules::mask, input + " differs in row " + std::to_string(i) + expected);
  }
}

void Call::read_mask() {
  read_band();
  const Tensor& mask = in(Role::atten_mask);
  if (needs_compressed_mask(a_, mask.dims)) {
    if (mask.rank() != 2 && mask.rank() != 4) {
      wrong_shape(&Rules::mask, Role::atten_mask, fa::text_of({a_.compressed_mask_rows(), kCompressedMaskColumns}));
    }
    check_compressed_mask(diagnostics_, a_, mask, compressed_mask_checked_);
    return;
  }
  problem_.mask = static_cast<const uint8_t*>(mask.data);
  if (a_.compressed_mask_rows() != 0) {  // such a mode takes a mask of the keys, too (EXT-BAND-MASK)
    read_key_mask();
  } else if (packed()) {
    read_packed_mask();
  } else {
    read_score_mask();
  }
}

// Reads sparse_mode, pre_tockens, next_tockens and prefix into the bands of the sequences.
void Call::read_band() {
  const int64_t mode = a_.sparse_mode;
  // Clamped so that sums with positions and lengths cannot overflow.
  const int64_t pre = std::clamp(a_.pre_tokens, -kNoLimit / 2, kNoLimit / 2);
  const int64_t next = std::clamp(a_.next_tokens, -kNoLimit / 2, kNoLimit / 2);
  // The band of mode 7 is that of the last batch entry with queries, the band of mode 8 that of the first one. This entry
  // may have no keys and therefore no sequence. Modes 1 and 5 have no band: the defaults of Sequence set no limit.
  // Mode 7 keeps the last such entry, the other modes keep the first one; only modes 7 and 8 use it.
  size_t band_entry = lengths_.size();
  for (size_t b = 0; b < lengths_.size(); ++b) {
    if (lengths_[b].query > 0 && (mode == 7 || band_entry == lengths_.size())) band_entry = b;
  }
  for (size_t n = 0; n < sequences_.size(); ++n) {
    Sequence& s = sequences_[n];
    const int64_t offset = s.key_length - s.query_length;
    // The band of mode 4: j - i is counted from the bottom-right diagonal, S2 - S1.
    const bool bottom_right = mode == 4 || (mode >= 7 && batch_of_[n] == band_entry);
    if (mode == 0 || bottom_right) {
      const int64_t origin = bottom_right ? offset : 0;
      s.band_first = origin - pre;
      s.band_last = origin + next;
    } else if (mode == 2 || mode == 8) {
      s.band_last = 0;
    } else if (mode == 3 || mode == 6 || mode == 7) {
      s.band_last = offset;
    }
  }
  if (mode == 5 || mode == 6) read_prefix(mode);
}

// Reads the prefix lengths of mode 6. In mode 5 the mask contains the prefix, and the lengths are not used.
void Call::read_prefix(int64_t mode) {
  const Tensor& prefix = in(Role::prefix);
  if (!prefix.present()) {
    if (mode == 6) invalid(&Rules::prefix, text(Role::prefix) + " is needed for sparse_mode 6");
    return;
  }
  const int64_t count = static_cast<int64_t>(lengths_.size());
  if (prefix.rank() != 1 || prefix.count() != count) wrong_shape(&Rules::prefix, Role::prefix, fa::text_of({count}));
  if (mode == 5) return;
  const auto* values = static_cast<const int64_t*>(prefix.data);
  for (size_t b = 0; b < lengths_.size(); ++b) {
    const Lengths& lengths = lengths_[b];
    const int64_t low = std::max<int64_t>(0, lengths.key - lengths.query);
    if (lengths.query > 0 && (values[b] < low || values[b] > lengths.key)) {
      invalid(&Rules::prefix, text(Role::prefix) + " of batch " + std::to_string(b) + " is " +
                                  std::to_string(values[b]) + ", expected " + std::to_string(low) + " to " +
                                  std::to_string(lengths.key));
    }
  }
  for (size_t n = 0; n < sequences_.size(); ++n) sequences_[n].prefix = values[batch_of_[n]];
}

void Call::read_score_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const Dims full = {batch_, query_.heads, query_.length, key_.length};
  bool matches = d.size() == 2 || d.size() == 4;
  for (size_t i = 0; matches && i < d.size(); ++i) {
    const int64_t size = d[d.size() - 1 - i];
    matches = i == 3 ? is_mask_batch(size) : is_one_or(size, full[3 - i]);
  }
  if (!matches) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of(full) + " or " + fa::text_of({full[2], full[3]}) + smaller_masks());
  }
  set_mask_strides(d.size() == 4 ? d : Dims{1, 1, d[0], d[1]});
}

void Call::read_key_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const std::string mode = " beside the band of sparse_mode " + std::to_string(a_.sparse_mode);
  if (packed()) wrong_shape(&Rules::mask, Role::atten_mask, "[2048,2048] for input_layout TND");
  if (!is_mask_batch(d[0]) || !is_one_or(d[1], query_.heads) || !is_one_or(d[3], key_.length)) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of({batch_, query_.heads, 1, key_.length}) + mode + smaller_masks());
  }
  set_mask_strides(d);
}

// Sets the strides of the mask, and its offset in each sequence. `shape` is [B,N1,S1,S2]; along a dimension of 1 the
// mask is repeated.
void Call::set_mask_strides(const Dims& shape) {
  problem_.mask_column = shape[3] == key_.length ? 1 : 0;
  problem_.mask_row = shape[2] == 1 ? 0 : shape[3];
  problem_.mask_head = shape[1] == 1 ? 0 : shape[2] * shape[3];
  if (shape[0] == 1) return;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    sequences_[n].mask = static_cast<int64_t>(batch_of_[n]) % shape[0] * shape[1] * shape[2] * shape[3];
  }
}

void Call::read_packed_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const size_t leading = d.size() == 4 && d[0] == 1 && d[1] == 1 ? 2 : 0;
  const Dims longest = {longest_query_, longest_key_};
  const Dims tokens = {lengths_.empty() ? 0 : lengths_.back().query_begin + lengths_.back().query,
                       lengths_.empty() ? 0 : lengths_.back().key_begin + lengths_.back().key};
  const Dims shape{std::span(d).subspan(leading)};
  if (shape != longest && shape != tokens) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of(longest) + " (longest batches) or " + fa::text_of(tokens) + " (all tokens)");
  }
  problem_.mask_row = shape[1];
  problem_.mask_column = 1;
  if (shape == longest) return;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    const Lengths& lengths = lengths_[batch_of_[n]];
    sequences_[n].mask = lengths.query_begin * shape[1] + lengths.key_begin;
  }
}

}  // namespace fa
