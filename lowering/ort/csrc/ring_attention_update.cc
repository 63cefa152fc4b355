#include <cmath>
#include <cstring>

#include "op.hpp"
#include "reference.hpp"
#include "types.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace ring_attention_update {

// Merges two results of attention over different keys: attn_out, softmax_max and softmax_sum, `prev` and `cur`.
class Kernel final : public OpKernel {
 public:
  Kernel(ort::Api api, const NodeInfo& node);
  void compute(ort::KernelContext* context) const override;

 private:
  struct Operands;

  [[noreturn]] void refuse(Rule rule, const std::string& text) const;
  void check_shapes(const std::vector<Tensor>& all) const;
  static void merge(const Operands& o, int64_t from, int64_t statistic, int64_t size);

  ort::Api api_;
  std::string node_;
  bool packed_ = false;      // TND
  bool statistics_by_token_ = false;  // TND: the statistics are [T,N,8]
};

struct Kernel::Operands {
  Type type;
  const void* out[2];
  const float* max[2];
  const float* sum[2];
  void* merged_out;
  float* merged_max;
  float* merged_sum;
};

Kernel::Kernel(ort::Api api, const NodeInfo& node) : api_(api), node_(node.title()) {
  const std::string layout = node.get(attr::input_layout);
  if (layout != "SBH" && layout != "TND") {
    refuse(rule::layout, "input_layout is \"" + layout + "\", expected \"SBH\" or \"TND\"");
  }
  packed_ = layout == "TND";
  const std::string order = node.get(attr::input_softmax_layout);
  if (order != "" && order != "SBH" && order != "TND") {
    refuse(rule::input_softmax_layout, "input_softmax_layout is \"" + order + "\", expected \"\", \"SBH\" or \"TND\"");
  }
  statistics_by_token_ = packed_ && order == "TND";
  if (packed_ && !node.has_input(input_actual_seq_qlen)) {
    refuse(rule::lengths, "input actual_seq_qlen is absent, expected one for TND");
  }
}

void Kernel::refuse(Rule rule, const std::string& text) const { fa::refuse(node_, rule, text); }

void Kernel::check_shapes(const std::vector<Tensor>& all) const {
  const Dims& out = all[input_prev_attn_out].dims;
  if (out.size() != 3 || all[input_cur_attn_out].dims != out) {
    refuse(rule::layout, "input cur_attn_out has the shape " + text_of(all[input_cur_attn_out].dims) +
                             " beside prev_attn_out of " + text_of(out) + ", expected equal ones of rank 3");
  }
  const Dims& rows = all[input_prev_softmax_max].dims;
  const bool matches = packed_ ? rows == Dims{out[0], out[1], kStatisticsWidth}
                               : rows.size() == 4 && rows[0] == out[1] && rows[2] == out[0] &&
                                     rows[3] == kStatisticsWidth && rows[1] > 0 && out[2] % rows[1] == 0;
  for (size_t input : {input_prev_softmax_max, input_prev_softmax_sum, input_cur_softmax_max, input_cur_softmax_sum}) {
    if (matches && all[input].dims == rows) continue;
    refuse(rule::statistics, std::string("input ") + kInputs[input] + " has the shape " + text_of(all[input].dims) +
                                 ", expected " + (packed_ ? "[T,N,8]" : "[B,N,S,8]"));
  }
  if (packed_ && (out[2] % 64 != 0 || out[2] > 768 || out[1] > 256)) {
    refuse(rule::ranges, "input prev_attn_out has the shape " + text_of(out) +
                             ", expected at most 256 heads of a multiple of 64 up to 768");
  }
}

