"""The operators around attention for which ATC's own ONNX parser has a plugin: a node of the domain
`npu`, version 1.

The parser connects input i of the node to input i of the operator, and the same holds for the
outputs. An attribute is read from the node, or set to a number of the plugin's own, whatever the
node says; every other one has the default of the prototype. So a node means the operator only where
its attributes are these.

No plugin exists for LayerNormV4, AddLayerNorm, SwiGlu and ClippedSwiglu. NPURotaryMul (RotaryMul,
mode half) and NPUFastGelu (FastGelu, another function than Gelu by tanh) exist as well, and are not
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fa_compiler.op_registry.registry import get, release
from fa_compiler.op_registry.spec import AttrValue

NPU, NPU_VERSION = "npu", 1
"""The domain of the nodes of the parser's own plugins, and its version."""


@dataclass(frozen=True)
class ParserPlugin:
    """The node of an operator, the first CANN release whose sources have the plugin, the attributes
    that it reads, and those that it sets."""

    node: str
    cann: str
    source: str
    read: tuple[str, ...] = ()
    fixed: Mapping[str, AttrValue] = field(default_factory=dict)


_NN = "hicann/ops-nn v8.5.0-beta.1 (2025-12-31), the same in v9.1.0 and e5c3fa93 (2026-08-22)"

PARSER_PLUGINS: Mapping[str, ParserPlugin] = {
    "RmsNorm": ParserPlugin(
        "NPURmsNorm",
        "8.5.0",
        f"{_NN}, norm/rms_norm/framework/npu_rms_norm_onnx_plugin.cpp",
        fixed={"epsilon": 1e-6},
    ),
    "AddRmsNorm": ParserPlugin(
        "NPUAddRmsNorm",
        "8.5.0",
        f"{_NN}, norm/add_rms_norm/framework/npu_add_rms_norm_onnx_plugin.cpp",
        fixed={"epsilon": 1e-6},
    ),
    "GeGluV2": ParserPlugin(
        "NPUGeglu",
        "8.5.0",
        f"{_NN}, activation/ge_glu_v2/framework/npu_geglu_onnx_plugin.cpp",
        fixed={"dim": -1, "approximate": 1},
    ),
    "GeluV2": ParserPlugin(
        "NPUGeluV2",
        "8.5.0",
        f"{_NN}, activation/gelu_v2/framework/npu_geluv2_onnx_plugin.cpp",
        read=("approximate",),
    ),
    "RotaryPositionEmbedding": ParserPlugin(
        "NPURotaryPositionEmbedding",
        "8.5.0",
        "mirror-cann/ops-transformer 70c7cdd2d (2025-12-31), in v8.5.0 (2026-01-22) and later, not in v8.5.0-beta.1, "
        "posembedding/rotary_position_embedding/framework/npu_rotary_position_embedding_onnx_plugin.cpp",
        read=("mode",),
    ),
}


def plugin_misfit(
    op_type: str, attrs: Mapping[str, AttrValue], cann: str | None = None
) -> str | None:
    """Why the parser's plugin does not write a call of an operator in a CANN release (None: the
    newest), as a sentence; None where it does. Raises UnknownOp."""
    plugin = PARSER_PLUGINS.get(op_type)
    if plugin is None:
        return f"ATC's own parser has no plugin for {op_type}"
    asked, first = release(cann or plugin.cann), release(plugin.cann)
    if asked is None or first is None or asked < first:
        return (
            f"the plugin {plugin.node} of ATC's own parser is not known before CANN {plugin.cann}"
        )
    for name, default in (
        (entry.name, entry.value_if_absent) for entry in get(op_type, cann).attrs
    ):
        given, meant = attrs.get(name, default), plugin.fixed.get(name, default)
        if name not in plugin.read and not _is_equal(given, meant):
            own, other = map(_shown, (meant, given))
            return f"{plugin.node} of ATC's own parser computes with {name} {own}, and here it is {other}"
    return None


def _shown(value: AttrValue | None) -> str:
    return str(np.float32(value)) if isinstance(value, float) else str(value)


def _is_equal(one: AttrValue | None, other: AttrValue | None) -> bool:
    """Are two values of an attribute one? Floats are those of 32 bits."""
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    return one == other
