"""The sizes of one attention call, read from the shapes of query, key and value according to their
layout.

| layout | query | key | value |
|---|---|---|---|
| BSH | B,S1,N1*D | B,S2,N2*D | B,S2,N2*Dv |
| SBH | S1,B,N1*D | S2,B,N2*D | S2,B,N2*Dv |
| BSND | B,S1,N1,D | B,S2,N2,D | B,S2,N2,Dv |
| BNSD | B,N1,S1,D | B,N2,S2,D | B,N2,S2,Dv |
| TND | T1,N1,D | T2,N2,D | T2,N2,Dv |

No attribute states N2. In BSH and SBH it follows from D, which is the last dimension of query
divided by head_num. Sizes may be symbols or unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import numpy as np

from fa_compiler.op_registry.node import Dim, TensorInfo

LAYOUTS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
"""The layouts of the training operators, and the rank of query, key and value in each."""

FOLDED = ("BSH", "SBH")
"""The layouts whose last dimension is all heads, one after the other."""

BATCH_AXIS = {"BSH": 0, "SBH": 1, "BSND": 0, "BNSD": 0}
"""The batch axis of query, key and value. In TND the batch is packed."""

SEQUENCE_AXIS = {"BSH": 1, "SBH": 0, "BSND": 1, "BNSD": 2}
"""The axis of the tokens in query, key and value. In TND the tokens of all sequences are packed."""

UNLIMITED = 2**31 - 1
"""The default of pre_tockens and next_tockens (CANN's spelling), or pre_tokens and next_tokens: no
limit."""

STATISTICS = 8
"""The number of columns of softmax_max and softmax_sum. All columns are equal."""

Shape = tuple[Dim, ...]


class PackedSequence(NamedTuple):
    """One sequence of a packed batch: how many queries and keys it has."""

    queries: int
    keys: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of a call. `t1`, `t2`, `q_lens` and `kv_lens` are for TND only, `s1` and `s2` for the
    other layouts. `b` is the batch size; in TND it is the number of sequences, if it is known.
    `q_lens` and `kv_lens` are the lengths of the sequences. If the tensors disagree, B and D are
    those of query, and N2 and S2 are those of key. If the operator repeats a batch of 1, B is the
    batch size after the repetition."""

    layout: str
    b: Dim = None
    n1: Dim = None
    n2: Dim = None
    s1: Dim = None
    s2: Dim = None
    d: Dim = None
    dv: Dim = None
    t1: Dim = None
    t2: Dim = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None

    @property
    def tnd(self) -> bool:
        """Whether the batch is packed."""
        return self.layout == "TND"

    @property
    def folded(self) -> bool:
        """Whether the heads and the head size are one dimension."""
        return self.layout in FOLDED

    @property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """The sequences of a packed batch. There are none if the lengths of the queries or of the
        keys are unknown."""
        if not self.q_lens or not self.kv_lens:
            return ()
        return tuple(PackedSequence(*lens) for lens in zip(self.q_lens, self.kv_lens, strict=True))


def differ(a: Dim, b: Dim) -> bool:
    """Whether two sizes are certainly different. Only known numbers can be."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def shapes_differ(a: Shape, b: Shape) -> bool:
    """Whether two shapes are certainly different."""
    return len(a) != len(b) or any(map(differ, a, b))


def misfit(found: Dim, wanted: Dim) -> bool:
    """Whether a size is certainly neither 1 nor the one wanted."""
    return found != 1 and differ(found, wanted)


def exceeds(size: Dim, limit: int) -> TypeGuard[int]:
    """Whether a size is certainly above a limit."""
    return isinstance(size, int) and size > limit


def no_multiple(size: Dim, part: int) -> bool:
    """Whether a size is certainly no multiple of `part`. The only multiple of 0 is 0."""
    if not isinstance(size, int):
        return False
    return size % part != 0 if part else size != 0


def elements(shape: Shape) -> int | None:
    """The number of elements of a tensor, or None if a size is unknown."""
    sizes = [size for size in shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(shape) else None


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are certainly equal: equal numbers or the same symbol."""
    return a is not None and a == b


def shape_of(tensor: TensorInfo | None, rank: int) -> Shape:
    """The tensor's shape if it has this rank, otherwise a shape of unknown sizes."""
    if tensor is None or tensor.shape is None or len(tensor.shape) != rank:
        return (None,) * rank
    return tensor.shape


def sizes_by_letter(tensor: TensorInfo | None, layout: str) -> dict[str, Dim]:
    """The dimensions of a query, key or value by the letters of its layout ("BSND"), unknown where
    its rank is wrong. H is the width of all heads."""
    return dict(zip(layout, shape_of(tensor, len(layout)), strict=True))


def lengths(tensor: TensorInfo | None) -> tuple[int, ...] | None:
    """The lengths of packed sequences from constant cumulative sums, or None if the sums are not
    constant. A negative step counts as 0."""
    if tensor is None or tensor.value is None:
        return None
    ends = np.asarray(tensor.value, dtype=np.int64).reshape(-1)
    return tuple(int(n) for n in np.maximum(np.diff(ends, prepend=0), 0))


def measure(
    layout: str,
    head_num: int | None,
    query: TensorInfo | None,
    key: TensorInfo | None,
    value: TensorInfo | None,
    q_ends: TensorInfo | None = None,
    kv_ends: TensorInfo | None = None,
    repeats: bool = False,
    key_length: bool = False,
) -> Geometry:
    """The sizes of a call. Unknown layouts and wrong ranks give unknown sizes; nothing is checked
    here.

    With `repeats`, a query, key or value of batch 1 is repeated (EXT-BATCH-BROADCAST). With
    `key_length`, `kv_ends` may give the number of keys outside TND (EXT-KEY-LENGTH).
    """
    if layout not in LAYOUTS:
        return Geometry(layout, n1=head_num)
    q, k, v = (sizes_by_letter(tensor, layout) for tensor in (query, key, value))
    if layout == "TND":
        return _packed_sizes(head_num, q, k, v, q_ends, kv_ends)
    if key_length and kv_ends is not None:
        stated = lengths(kv_ends)
        k["S"] = stated[0] if stated else None
    b = broadcast(q["B"], k["B"], v["B"]) if repeats else _better_known(q["B"], k["B"])
    if layout not in FOLDED:
        d, n1 = _better_known(q["D"], k["D"]), _better_known(q["N"], head_num)
        return Geometry(layout, b, n1, k["N"], q["S"], k["S"], d, v["D"])
    d = divide(q["H"], head_num)
    n2 = divide(k["H"], d)
    if n2 is None and same(k["H"], q["H"]):
        n2 = head_num
    dv = d if same(v["H"], k["H"]) else divide(v["H"], n2)
    return Geometry(layout, b, head_num, n2, q["S"], k["S"], d, dv)


def _packed_sizes(
    head_num: int | None,
    q: Mapping[str, Dim],
    k: Mapping[str, Dim],
    v: Mapping[str, Dim],
    q_ends: TensorInfo | None,
    kv_ends: TensorInfo | None,
) -> Geometry:
    """The sizes of a call in TND. If the lengths of queries and keys are of different batches, they
    are unknown."""
    q_lens, kv_lens = lengths(q_ends), lengths(kv_ends)
    if q_lens and kv_lens and len(q_lens) != len(kv_lens):
        q_lens = kv_lens = None
    return Geometry(
        "TND",
        b=len(q_lens) if q_lens is not None else shape_of(q_ends, 1)[0],
        n1=_better_known(q["N"], head_num),
        n2=k["N"],
        d=_better_known(q["D"], k["D"]),
        dv=v["D"],
        t1=q["T"],
        t2=k["T"],
        q_lens=q_lens,
        kv_lens=kv_lens,
    )


def divide(a: Dim, b: Dim) -> Dim:
    """a / b if both are numbers and b divides a, otherwise None."""
    return a // b if isinstance(a, int) and isinstance(b, int) and b > 0 and a % b == 0 else None


def product(a: Dim, b: Dim) -> Dim:
    """a * b if both are numbers, otherwise None."""
    return a * b if isinstance(a, int) and isinstance(b, int) else None


def broadcast(*sizes: Dim) -> Dim:
    """The size to which dimensions of these sizes broadcast, or None if it is not certain.

    If several sizes are different numbers other than 1, which do not fit together, the result is
    the first of them.
    """
    others = [size for size in sizes if size != 1]
    for size in others:
        if isinstance(size, int):
            return size
    if not others:
        return 1
    return others[0] if all(same(size, others[0]) for size in others) else None


def _better_known(a: Dim, b: Dim) -> Dim:
    """The better known of two sizes that ought to be equal: a number rather than a symbol, a symbol
    rather than None. If both are known equally well, it is `a`."""
    return b if a is None or (isinstance(a, str) and isinstance(b, int)) else a
