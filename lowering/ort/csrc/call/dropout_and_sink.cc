// The inputs drop_mask (one bit for each score) and sink (one score for each head, without a value).
#include "../checked.hpp"
#include "call.hpp"

namespace fa {

// drop_mask holds the bits of [B,N1,S1,S2], in TND of [N1,S1,S2] of each batch, without padding. Bit 1 keeps a
// probability. The least significant bit of a byte comes first.
void Call::read_dropout() {
  const Tensor& mask = in(Role::drop_mask);
  Checked bits = 0;
  size_t n = 0;
  for (size_t b = 0; b < lengths_.size(); ++b) {
    if (n < sequences_.size() && batch_of_[n] == b) sequences_[n++].drop = bits.value();
    bits = bits + Checked(query_.heads) * lengths_[b].query * lengths_[b].key;
  }
  if (!bits.fits_int64() || mask.count() < bits.value() / 8 + (bits.value() % 8 != 0)) {
    const std::string expected = bits.fits_int64() ? std::to_string(bits.value() / 8 + (bits.value() % 8 != 0)) : "2^60";
    invalid(&Rules::dropout, text(Role::drop_mask) + " has " + std::to_string(mask.count()) +
                                 " bytes, expected at least " + expected + ", a bit for each score");
  }
  problem_.drop_mask = static_cast<const uint8_t*>(mask.data);
  problem_.keep_prob = a_.keep_prob;
}

void Call::read_sink() {
  const Tensor& sink = in(Role::sink);
  if (sink.dims != Dims{query_.heads}) {
    wrong_shape(&Rules::sink, Role::sink, fa::text_of({query_.heads}) + ", one for each query head");
  }
  problem_.sink = static_cast<const float*>(sink.data);
}

}  // namespace fa
