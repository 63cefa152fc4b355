"""The operators of the Ascend attention family as data, and the functions that read this data.

Each operator is one file in `ops/`, which makes one record (`operator`, `Operator`). All else is
derived from the records:

- prototypes with their history and sources (`get`, `names`, `OpSpec`);
- the node form (`place_inputs`, `bind_inputs`, `full_attrs`) and shape inference (`infer`);
- checks (`verify`, `Diagnostic`) and calls with arrays (`as_arrays`, `refusal`);
- the extensions of the CPU kernels (`EXTENSIONS`, `extensions_of`);
- REG_OP text (`reg_op`) and its comparison with an installed CANN (`diff`).
"""

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.attributes import full_attrs
from fa_compiler.op_registry.calls import as_arrays, refusal
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.errors import (
    InputError,
    NodeError,
    RegistryError,
    RegOpSyntaxError,
    UnknownOp,
    UnknownProduct,
    UnknownVariant,
)
from fa_compiler.op_registry.extensions import EXTENSIONS, Extension
from fa_compiler.op_registry.infer import can_infer, infer
from fa_compiler.op_registry.node import (
    NodeView,
    TensorInfo,
    bind_inputs,
    bind_outputs,
    count_attrs,
    place_inputs,
    place_outputs,
)
from fa_compiler.op_registry.operator import Operator
from fa_compiler.op_registry.products import Product, product
from fa_compiler.op_registry.registry import (
    DOMAIN,
    DOMAINS,
    FILE_DOMAIN,
    FILE_OP,
    FILE_OPS,
    GRAPH_OP,
    VERSION,
    attention_names,
    extensions_of,
    get,
    has_kernel,
    later_attrs,
    names,
    operator,
    variants,
)
from fa_compiler.op_registry.spec import AttrSpec, InputSpec, Kind, OpSpec, OutputSpec
from fa_compiler.op_registry.verify import extensions_used, verify

__all__ = [
    "DOMAIN",
    "DOMAINS",
    "EXTENSIONS",
    "FILE_DOMAIN",
    "FILE_OP",
    "FILE_OPS",
    "GRAPH_OP",
    "VERSION",
    "AttrSpec",
    "Diagnostic",
    "Extension",
    "InputError",
    "InputSpec",
    "Kind",
    "NodeError",
    "NodeView",
    "OpSpec",
    "Operator",
    "OutputSpec",
    "Product",
    "RegOpSyntaxError",
    "RegistryError",
    "TensorInfo",
    "UnknownOp",
    "UnknownProduct",
    "UnknownVariant",
    "as_arrays",
    "attention_names",
    "bind_inputs",
    "bind_outputs",
    "can_infer",
    "count_attrs",
    "dtypes",
    "extensions_of",
    "extensions_used",
    "full_attrs",
    "get",
    "has_kernel",
    "infer",
    "later_attrs",
    "names",
    "operator",
    "place_inputs",
    "place_outputs",
    "product",
    "refusal",
    "variants",
    "verify",
]
