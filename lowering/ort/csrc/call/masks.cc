// atten_mask, sparse_mode, pre_tockens and next_tockens, prefix: which keys a row attends.
//
// With d = j - i and off = S2 - S1 of the sequence:
//
//     mode   a row attends key j if                 atten_mask
//     none   always                                 absent; the mode is ignored
//     0      mask == 0 and -pre <= d <= next        of the scores
//     1, 5   mask == 0                              of the scores
//     2      d <= 0                                 constant, or of the keys
//     3      d <= off                               constant, or of the keys
//     4      off - pre <= d <= off + next           constant, or of the keys
//     6      d <= off or j < prefix                 constant
//     7      as 3; the last sequence with queries as 4     constant (TND)
//     8      as 2; the first sequence with queries as 4    constant (TND)
//
// A mask of the scores is [B,N1,S1,S2] or [S1,S2] with 1 in place of any dimension (EXT-MASK-BROADCAST); in TND
// [maxS1,maxS2] or [T1,T2]. A mask of the keys has rank 4 and 1 in place of S1 (EXT-BAND-MASK): it hides keys in
// addition to the band. A band may miss the scores in part or whole (EXT-BAND-OUTSIDE): such rows attend nothing.
#include <algorithm>
#include <cstring>

#include "call.hpp"

namespace fa {
namespace {

constexpr int64_t kConstantColumns = 2048;

bool is_one_or(int64_t dim, int64_t full) { return dim == 1 || dim == full; }

// Whether all bytes are 0, or all are not; eight at a time, for a mask that is no constant is checked on every call.
bool all_bytes(const uint8_t* p, int64_t count, bool zero) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  constexpr uint64_t kTops = 0x8080808080808080u;
  int64_t n = 0;
  uint64_t wrong = 0;
  for (; n + 8 <= count; n += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, p + n, sizeof bytes);
    wrong |= zero ? bytes : (bytes - kOnes) & ~bytes & kTops;
  }
  for (; n < count; ++n) wrong |= (p[n] == 0) != zero;
  return wrong == 0;
}

}  // namespace

bool is_constant_mask(const Attributes& a, const Dims& mask) {
  const bool of_keys = mask.size() == 4 && mask[2] == 1 && a.sparse_mode >= 2 && a.sparse_mode <= 4;
  return a.constant_mask_rows() != 0 && !of_keys;
}

void check_constant_mask(const Diagnostics& diagnostics, const Attributes& a, const Tensor& mask,
                         bool content_checked) {
  const Dims& d = mask.dims;
  const int64_t rows = a.constant_mask_rows();
  const bool shape_fits = d.size() >= 2 && mask.count() == rows * kConstantColumns && d.back() == kConstantColumns &&
                          d[d.size() - 2] == rows;
  const std::string input = "input atten_mask of sparse_mode " + std::to_string(a.sparse_mode);
  if (!shape_fits) {
    diagnostics.invalid(&Rules::mask,
                        input + " has shape " + fa::text_of(d) + ", expected " + fa::text_of({rows, kConstantColumns}));
  }
  if (content_checked) return;
  const auto* row = static_cast<const uint8_t*>(mask.data);
  for (int64_t i = 0; i < rows; ++i, row += kConstantColumns) {
    const int64_t open = i < kConstantColumns ? i + 1 : kConstantColumns / 2;
    if (all_bytes(row, open, true) && all_bytes(row + open, kConstantColumns - open, false)) continue;
    const char* expected = i < kConstantColumns ? " from the expected 1 above the diagonal and 0 elsewhere"
                                                : " from the expected 0 in its left half and 1 in its right";
    diagnostics.invalid(&Rules::mask, input + " differs in row " + std::to_string(i) + expected);
  }
}

void Call::read_mask() {
  read_structure();
  const Tensor& mask = in(Role::atten_mask);
  if (is_constant_mask(a_, mask.dims)) {
    check_constant_mask(diagnostics_, a_, mask, constant_mask_checked_);
    return;
  }
  problem_.mask = static_cast<const uint8_t*>(mask.data);
  if (a_.constant_mask_rows() != 0) {
    read_key_mask();
  } else if (packed()) {
    read_packed_mask();
  } else {
    read_score_mask();
  }
}

