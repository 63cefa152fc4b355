// The operators as kernels of ONNX Runtime.
#pragma once

#include "op.hpp"

namespace fa {

// `node` is that of `info`.
using MakeKernel = std::unique_ptr<OpKernel>(ort::Api api, const ort::KernelInfo* info, const NodeInfo& node);

namespace flash_attention_score {
MakeKernel make_kernel;
}
namespace flash_attention_score_grad {
MakeKernel make_kernel;
}
namespace incre_flash_attention {
MakeKernel make_kernel;
}
namespace prompt_flash_attention {
MakeKernel make_kernel;
}
namespace fused_infer_attention_score {
MakeKernel make_kernel;
}
namespace ring_attention_update {
MakeKernel make_kernel;
}
namespace attention_update {
MakeKernel make_kernel;
}
namespace sparse_flash_attention {
MakeKernel make_kernel;
}
namespace sparse_flash_attention_grad {
MakeKernel make_kernel;
}
namespace sparse_flash_attention_grad_opdef_2026_reordered {
MakeKernel make_kernel;
}
namespace lightning_indexer {
MakeKernel make_kernel;
}
namespace lightning_indexer_grad {
MakeKernel make_kernel;
}
namespace sparse_lightning_indexer_grad_kl_loss {
MakeKernel make_kernel;
}

}  // namespace fa
