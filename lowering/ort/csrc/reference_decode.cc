// IncreFlashAttention in plain loops, with sums in double: the decoding of the variant "reference".
#include <new>
#include <vector>

#include "decode.hpp"
#include "reference.hpp"

namespace fa::reference {
namespace {

double number(const void* data, int64_t index, Cell cell) {
  if (cell == Cell::int8) return static_cast<const int8_t*>(data)[index];
  return read(data, index, static_cast<Type>(cell));
}

// One query head of one batch entry.
struct DecodeRow {
  const Decode& d;
  const DecodeEntry& entry;
  int64_t index;
  int64_t head;

  int64_t key_head() const { return head / d.group(); }

  // Number i of a key or value, dequantised.
  double cached(const void* data, int64_t token, int64_t i, const float* scale, const float* offset) const {
    const double stored = number(data, row_of(d, entry, token) + key_head() * entry.head_stride + i, d.cell);
    if (scale == nullptr) return stored;
    const int64_t channel = d.antiquant_per_channel ? key_head() * d.size + i : 0;
    return (stored + (offset == nullptr ? 0.0 : offset[channel])) * scale[channel];
  }

  bool masked(int64_t token) const { return entry.mask != nullptr && entry.mask[token] != 0; }

  double score(int64_t token) const {
    if (masked(token)) return kMaskedScore;
    double sum = 0;
    for (int64_t i = 0; i < d.size; ++i) {
      sum += number(d.query, (index * d.heads + head) * d.size + i, d.query_cell) *
             cached(entry.key, token, i, d.key_scale, d.key_offset);
    }
    if (d.query_cell == Cell::int8) sum *= d.dequant_scale1;
    sum = capped(sum * d.scale, d.softcap);
    return d.pse == nullptr ? sum : sum + number(d.pse, entry.pse + head * d.pse_head + token, d.pse_cell);
  }

  void write_number(int64_t i, double result) const {
    const int64_t at = (index * d.heads + head) * d.size + i;
    if (d.quant_scale == nullptr) {
      write(d.out, at, static_cast<float>(result), static_cast<Type>(d.out_cell));
      return;
    }
    const int64_t channel = d.quant_per_channel ? head * d.size + i : 0;
    result = result * d.quant_scale[channel] + (d.quant_offset == nullptr ? 0.0 : d.quant_offset[channel]);
    const double rounded = std::isnan(result) ? -128.0 : std::fmin(127.0, std::fmax(-128.0, std::nearbyint(result)));
    static_cast<int8_t*>(d.out)[at] = static_cast<int8_t>(rounded);
  }

  void attend() const {
    std::vector<double> weights(static_cast<size_t>(entry.length));
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < entry.length; ++j) {
      weights[j] = score(j);
      if (!(weights[j] <= max)) max = weights[j];
    }
    double total = 0;
    for (double& weight : weights) {
      weight = std::exp(weight - max);
      total += weight;
      if (d.query_cell == Cell::int8) weight = std::fmin(127.0, std::fmax(-128.0, std::nearbyint(weight * d.quant_scale1)));
    }
    for (int64_t i = 0; i < d.size; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < entry.length; ++j) {
        if (weights[j] == 0 && masked(j)) continue;
        sum += weights[j] * cached(entry.value, j, i, d.value_scale, d.value_offset);
      }
      if (d.query_cell == Cell::int8) sum *= d.dequant_scale2;
      write_number(i, sum / total);
    }
  }
};

}  // namespace

Outcome decode(const Decode& d, const Runtime&) {
  try {
    for (int64_t i = 0; i < d.entry_count; ++i) {
      const bool empty = d.entries[i].length == 0;
      const int64_t bytes = d.heads * d.size * bytes_of(d.out_cell);
      if (empty) std::memset(static_cast<char*>(d.out) + i * bytes, 0, static_cast<size_t>(bytes));
      for (int64_t head = 0; head < d.heads && !empty; ++head) DecodeRow{d, d.entries[i], i, head}.attend();
    }
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  }
  return Outcome::done;
}

}  // namespace fa::reference
