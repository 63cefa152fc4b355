"""Sizes of the tensors of the sparse operators.

| layout | query | key, value | sparse_indices | statistics |
|---|---|---|---|---|
| BSND | B,S1,N1,D | B,S2,N2,D | B,S1,N2,K | B,N2,S1,N1/N2 |
| TND | T1,N1,D | T2,N2,D | T1,N2,K | N2,T1,N1/N2 |
| PA_BSND (key side only) | | blocks,block_size,N2,D | | none |

The statistics have one column for each query head of a group, without the 8 equal columns of the
training operators. Sources: the operator documents of SparseFlashAttentionGrad and
SparseLightningIndexerGradKLLoss, and the operators' own shape inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.geometry import Shape, divide, same, shape_of
from fa_compiler.op_registry.node import Dim, TensorInfo

Inputs = Mapping[str, TensorInfo]

PAGED = "PA_BSND"

QUERY_LAYOUTS = {"BSND": 4, "TND": 3}
"""Layouts of the query side, and the rank of query in each."""

KEY_LAYOUTS = {**QUERY_LAYOUTS, PAGED: 4}
"""Layouts of the key side."""


@dataclass(frozen=True)
class SparseSizes:
    """Sizes of a call, None where unknown. `queries` are the leading dimensions of every tensor
    that has one row for each query token: [B,S1] or [T1]. `keys` are the leading dimensions of key:
    [B,S2], [T2] or [blocks, block size]."""

    queries: Shape
    keys: Shape
    n1: Dim
    n2: Dim
    d: Dim

    @property
    def statistics(self) -> Shape:
        """The shape of softmax_max and softmax_sum."""
        group: Dim = 1 if same(self.n1, self.n2) else divide(self.n1, self.n2)
        return (*self.queries[:-1], self.n2, self.queries[-1], group)


def sparse_sizes(
    query_layout: str, key_layout: str, query: TensorInfo | None, key: TensorInfo | None
) -> SparseSizes | None:
    """The sizes, or None if a layout is unknown."""
    if query_layout not in QUERY_LAYOUTS or key_layout not in KEY_LAYOUTS:
        return None
    q = shape_of(query, QUERY_LAYOUTS[query_layout])
    k = shape_of(key, KEY_LAYOUTS[key_layout])
    return SparseSizes(q[:-2], k[:-2], q[-2], k[-2], q[-1])


def checked_sizes(
    inputs: Inputs, query_layout: str, key_layout: str, rows: tuple[str, ...], keys: tuple[str, ...]
) -> SparseSizes:
    """The sizes of a call whose shapes are inferred. Raises NodeError if a layout is unknown, or if
    an input of the query side (`rows`) or of the key side (`keys`) has another rank than its layout
    says."""
    for layout, known, names in (
        (query_layout, QUERY_LAYOUTS, rows),
        (key_layout, KEY_LAYOUTS, keys),
    ):
        if layout not in known:
            raise NodeError(f"the layout is {layout!r}, expected one of {', '.join(known)}")
        for name in names:
            shape = inputs[name].shape if name in inputs else None
            if shape is not None and len(shape) != known[layout]:
                raise NodeError(
                    f"{name} has rank {len(shape)}, expected {known[layout]} for the layout {layout}"
                )
    sizes = sparse_sizes(query_layout, key_layout, inputs[rows[0]], inputs[keys[0]])
    assert sizes is not None
    return sizes