void Call::read_structure() {
  const int64_t mode = a_.sparse_mode;
  const int64_t pre = std::clamp(a_.pre_tokens, -kNoLimit / 2, kNoLimit / 2);
  const int64_t next = std::clamp(a_.next_tokens, -kNoLimit / 2, kNoLimit / 2);
  // Sequences without keys are not computed, but the one that the band of modes 7 and 8 belongs to is the last or
  // first that has queries.
  size_t banded = lengths_.size();
  for (size_t b = 0; b < lengths_.size(); ++b) {
    if (lengths_[b].query > 0 && (mode == 7 || banded == lengths_.size())) banded = b;
  }
  for (size_t n = 0; n < sequences_.size(); ++n) {
    Sequence& s = sequences_[n];
    const int64_t offset = s.key_length - s.query_length;
    const bool band = mode == 4 || (mode >= 7 && batch_of_[n] == banded);
    if (mode == 0 || band) {
      const int64_t origin = band ? offset : 0;
      s.first = origin - pre;
      s.last = origin + next;
    } else if (mode == 2 || mode == 8) {
      s.last = 0;
    } else if (mode == 3 || mode == 6 || mode == 7) {
      s.last = offset;
    }
  }
  if (mode == 5 || mode == 6) read_prefix(mode);
}

// Mode 5 has its prefix in the mask, and ignores the lengths of it.
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
    const Lengths& own = lengths_[b];
    const int64_t low = std::max<int64_t>(0, own.key - own.query);
    if (own.query > 0 && (values[b] < low || values[b] > own.key)) {
      invalid(&Rules::prefix, text(Role::prefix) + " of batch " + std::to_string(b) + " is " +
                                  std::to_string(values[b]) + ", expected " + std::to_string(low) + " to " +
                                  std::to_string(own.key));
    }
  }
  for (size_t n = 0; n < sequences_.size(); ++n) sequences_[n].prefix = values[batch_of_[n]];
}

void Call::read_score_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const Dims full = {batch_, query_.heads, query_.length, key_.length};
  bool fits = d.size() == 2 || d.size() == 4;
  for (size_t i = 0; fits && i < d.size(); ++i) fits = is_one_or(d[d.size() - 1 - i], full[3 - i]);
  if (!fits) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of(full) + " or " + fa::text_of({full[2], full[3]}) + ", any of these dimensions may be 1");
  }
  place_mask(d.size() == 4 ? d : Dims{1, 1, d[0], d[1]});
}

void Call::read_key_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const std::string mode = " beside the band of sparse_mode " + std::to_string(a_.sparse_mode);
  if (packed()) wrong_shape(&Rules::mask, Role::atten_mask, "[2048,2048] for input_layout TND");
  if (!is_one_or(d[0], batch_) || !is_one_or(d[1], query_.heads) || !is_one_or(d[3], key_.length)) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of({batch_, query_.heads, 1, key_.length}) + mode + ", any of these dimensions may be 1");
  }
  place_mask(d);
}

// `four` is the shape of the mask as [B,N1,S1,S2], 1 where it is repeated.
void Call::place_mask(const Dims& four) {
  problem_.mask_column = four[3] == key_.length ? 1 : 0;
  problem_.mask_row = four[2] == 1 ? 0 : four[3];
  problem_.mask_head = four[1] == 1 ? 0 : four[2] * four[3];
  if (four[0] == 1) return;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    sequences_[n].mask = static_cast<int64_t>(batch_of_[n]) * four[1] * four[2] * four[3];
  }
}

void Call::read_packed_mask() {
  const Dims& d = in(Role::atten_mask).dims;
  const size_t leading = d.size() == 4 && d[0] == 1 && d[1] == 1 ? 2 : 0;
  const Dims own = {longest_query_, longest_key_};
  const Dims joint = {lengths_.empty() ? 0 : lengths_.back().query_begin + lengths_.back().query,
                      lengths_.empty() ? 0 : lengths_.back().key_begin + lengths_.back().key};
  const Dims found{std::span(d).subspan(leading)};
  if (found != own && found != joint) {
    wrong_shape(&Rules::mask, Role::atten_mask,
                fa::text_of(own) + " (longest batches) or " + fa::text_of(joint) + " (all tokens)");
  }
  problem_.mask_row = found[1];
  problem_.mask_column = 1;
  if (found == own) return;
  for (size_t n = 0; n < sequences_.size(); ++n) {
    const Lengths& lengths = lengths_[batch_of_[n]];
    sequences_[n].mask = lengths.query_begin * found[1] + lengths.key_begin;
  }
}

}  // namespace fa
