// The library's one visible symbol: ONNX Runtime calls it with the options of a session.
#include <iterator>

#include "attention_update.hpp"
#include "flash_attention_score.hpp"
#include "flash_attention_score_grad.hpp"
#include "incre_flash_attention.hpp"
#include "ring_attention_update.hpp"
#include "sparse/kernels.hpp"

namespace fa {

using E = ort::Element;
#include "descriptors.inc"

namespace {

constexpr const char* kDomain = "ascend";

// One type combination of one operator.
struct Descriptor : ort::CustomOp {
  const Types* types = nullptr;
};

const Types& types_of(const ort::CustomOp* op) { return *static_cast<const Descriptor*>(op)->types; }

// The kernel and the table it was made with, which compute_v2 is not given.
template <class Kernel>
struct Instance {
  ort::Api api;
  Kernel kernel;
};

// What descriptors.inc says of an operator, and which outputs every node has.
struct Score {
  using Kernel = flash_attention_score::Kernel;
  static constexpr const char* kName = flash_attention_score::kName;
  static constexpr size_t kInputCount = std::size(flash_attention_score::kInputs);
  static constexpr size_t kOutputCount = std::size(flash_attention_score::kOutputs);
  static constexpr size_t kRequiredInputs = flash_attention_score::kRequiredInputs;
  static constexpr bool is_required(size_t output) { return output == flash_attention_score::output_attention_out; }
};

// Each of the gradients may be one that nobody asks for.
struct ScoreGrad {
  using Kernel = flash_attention_score_grad::Kernel;
  static constexpr const char* kName = flash_attention_score_grad::kName;
  static constexpr size_t kInputCount = std::size(flash_attention_score_grad::kInputs);
  static constexpr size_t kOutputCount = std::size(flash_attention_score_grad::kOutputs);
  static constexpr size_t kRequiredInputs = flash_attention_score_grad::kRequiredInputs;
  static constexpr bool is_required(size_t) { return false; }
};

// Each output of the operators of the sparse family may be one that nobody asks for.
#define FA_SPARSE_OP(Name, space)                                           \
  struct Name {                                                             \
    using Kernel = space::Kernel;                                           \
    static constexpr const char* kName = space::kName;                      \
    static constexpr size_t kInputCount = std::size(space::kInputs);        \
    static constexpr size_t kOutputCount = std::size(space::kOutputs);      \
    static constexpr size_t kRequiredInputs = space::kRequiredInputs;       \
    static constexpr bool is_required(size_t) { return false; }             \
  }
FA_SPARSE_OP(SparseAttention, sparse_flash_attention);
FA_SPARSE_OP(SparseAttentionGrad, sparse_flash_attention_grad);
FA_SPARSE_OP(Indexer, lightning_indexer);
FA_SPARSE_OP(IndexerGrad, lightning_indexer_grad);
FA_SPARSE_OP(IndexerLoss, sparse_lightning_indexer_grad_kl_loss);
#undef FA_SPARSE_OP

// Of operators whose first inputs alone are required and whose first output is: the rest follows from descriptors.inc.
#define FA_OPERATOR(Traits, space)                                            \
  struct Traits {                                                             \
    using Kernel = space::Kernel;                                             \
    static constexpr const char* kName = space::kName;                        \
    static constexpr size_t kInputCount = space::kInputCount;                 \
    static constexpr size_t kOutputCount = std::size(space::kOutputs);        \
    static constexpr size_t kRequiredInputs = space::kRequiredInputs;         \
    static constexpr bool is_required(size_t output) { return output == 0; }  \
  };
FA_OPERATOR(Decoding, incre_flash_attention)
FA_OPERATOR(RingUpdate, ring_attention_update)
FA_OPERATOR(Update, attention_update)
#undef FA_OPERATOR

template <class Op>
Descriptor descriptor_of(const Types& types) {
  using Made = Instance<typename Op::Kernel>;
  Descriptor d;
  d.types = &types;
  d.name = [](const ort::CustomOp*) { return Op::kName; };
  d.execution_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  d.input_type = [](const ort::CustomOp* self, size_t i) { return types_of(self).inputs[i]; };
  d.input_count = [](const ort::CustomOp*) { return Op::kInputCount; };
  d.output_type = [](const ort::CustomOp* self, size_t i) { return types_of(self).outputs[i]; };
  d.output_count = [](const ort::CustomOp*) { return Op::kOutputCount; };
  d.input_characteristic = [](const ort::CustomOp*, size_t i) {
    return i < Op::kRequiredInputs ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.output_characteristic = [](const ort::CustomOp*, size_t i) {
    return Op::is_required(i) ? ort::Characteristic::required : ort::Characteristic::optional;
  };
  d.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  d.variadic_input_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_input_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_min_arity = [](const ort::CustomOp*) { return 0; };
  d.variadic_output_homogeneity = [](const ort::CustomOp*) { return 0; };
  d.create_v2 = [](const ort::CustomOp*, ort::Api api, const ort::KernelInfo* info, void** kernel) {
    return guarded(api, [&] { *kernel = new Made{api, typename Op::Kernel(api, info)}; });
  };
  d.compute_v2 = [](void* made, ort::KernelContext* context) {
    const Made& self = *static_cast<const Made*>(made);
    return guarded(self.api, [&] { self.kernel.compute(context); });
  };
  d.destroy = [](void* made) { delete static_cast<Made*>(made); };
  d.first_version = [](const ort::CustomOp*) { return 1; };
  d.last_version = [](const ort::CustomOp*) { return 1; };
  d.may_inplace = [](int**, int**) { return size_t{0}; };
  d.release_may_inplace = [](int*, int*) {};
  d.alias_map = [](int**, int**) { return size_t{0}; };
  d.release_alias_map = [](int*, int*) {};
  return d;
}

// They live as long as the library: sessions keep pointers to them.
const std::vector<Descriptor>& descriptors() {
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> list;
    for (const Types& types : flash_attention_score::kTypes) list.push_back(descriptor_of<Score>(types));
    for (const Types& types : flash_attention_score_grad::kTypes) list.push_back(descriptor_of<ScoreGrad>(types));
    for (const Types& types : sparse_flash_attention::kTypes) list.push_back(descriptor_of<SparseAttention>(types));
    for (const Types& types : sparse_flash_attention_grad::kTypes) list.push_back(descriptor_of<SparseAttentionGrad>(types));
    for (const Types& types : lightning_indexer::kTypes) list.push_back(descriptor_of<Indexer>(types));
    for (const Types& types : lightning_indexer_grad::kTypes) list.push_back(descriptor_of<IndexerGrad>(types));
    for (const Types& types : sparse_lightning_indexer_grad_kl_loss::kTypes) list.push_back(descriptor_of<IndexerLoss>(types));
    for (const Types& types : incre_flash_attention::kTypes) list.push_back(descriptor_of<Decoding>(types));
    for (const Types& types : ring_attention_update::kTypes) list.push_back(descriptor_of<RingUpdate>(types));
    for (const Types& types : attention_update::kTypes) list.push_back(descriptor_of<Update>(types));
    return list;
  }();
  return all;
}

}  // namespace
}  // namespace fa

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api api = base->get_api(ort::kApiVersion);
  if (api == nullptr) return nullptr;
  return fa::guarded(api, [&] {
    ort::CustomOpDomain* domain = nullptr;
    fa::check(api, ort::CreateCustomOpDomain(api, fa::kDomain, &domain));
    for (const fa::Descriptor& descriptor : fa::descriptors()) {
      fa::check(api, ort::CustomOpDomain_Add(api, domain, &descriptor));
    }
    fa::check(api, ort::AddCustomOpDomain(api, options, domain));
  });
}