// Merges one row of one head: `size` numbers that begin at index `from`, and the kStatisticsWidth copies that begin at
// `statistic`.
void Kernel::merge(const Operands& o, int64_t from, int64_t statistic, int64_t size) {
  const float max[2] = {o.max[0][statistic], o.max[1][statistic]};
  const auto merged_max = static_cast<float>(reference::maximum(max[0], max[1]));
  double scaled_sum[2];
  for (int i = 0; i < 2; ++i) scaled_sum[i] = double{o.sum[i][statistic]} * std::exp(double{max[i]} - merged_max);
  const double total = scaled_sum[0] + scaled_sum[1];
  for (int64_t d = 0; d < size && o.merged_out != nullptr; ++d) {
    double result = 0;
    for (int i = 0; i < 2; ++i) result += reference::read(o.out[i], from + d, o.type) * (scaled_sum[i] / total);
    reference::write(o.merged_out, from + d, static_cast<float>(result), o.type);
  }
  for (int64_t c = 0; c < kStatisticsWidth; ++c) {
    if (o.merged_max != nullptr) o.merged_max[statistic + c] = merged_max;
    if (o.merged_sum != nullptr) o.merged_sum[statistic + c] = static_cast<float>(total);
  }
}

void Kernel::compute(ort::KernelContext* context) const {
  const std::vector<Tensor> all = tensors_of(api_, context, std::size(kInputs));
  check_shapes(all);
  const Dims& out = all[input_prev_attn_out].dims;
  const Dims& rows = all[input_prev_softmax_max].dims;
  const auto statistics = [&](size_t input) { return static_cast<const float*>(all[input].data); };
  const Operands o{type_of(all[input_prev_attn_out].type),
                   {all[input_prev_attn_out].data, all[input_cur_attn_out].data},
                   {statistics(input_prev_softmax_max), statistics(input_cur_softmax_max)},
                   {statistics(input_prev_softmax_sum), statistics(input_cur_softmax_sum)},
                   output_of(api_, context, output_attn_out, out),
                   static_cast<float*>(output_of(api_, context, output_softmax_max, rows)),
                   static_cast<float*>(output_of(api_, context, output_softmax_sum, rows))};
  if (!packed_) {
    const int64_t heads = rows[1];
    const int64_t size = out[2] / heads;
    for (int64_t s = 0; s < out[0]; ++s) {
      for (int64_t b = 0; b < out[1]; ++b) {
        for (int64_t n = 0; n < heads; ++n) {
          merge(o, (s * out[1] + b) * out[2] + n * size, ((b * heads + n) * out[0] + s) * kStatisticsWidth, size);
        }
      }
    }
    return;
  }
  const int64_t heads = out[1];
  const Tensor& ends = all[input_actual_seq_qlen];
  const auto* end = static_cast<const int64_t*>(ends.data);
  const int64_t count = ends.present() ? ends.count() : 0;
  if (ends.rank() != 1) {
    refuse(rule::lengths, "input actual_seq_qlen has shape " + text_of(ends.dims) + ", expected rank 1");
  }
  bool ascending = count > 0 && end[0] == 0 && end[count - 1] <= out[0];
  for (int64_t i = 1; i < count; ++i) ascending = ascending && end[i - 1] <= end[i];
  if (!ascending) {
    refuse(rule::lengths, "input actual_seq_qlen does not rise from 0 to at most " + std::to_string(out[0]));
  }
  if (o.merged_out != nullptr) std::memset(o.merged_out, 0, bytes_of(out, o.type == Type::float32 ? 4 : 2));
  for (float* statistic : {o.merged_max, o.merged_sum}) {
    if (statistic != nullptr) std::memset(statistic, 0, bytes_of(rows, sizeof(float)));
  }
  for (int64_t i = 1; i < count; ++i) {
    const int64_t length = end[i] - end[i - 1];
    for (int64_t s = 0; s < length; ++s) {
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t token = end[i - 1] + s;
        // By default the statistics of a sequence are [N,S,8], and begin where the sequences before it end.
        const int64_t row = statistics_by_token_ ? token * heads + n : end[i - 1] * heads + n * length + s;
        merge(o, (token * heads + n) * out[2], row * kStatisticsWidth, out[2]);
      }
    }
  }
}

std::unique_ptr<OpKernel> make_kernel(ort::Api api, const ort::KernelInfo*, const NodeInfo& node) {
  return std::make_unique<Kernel>(api, node);
}

}  // namespace ring_attention_update
}  // namespace fa
