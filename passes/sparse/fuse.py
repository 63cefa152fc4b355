"""From a fused FlashAttentionScore whose mask admits selected keys to SparseFlashAttention.

    accepted    FlashAttentionScore over query, key and value in BNSD, BSND or BSH with an atten_mask in which
                selection.py finds a list of keys for each row, one for all heads; nothing else of the operator used
    emitted     SparseFlashAttention with these lists as sparse_indices, less what the mask excludes besides
                (entries.py)
    refused     a mask for each head; other batches or lengths of the lists than of query and key; lists of more than
                half of the keys, where going through them takes longer than the mask does; Ascend (its operator wants
                one key head)

Sound because the two operators are the same softmax over the same keys: what FlashAttentionScore excludes takes no part
in it, as what is not listed; ONNX's TopK lists no key twice; a row without a key gives what cpu_empty_rows says.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.build import Builder
from fa_compiler.passes.nodes import is_op, producer
from fa_compiler.passes.options import CLOSE_RANKS
from fa_compiler.passes.sparse.emit import Rows, Sizes, attention
from fa_compiler.passes.sparse.entries import Entries
from fa_compiler.passes.sparse.selection import Selection, selection
from fa_compiler.passes.surgery import replace_value
from fa_compiler.passes.value_sets import ValueSets

EMPTY_ROWS = ("", "zero", "mean", "nan")
_PERM = (0, 2, 1, 3)
"""BNSD to BSND and back."""


@dataclass(frozen=True)
class Selected:
    """What was built: the attention, all nodes that are no standard ones, and the indexer, if there is one."""

    node: ir.Node
    nodes: tuple[ir.Node, ...]
    indexer: ir.Node | None


def to_selected(
    node: ir.Node, builder: Builder, sets: ValueSets, assume: frozenset[str] = frozenset()
) -> Selected | None:
    """Put a SparseFlashAttention in the place of a FlashAttentionScore; None where it is left as it is."""
    mask = node.inputs[6] if len(node.inputs) > 6 else None
    sizes = _sizes(node, builder)
    if mask is None or sizes is None:
        return None
    found = selection(mask, builder.info, sets)
    if found is None or not _fits(found, sizes, builder):
        return None
    entries = Entries.of(node, found, sizes, builder, sets, CLOSE_RANKS in assume)
    if entries is None:
        return None
    made = _build(node, entries, sizes, builder)
    if made is None:
        return None
    _land(node, made[1], sizes, builder)
    nodes = made[:1] if entries.indexer is None else (made[0], entries.indexer)
    return Selected(made[0], nodes, entries.indexer)


def _sizes(node: ir.Node, builder: Builder) -> Sizes | None:
    """The sizes of a call that uses nothing but query, key, value and a mask."""
    attrs = {name: attr.value for name, attr in node.attributes.items()}
    used = {place for place, value in enumerate(node.inputs) if value is not None}
    plain = attrs.get("keep_prob") == 1.0 and attrs.get("sparse_mode") == 0
    extra = "cpu_mask_value" in attrs or attrs.get("cpu_empty_rows", "") not in EMPTY_ROWS
    extra = extra or attrs.get("cpu_nan_rows", "") not in ("", "zero")
    layout = attrs.get("input_layout")
    if used != {0, 1, 2, 6} or not plain or extra or any(output.name for output in node.outputs[:3]):
        return None
    shapes = [builder.info.shape(value) for value in node.inputs[:3] if value is not None]
    if layout not in ("BNSD", "BSND", "BSH") or any(shape is None for shape in shapes):
        return None
    query, key, value = (shape for shape in shapes if shape is not None)
    sequence = 2 if layout == "BNSD" else 1
    heads = int(attrs["head_num"])
    if layout == "BSH":
        width, kv_width = query[2].const, key[2].const
        if width is None or kv_width is None or width % heads or kv_width % (width // heads):
            return None
        kv_heads: int | None = kv_width // (width // heads)
        if value[2].const is None or value[2].const % (kv_heads or 1):
            return None
    else:
        kv_heads = key[3 - sequence].const
        if value[3 - sequence] != key[3 - sequence]:
            return None
    if not kv_heads or not query[0] == key[0] == value[0] or key[sequence] != value[sequence]:
        return None
    return Sizes(layout, query[0], heads, query[sequence], kv_heads, key[sequence])


def _fits(found: Selection, sizes: Sizes, builder: Builder) -> bool:
    """Is there one list for each row of each batch, of not too many keys?"""
    shape, listed = builder.info.shape(found.scattered), builder.info.shape(found.indices)
    if shape is None or listed is None or tuple(shape) != (sizes.batch, sizes.rows, sizes.keys):
        return False
    count, keys = listed[2].const, sizes.keys.const
    return count is not None and (keys is None or 2 * count <= keys)


def _bsnd(value: ir.Value, heads: int, layout: str, builder: Builder) -> ir.Value:
    """query, key or value in BSND."""
    dtype = builder.info.dtype(value)
    if layout == "BSH":
        return builder.op("Reshape", [value, builder.ints([0, 0, heads, -1])], dtype)
    if layout == "BSND":
        return value
    maker = producer(value)
    if is_op(maker, "Transpose") and maker is not None and maker.inputs[0] is not None and "perm" in maker.attributes:
        perm = list(maker.attributes["perm"].as_ints())
        joined = [perm[place] for place in _PERM]
        if joined == sorted(joined):
            return maker.inputs[0]
        return builder.op("Transpose", [maker.inputs[0]], dtype, {"perm": tuple(joined)})
    return builder.op("Transpose", [value], dtype, {"perm": _PERM})


def _build(node: ir.Node, entries: Entries, sizes: Sizes, builder: Builder) -> tuple[ir.Node, ir.Value] | None:
    query, key, value = (entry for entry in node.inputs[:3] if entry is not None)
    same = key is value
    key = _bsnd(key, sizes.kv_heads, sizes.layout, builder)
    inputs = {
        "query": _bsnd(query, sizes.heads, sizes.layout, builder),
        "key": key,
        "value": key if same else _bsnd(value, sizes.kv_heads, sizes.layout, builder),
        "sparse_indices": entries.indices,
    }
    attrs = {name: attr.value for name, attr in node.attributes.items()}
    rows = Rows(str(attrs.get("cpu_empty_rows", "")), attrs.get("cpu_nan_rows") == "zero")
    return attention(inputs, float(attrs["scale_value"]), entries.mode, rows, builder)


def _land(node: ir.Node, result: ir.Value, sizes: Sizes, builder: Builder) -> None:
    """Let the new result take the place of the old. A Transpose to BSND behind it takes it as it is."""
    old = node.outputs[3]
    dtype = builder.info.dtype(old)
    if sizes.layout == "BSH":
        result = builder.op("Reshape", [result, builder.ints([0, 0, -1])], dtype)
    elif sizes.layout == "BNSD":
        readers = [user for user, _ in old.uses()]
        back = [user for user in readers if is_op(user, "Transpose") and _perm(user) == _PERM]
        named = any(value.is_graph_output() for value in (old, *(user.outputs[0] for user in back)))
        if back and len(back) == len(readers) and not named:
            for user in back:
                replace_value(user.outputs[0], result, rename=False)
            return
        result = builder.op("Transpose", [result], dtype, {"perm": _PERM})
    replace_value(old, result)


def _perm(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else ()
