"""Rules for the operators of op_registry, which fused models contain and an input model may contain
already, and for the nodes of ATC's own parser that mean them.

They use the registry's own shape inference. The registry writes a symbolic size as text, so a text
in its result stands for the size that the text was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import (
    DOMAIN,
    RegistryError,
    TensorInfo,
    bind_inputs,
    can_infer,
    dtypes,
    get,
    infer,
    names,
)
from fa_compiler.op_registry.parser_plugins import NPU, PARSER_PLUGINS
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import without_absent
from fa_compiler.passes.ops.context import Context, Fact, rule


@rule(*filter(can_infer, names()), domain=DOMAIN)
def _registered(ctx: Context) -> list[Fact]:
    return _inferred(ctx, ctx.node.op_type, {name: ctx.attr(name) for name in ctx.node.attributes})


_PLUGIN_NODES = {plugin.node: op_type for op_type, plugin in PARSER_PLUGINS.items()}


@rule(*_PLUGIN_NODES, domain=NPU)
def _plugin(ctx: Context) -> list[Fact]:
    """The node of a plugin of ATC's own parser."""
    op_type = _PLUGIN_NODES[ctx.node.op_type]
    read = {
        name: ctx.attr(name) for name in PARSER_PLUGINS[op_type].read if name in ctx.node.attributes
    }
    return _inferred(ctx, op_type, {**PARSER_PLUGINS[op_type].fixed, **read})


@rule("LinearAttention")
@rule("LinearAttention", domain="com.microsoft")
def _linear_attention(ctx: Context) -> list[Fact]:
    """It has the first inputs and the results of FlashLinearAttention. With a state_window its
    states are others."""
    if ctx.int_attr("state_window", 0):
        return []
    attrs = {name: ctx.attr(name) for name in ("q_num_heads", "kv_num_heads")}
    return _inferred(ctx, "FlashLinearAttention", attrs)


def _inferred(ctx: Context, operator: str, attrs: Mapping[str, Any]) -> list[Fact]:
    """The results of an operator of the registry with these attributes."""
    spec = get(operator)
    sizes: dict[str, Dim] = {}
    given = [
        _info(ctx.fact(index), sizes) if ctx.has(index) else None for index in range(len(ctx.facts))
    ]
    try:
        bound = bind_inputs(spec, given, attrs)
        inferred = infer(spec.name, without_absent(bound), attrs)
    except RegistryError:
        return []
    return [_fact(inferred[output.name], sizes) for output in spec.outputs[: len(ctx.node.outputs)]]


def _info(fact: Fact, sizes: dict[str, Dim]) -> TensorInfo:
    dtype = None if fact.dtype is None else dtypes.from_onnx(int(fact.dtype))
    if fact.shape is None:
        return TensorInfo(dtype or "")
    shape = tuple(_text(size, sizes) if size.const is None else size.const for size in fact.shape)
    return TensorInfo(dtype or "", shape)


def _text(size: Dim, sizes: dict[str, Dim]) -> str:
    """The text of a size, which no other size has. A name that a model declares may look like an
    expression, so a text that another size has already gets an apostrophe."""
    text = str(size)
    while sizes.setdefault(text, size) != size:
        text += "'"
    return text


def _fact(info: TensorInfo, sizes: dict[str, Dim]) -> Fact:
    number = dtypes.to_onnx(info.dtype) if info.dtype else None
    dtype = if_known(ir.DataType, number)
    if info.shape is None:
        return Fact(None, dtype)
    return Fact(tuple(_size(size, sizes) for size in info.shape), dtype)


def _size(size: int | str | None, sizes: dict[str, Dim]) -> Dim:
    if isinstance(size, int):
        return Dim(size)
    return sizes[size] if size in sizes else Dim.fresh()
