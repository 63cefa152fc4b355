"""Where a fused node comes from: the part of the model whose path its name keeps, and the nodes
that it replaces.

    name            PATH/FlashAttentionScore, or fa_FlashAttentionScore where there is no path
    metadata_props  fa_compiler.replaces: the names of the nodes that are not needed any more,
                    separated by ", ", without Constants; the first one is the last that was
                    computed

The path is what the names of softmax and product with the values have in common, up to a slash, as
TorchScript and TensorFlow write them: /encoder/layer.0/attention/self/Softmax. Names without a
slash do not count beside others. Torch's newer exporter gives nodes plain names and writes the
modules into their metadata (`NAME_SCOPES`), a Python list that begins with the model and ends with
the node: ['', 'encoder', 'encoder.layer.0', 'softmax'].
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import takewhile

import onnx_ir as ir

from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.emit.build import PREFIX
from fa_compiler.passes.ir.nodes import is_op, name_of

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
REPLACES = "fa_compiler.replaces"
LONGEST = 1000
"""The number of characters from which on further names are only counted."""


def path_of(nodes: Sequence[ir.Node]) -> str:
    """The path that nodes have in common; empty where they have none."""
    by_name = [parts for node in nodes if (parts := name_of(node).split("/")[:-1])]
    path = "/".join(_common(by_name))
    if path.strip("/"):
        return path
    scopes = _common([_name_scopes(node)[:-1] for node in nodes])
    return "".join(scopes[-1:])


def note_replaced(node: ir.Node, replaced: Iterable[ir.Node]) -> None:
    """Write the names of the replaced nodes into the metadata of a fused node, unless it has them
    already."""
    names = [name for gone in replaced if not is_op(gone, "Constant") and (name := label(gone))]
    kept, length = 0, 0
    while kept < len(names) and length + len(names[kept]) <= LONGEST:
        length += len(names[kept]) + len(", ")
        kept += 1
    listed = names[:kept]
    if kept < len(names):
        listed.append(f"and {len(names) - kept} more")
    if listed and REPLACES not in node.metadata_props:
        node.metadata_props[REPLACES] = ", ".join(listed)


def stands_for(node: ir.Node) -> str | None:
    """The last node of the user's model that a fused node without a path in its name replaces; None
    for others."""
    if not name_of(node).startswith(f"{PREFIX}_"):
        return None
    return node.metadata_props.get(REPLACES, "").partition(", ")[0] or None


def _common(paths: Sequence[list[str]]) -> list[str]:
    if not paths:
        return []
    equal = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in equal]


def _name_scopes(node: ir.Node) -> list[str]:
    """The modules that a node was exported from, the model first; empty where no list of them can
    be read."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(NAME_SCOPES, "[]"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if not isinstance(scopes, list):
        return []
    return [str(scope) for scope in scopes]
