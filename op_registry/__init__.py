"""The operators of the Ascend attention family as data, and all that follows from it.

Prototypes with their history and sources (`get`, `names`, `OpSpec`), the node form (`place_inputs`, `bind_inputs`,
`full_attrs`), inference and the numbered constraints (`infer`, `verify`), the extensions of the CPU kernel
(`EXTENSIONS`), REG_OP text (`reg_op`) and its comparison with an installed CANN (`diff`).
"""

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.errors import (
    NodeError,
    RegistryError,
    RegOpSyntaxError,
    UnknownOp,
    UnknownProduct,
    UnknownVariant,
)
from fa_compiler.op_registry.extensions import EXTENSIONS, Extension
from fa_compiler.op_registry.node import (
    NodeView,
    TensorInfo,
    bind_inputs,
    bind_outputs,
    count_attrs,
    full_attrs,
    place_inputs,
    place_outputs,
)
from fa_compiler.op_registry.registry import DOMAIN, VERSION, get, names, variants
from fa_compiler.op_registry.spec import AttrSpec, InputSpec, Kind, OpSpec, OutputSpec

__all__ = [
    "DOMAIN",
    "EXTENSIONS",
    "VERSION",
    "AttrSpec",
    "Extension",
    "InputSpec",
    "Kind",
    "NodeError",
    "NodeView",
    "OpSpec",
    "OutputSpec",
    "RegOpSyntaxError",
    "RegistryError",
    "TensorInfo",
    "UnknownOp",
    "UnknownProduct",
    "UnknownVariant",
    "bind_inputs",
    "bind_outputs",
    "count_attrs",
    "dtypes",
    "full_attrs",
    "get",
    "names",
    "place_inputs",
    "place_outputs",
    "variants",
]
