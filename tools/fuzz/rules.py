"""Draws one operator that a rank computes from its part of the sequence, from the tables of rules and the schemas.

The operators are the keys of LOCAL_RULES and COLLAPSING_RULES, so that a new rule is drawn by itself. Its inputs, types
and attributes come from its schema in ONNX Runtime. FORMS says what shapes an operator takes; one that is not listed
there takes operands that are broadcast to each other. A draw that ONNX Runtime does not run is left out.

    the sequence         in any dimension of any operand, alone or merged with its neighbour; open or of a fixed size,
                         which other dimensions may have, too; of 2 to 13 tokens
    other dimensions     of 0 and 1 now and then, and of so many features that no rank may have all tokens of them
    an operand           an input in parts, a whole input, an input with a default, a weight, or absent
    numbers              NaN, infinities, large ones, the lowest one; integers of both signs
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from fa_compiler.op_registry import names
from fa_compiler.passes.parallel import shard  # enters the rules
from fa_compiler.passes.parallel.sharder import COLLAPSING_RULES, LOCAL_RULES
from tools.fuzz.difference import Array

OPSETS = range(11, 24)
CONTRIB = "com.microsoft"
OPERATORS = sorted({*LOCAL_RULES, *COLLAPSING_RULES}.difference(names()))
"""Those of ONNX and ONNX Runtime. The kind `rank_calls` draws calls of attention among our own."""
REDUCING = sorted({*COLLAPSING_RULES}.difference(names()))
"""Those that may take tokens out of the sequence or reduce it. They are drawn more often."""
assert shard.RULES

_NAMES = {"float": "float32", "double": "float64"}
_TYPES = ("float", "double", "float16", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
KINDS = {f"tensor({name})": np.dtype(_NAMES.get(name, name)) for name in _TYPES}
"""The types that are drawn, as schemas name them."""
WHOLE = Callable[["Draw"], "list[Operand | None]"]


@dataclass(frozen=True)
class Operand:
    """An input of the operator. `axis` is the dimension of the sequence, None for a tensor without it. `fixed` is for
    one that has to be known, such as axes; `array` is drawn by its type where it is None."""

    shape: tuple[int, ...]
    axis: int | None = None
    array: Array | None = None
    fixed: bool = False


@dataclass
class Schema:
    """What ONNX Runtime knows of an operator in one version."""

    domain: str
    version: int
    inputs: Sequence[Any]
    outputs: int
    attributes: dict[str, Any]


@cache
def schemas() -> dict[str, list[Schema]]:
    """The schemas of each drawn operator."""
    found: dict[str, list[Schema]] = {name: [] for name in OPERATORS}
    for each in runtime.get_all_operator_schema():
        if each.name in found and each.domain in ("", CONTRIB):
            made = Schema(each.domain, each.since_version, each.inputs, len(each.outputs), dict(each.attributes))
            found[each.name].append(made)
    return found


@dataclass
class Draw:
    """One node while it is drawn."""

    rng: random.Random
    op: str
    attrs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.rng.getrandbits(32))
        self.length = self.rng.choice((2, 3, 4, 5, 6, 7, 8, 11, 13))
        self.wide = self.rng.random() < 0.5
        self.opset = self.rng.choice(OPSETS)
        every = schemas()[self.op]
        self.domain = self.rng.choice(sorted({each.domain for each in every}) or [""])  # none: a newer operator
        least = self.opset if self.domain == "" else 1
        versions = [each for each in every if each.domain == self.domain and each.version <= least]
        self.schema = max(versions, key=lambda each: each.version) if versions else None
        self.types: dict[str, np.dtype[Any]] = {}

    # -- sizes --------------------------------------------------------------------------------

    def size(self) -> int:
        """That of a dimension that is not the sequence."""
        return 0 if self.flip(0.08) else self.rng.choice((1, 2, 2, 3, 4, self.length))

    def base(self, least: int = 1, most: int = 4) -> Operand:
        """A tensor with the sequence."""
        rank = self.rng.randint(least, most)
        axis = self.rng.randrange(rank)
        shape = [self.length if dim == axis else self.size() for dim in range(rank)]
        if self.wide and rank > 1:
            shape[self.rng.choice([dim for dim in range(rank) if dim != axis])] = 20
        return Operand(tuple(shape), axis)

    def like(self, base: Operand) -> Operand:
        """An operand that is broadcast to another one."""
        kept = self.rng.choice((0, 0, 0, self.rng.randint(0, len(base.shape))))
        shape = tuple(1 if self.rng.random() < 0.2 else size for size in base.shape[kept:])
        axis = None if base.axis is None or base.axis < kept else base.axis - kept
        if axis is not None and shape[axis] != self.length:
            axis = None
        return Operand(shape, axis)

    def ints(self, *numbers: int) -> Operand:
        """Integers that have to be known."""
        return Operand((len(numbers),), None, np.array(numbers, np.int64), True)

    def number(self, number: float, kind: Any = np.int64) -> Operand:
        """A scalar that has to be known."""
        return Operand((), None, np.array(number, kind), True)

    def axis(self, rank: int) -> int:
        """Any dimension, counted from the front or the end."""
        return self.rng.randrange(-rank, rank) if rank else 0

    def flip(self, chance: float = 0.5) -> bool:
        """Is something so?"""
        return self.rng.random() < chance

    # -- the node -----------------------------------------------------------------------------

    def operands(self) -> list[Operand | None]:
        """The inputs, in their order."""
        form = FORMS.get(self.op, _broadcast)
        return form(self)

    def kind(self, index: int) -> np.dtype[Any]:
        """The type of an input: one for all inputs of the same type variable."""
        assert self.schema is not None
        entry = self.schema.inputs[min(index, len(self.schema.inputs) - 1)]
        if entry.typeStr not in self.types:
            known = sorted(set(entry.types).intersection(KINDS)) or ["tensor(float)"]
            common = [each for each in known if each in ("tensor(float)", "tensor(int64)", "tensor(float16)")]
            picked = self.rng.choice(common if common and self.flip(0.6) else known)
            self.types[entry.typeStr] = KINDS[picked]
        return self.types[entry.typeStr]

    def array(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
        """Numbers of a type."""
        if kind == np.bool_:
            return self.numbers.random(shape) < 0.5
        if kind.kind in "iu":
            drawn = self.numbers.integers(1 if kind.kind == "u" or self.op in ("Div", "Mod", "Pow") else -9, 9, shape)
            return np.where(drawn == 0, 1, drawn).astype(kind) if self.flip() else drawn.astype(kind)
        made = np.asarray(self.numbers.standard_normal(shape))
        largest = float(np.finfo(kind).max)
        odd = self.rng.choice(((), (), (), (np.nan,), (np.inf,), (-np.inf,), (-largest,), (np.nan, np.inf, 0.0)))
        if self.flip(0.15):
            made *= largest / 4 if kind == np.float16 else 1e4  # sums of 16 bits may overflow
        for each in odd:
            made[self.numbers.random(shape) < self.rng.choice((0.02, 0.3))] = each
        return made.astype(kind)


# -- the forms: each draws the operands, and the attributes that go with them ---------------------------------------


def _broadcast(d: Draw) -> list[Operand | None]:
    """Operands that are broadcast to each other, of which a scalar may be absent."""
    assert d.schema is not None
    base = d.base()
    entries = list(d.schema.inputs)
    if entries and "Variadic" in str(entries[-1].option):
        entries = [entries[-1]] * d.rng.randint(1, 3)
    found: list[Operand | None] = [base]
    for entry in entries[1:]:
        optional = "Optional" in str(entry.option)
        found.append(None if optional and d.flip(0.4) else Operand(()) if optional else d.like(base))
    if d.flip(0.3) and len(found) > 1 and not any("Optional" in str(each.option) for each in entries):
        d.rng.shuffle(found)
    _plain_attributes(d)
    return found


def _plain_attributes(d: Draw) -> None:
    """Attributes that are numbers."""
    words = {"direction": ("LEFT", "RIGHT"), "approximate": ("none", "tanh")}
    assert d.schema is not None
    for name, attr in d.schema.attributes.items():
        kind = str(attr.type)
        if name in words:
            d.attrs[name] = d.rng.choice(words[name])
        elif name == "fmod":
            d.attrs[name] = d.rng.randint(0, 1)
        elif name == "to":
            d.attrs[name] = int(helper.np_dtype_to_tensor_dtype(d.rng.choice([*KINDS.values()])))
        elif kind.endswith("FLOAT: 1>") and d.flip(0.3):
            d.attrs[name] = d.rng.choice((0.0, 0.5, 1.0, 2.0))
        elif kind.endswith("INT: 2>") and d.flip(0.3):
            d.attrs[name] = d.rng.randint(0, 1)


def _dropout(d: Draw) -> list[Operand | None]:
    given = [d.number(0.5, np.float32), d.number(d.flip(0.1), np.bool_)][: d.rng.randint(0, 2)]
    return [d.base(), *(given if d.opset >= 12 else [])]


def _along(d: Draw) -> list[Operand | None]:
    base = d.base()
    if d.flip(0.8):
        d.attrs["axis"] = d.axis(len(base.shape))
    if d.op == "LpNormalization":
        d.attrs["p"] = d.rng.choice((1, 2))
    return [base]


def _cumsum(d: Draw) -> list[Operand | None]:
    base = d.base()
    d.attrs |= {"exclusive": d.rng.randint(0, 1), "reverse": d.rng.randint(0, 1)}
    return [base, d.number(d.axis(len(base.shape)), d.rng.choice((np.int32, np.int64)))]


def _topk(d: Draw) -> list[Operand | None]:
    base = d.base()
    axis = d.attrs["axis"] = d.axis(len(base.shape))
    d.attrs["largest"] = d.rng.randint(0, 1)
    return [base, d.ints(d.rng.randint(1, max(base.shape[axis], 1)))]


def _norm(d: Draw) -> list[Operand | None]:
    base = d.base()
    axis = d.attrs["axis"] = d.axis(len(base.shape))
    behind = base.shape[axis:]
    more = 1 if d.flip(0.1) else 0
    first = max(len(base.shape) - len(behind) - more, 0)
    weight = Operand(base.shape[first:], None if base.axis is None or base.axis < first else base.axis - first)
    if d.flip(0.2):
        weight = Operand(behind[1:])
    return [base, weight, *([weight] if d.op == "LayerNormalization" and d.flip() else [])]


def _skip_norm(d: Draw) -> list[Operand | None]:
    batch, hidden = d.rng.choice((1, 2, 3)), d.rng.choice((4, 20))
    axis = d.rng.choice((0, 1, 1, 1, 2))
    shape = tuple(d.length if dim == axis else size for dim, size in enumerate((batch, 3, hidden)))
    x = Operand(shape, axis)
    kept = d.rng.choice((0, 0, 1))
    skip = Operand((*((1,) if kept == 0 and d.flip(0.3) and axis else shape[:1]), *shape[1:])[kept:], axis - kept)
    if axis < kept:
        skip = replace(skip, axis=None)
    row = Operand(shape[2:], 0 if axis == 2 else None)
    rest = [row if d.flip() else None for _ in range(2 if d.op == "SkipLayerNormalization" else 1)]
    return [x, skip, row, *rest]


def _pooled(d: Draw) -> list[Operand | None]:
    return [d.base(3, 4)]


def _reduced(d: Draw) -> list[Operand | None]:
    base = d.base()
    rank = len(base.shape)
    assert d.schema is not None
    d.attrs["keepdims"] = d.rng.randint(0, 1)
    if d.op.startswith("Arg"):
        d.attrs["axis"] = d.axis(rank)
        d.attrs |= {"select_last_index": d.rng.randint(0, 1)} if d.opset >= 12 else {}
        return [base]
    count = d.rng.randint(1, rank)
    axes = [each - rank * d.rng.randint(0, 1) for each in d.rng.sample(range(rank), count)]
    if d.flip(0.6) and base.axis is not None and base.axis not in [each % rank for each in axes]:
        axes = [base.axis]
    takes = len(d.schema.inputs) > 1
    if takes:
        d.attrs["noop_with_empty_axes"] = int(d.flip(0.2))
    if d.flip(0.15):
        return [base, d.ints()] if takes and d.flip() else [base]
    if takes:
        return [base, d.ints(*axes)]
    d.attrs["axes"] = axes
    return [base]


def _matmul(d: Draw) -> list[Operand | None]:
    inner, outer = d.rng.choice((1, 3, 20)), (d.rng.choice((2, 4, 20)), d.rng.choice((1, 5, 20)))
    where = d.rng.choice(("rows", "columns", "sum", "batch", "none of the second"))
    m, k, n = (
        d.length if where == name else size
        for name, size in zip(("rows", "sum", "columns"), (outer[0], inner, outer[1]), strict=True)
    )
    batch = [d.size() for _ in range(d.rng.choice((0, 1, 1, 2)))]
    place = None
    if where == "batch":
        batch = batch or [1]
        place = d.rng.randrange(len(batch))
        batch[place] = d.length
    shapes = [(*batch, m, k), (*batch, k, n)]
    axes: list[int | None] = [None, None]
    if where == "rows":
        axes[0] = len(batch)
    if where == "columns":
        axes[1] = len(batch) + 1
    if where == "sum":
        axes = [len(batch) + 1, len(batch)]
    if where == "batch":
        axes = [place, place]
    if where == "none of the second":
        shapes[0], axes[0] = (*batch, d.length, k), len(batch)
    pair = [_thinned(d, Operand(shape, axis), 2) for shape, axis in zip(shapes, axes, strict=True)]
    if d.flip(0.1):
        pair[1] = Operand((k,), 0 if where == "sum" else None)
    if d.op == "FusedMatMul":
        d.attrs |= {"alpha": d.rng.choice((1.0, 0.5)), "transA": int(d.flip(0.1)), "transB": int(d.flip(0.1))}
    zeros: list[Operand | None] = []
    if d.op == "MatMulInteger" and d.flip():
        zeros = [d.rng.choice((None, Operand(()), Operand((1,)))), d.rng.choice((None, Operand(()), Operand((n,))))]
    return [*pair, *zeros]


def _thinned(d: Draw, operand: Operand, kept: int) -> Operand:
    """The same with 1 in place of some dimensions, or without some, but for the last ones."""
    shape, axis = list(operand.shape), operand.axis
    for dim in range(len(shape) - kept):
        if d.flip(0.2):
            shape[dim] = 1
            axis = None if axis == dim else axis
    if d.flip(0.2):
        gone = d.rng.randint(0, len(shape) - kept)
        shape, axis = shape[gone:], None if axis is None or axis < gone else axis - gone
    return Operand(tuple(shape), axis)


def _packed(d: Draw) -> list[Operand | None]:
    width, columns, block = 32, d.rng.choice((3, 8)), d.rng.choice((16, 32))
    d.attrs |= {"K": width, "N": columns, "bits": 4, "block_size": block}
    axis = d.rng.choice((0, 1))
    x = Operand(tuple(d.length if dim == axis else 2 for dim in range(2)) + (width,), axis)
    blocks = width // block
    content = d.numbers.integers(0, 256, (columns, blocks, block // 2)).astype(np.uint8)
    scales = d.numbers.random((columns, blocks) if d.flip() else (columns * blocks,)).astype(np.float32)
    return [x, Operand(content.shape, None, content, True), Operand(scales.shape, None, scales, True)]


def _gemm(d: Draw) -> list[Operand | None]:
    sizes = {"m": d.rng.choice((2, 20)), "k": d.rng.choice((3, 20)), "n": d.rng.choice((1, 4))}
    letter = d.rng.choice("mkn")
    sizes[letter] = d.length
    turned = [d.rng.randint(0, 1), d.rng.randint(0, 1)]
    d.attrs |= {"transA": turned[0], "transB": turned[1], "alpha": d.rng.choice((1.0, 0.5)), "beta": 2.0}
    words = ["km" if turned[0] else "mk", "nk" if turned[1] else "kn"]
    found: list[Operand | None] = [Operand(tuple(sizes[e] for e in word), _place(word, letter)) for word in words]
    if d.flip(0.6):
        word = d.rng.choice(("mn", "n", "1n", "m1", "1", ""))
        found.append(Operand(tuple(sizes.get(e, 1) for e in word), _place(word, letter)))
    return found


def _place(word: str, letter: str) -> int | None:
    return word.index(letter) if letter in word else None


def _einsum(d: Draw) -> list[Operand | None]:
    equation = d.rng.choice(
        ("bse,ef->bsf", "bse,bte->bst", "bshd,bthd->bhst", "bs,bs->bs", "bs,s->sb", "s,t->st", "bse->bes", "bse->be")
        + ("ss->s", "bse,e->bs", "...s,s->...s", "bst,bte->bse")
    )
    letter = d.rng.choice("sstbe")
    sizes = {each: d.rng.choice((1, 2, 3, 20)) for each in "bsthdef"} | {letter: d.length}
    d.attrs["equation"] = equation
    found: list[Operand | None] = []
    for term in equation.partition("->")[0].replace("...", "b").split(","):
        shape = tuple(1 if d.flip(0.3 if each == letter and found else 0.1) else sizes[each] for each in term)
        axis = _place(term, letter)
        found.append(Operand(shape, axis if axis is not None and shape[axis] == d.length else None))
    return found


def _indices(d: Draw, shape: tuple[int, ...], limit: int) -> Array:
    return d.numbers.integers(-limit, max(limit, 1), shape).astype(np.int64) if limit else np.zeros(shape, np.int64)


def _gather(d: Draw) -> list[Operand | None]:
    data = d.base(1, 3)
    axis = d.attrs["axis"] = d.axis(len(data.shape))
    index = Operand(tuple(d.size() for _ in range(d.rng.randint(0, 2))), fixed=d.flip())
    if d.flip():
        data = replace(data, axis=None)
        index = d.base(1, 2)
    return [data, replace(index, array=_indices(d, index.shape, data.shape[axis]))]


def _gather_elements(d: Draw) -> list[Operand | None]:
    data = d.base(1, 3)
    rank = len(data.shape)
    axis = d.attrs["axis"] = d.axis(rank)
    shape = list(data.shape)
    shape[axis] = d.size() if d.flip() else shape[axis]
    if d.flip(0.2):
        shape[d.rng.randrange(rank)] = 1
    own = data.axis if data.axis is not None and shape[data.axis] == d.length else None
    return [data, Operand(tuple(shape), own, _indices(d, tuple(shape), data.shape[axis]))]


def _gather_nd(d: Draw) -> list[Operand | None]:
    data = d.base(2, 4)
    rank = len(data.shape)
    batch = d.rng.randint(0, min(1, rank - 2)) if d.opset >= 12 and d.domain == "" else 0
    if batch:
        d.attrs["batch_dims"] = batch
    width = d.rng.randint(1, rank - batch)
    rows = d.rng.choice(((), (d.length,), (d.size(),), (2, d.length)))
    shape = (*data.shape[:batch], *rows, width)
    own = 0 if batch and data.axis == 0 else _place_of(rows, d.length, batch)
    entries = [_indices(d, shape[:-1], size) for size in data.shape[batch : batch + width]]
    return [data, Operand(shape, own, np.stack(entries, -1))]


def _place_of(sizes: tuple[int, ...], length: int, first: int) -> int | None:
    return first + sizes.index(length) if length in sizes else None


def _scatter_elements(d: Draw) -> list[Operand | None]:
    data, indices = _gather_elements(d)
    assert data is not None and indices is not None
    if d.opset >= 16 and d.flip(0.3):
        d.attrs["reduction"] = d.rng.choice(("add", "mul", "max", "min"))
    else:  # places that are written twice are undefined
        shape, axis = indices.shape, d.attrs["axis"]
        order = np.argsort(d.numbers.random(data.shape), axis=axis)
        indices = replace(indices, array=order[tuple(slice(size) for size in shape)].astype(np.int64))
    return [data, indices, Operand(indices.shape, indices.axis)]


def _scatter_nd(d: Draw) -> list[Operand | None]:
    data = d.base(1, 3)
    rank = len(data.shape)
    width, count = d.rng.randint(1, rank), d.rng.randint(0, 3)
    places = [*np.ndindex(*data.shape[:width])]
    chosen = d.rng.sample(places, min(count, len(places)))
    index = np.array(chosen, np.int64).reshape(len(chosen), width)
    updates = (len(chosen), *data.shape[width:])
    own = None if data.axis is None or data.axis < width else 1 + data.axis - width
    return [data, Operand(index.shape, None, index, d.flip()), Operand(updates, own)]


def _one_hot(d: Draw) -> list[Operand | None]:
    indices, depth = d.base(1, 3), d.rng.choice((3, d.length))
    d.attrs["axis"] = d.rng.randint(-1, len(indices.shape))
    drawn = d.numbers.integers(-depth, depth, indices.shape)
    pair = d.array((2,), np.dtype(np.float32))
    return [replace(indices, array=drawn), d.number(depth), Operand((2,), None, pair, True)]


def _conv(d: Draw) -> list[Operand | None]:
    spatial, channels = d.rng.choice((1, 2)), d.rng.choice((2, 4))
    x = [d.rng.choice((1, 2)), channels, *(4,) * spatial]
    axis = d.rng.randrange(len(x))
    x[axis] = d.length
    window = [d.rng.choice((1, 1, 1, 2)) for _ in range(spatial)]
    group = d.rng.choice((1, x[1]))
    d.attrs |= {"group": group} | ({"strides": [d.rng.choice((1, 1, 2))] * spatial} if d.flip(0.3) else {})
    if d.flip(0.2):
        d.attrs["pads"] = [d.rng.choice((0, 1))] * (2 * spatial)
    elif d.flip(0.2):
        d.attrs["auto_pad"] = d.rng.choice(("SAME_UPPER", "VALID"))
    bias = [Operand((x[1],))] if d.flip() else []
    return [Operand(tuple(x), axis), Operand((x[1], x[1] // group, *window)), *bias]


def _quantisation(d: Draw) -> list[Operand | None]:
    base = d.base()
    rank = len(base.shape)
    axis = d.axis(rank)
    single = d.flip() or d.opset < 13
    shape: tuple[int, ...] = () if single else (base.shape[axis],)
    own = 0 if not single and axis % rank == base.axis else None
    if d.opset >= 13 or d.domain == CONTRIB:
        d.attrs["axis"] = axis
    if single and d.flip(0.3):
        shape = (1,)
    scale = Operand(shape, own, np.abs(d.numbers.standard_normal(shape)).astype(np.float32) + np.float32(0.1))
    if d.opset >= 21 and d.domain == "" and d.flip(0.3):
        d.attrs["block_size"] = d.rng.choice((2, 4))
        blocked = [
            -(-size // d.attrs["block_size"]) if dim == axis % rank else size for dim, size in enumerate(base.shape)
        ]
        own = base.axis if base.axis != axis % rank else None
        scale = Operand(
            tuple(blocked), own, np.abs(d.numbers.standard_normal(blocked)).astype(np.float32) + np.float32(0.1)
        )
    zero = [Operand(scale.shape, scale.axis)] if d.flip() else []
    return [base, scale, *zero]


def _range(d: Draw) -> list[Operand | None]:
    start, step = d.rng.choice((0, 0, 2, -3)), d.rng.choice((1, 1, 2, -1))
    return [d.number(start), Operand((), -1), d.number(step)]


def _filled(d: Draw) -> list[Operand | None]:
    value = d.rng.choice((np.array([2], np.int64), np.array([np.nan], np.float32), np.array([True])))
    d.attrs["value"] = numpy_helper.from_array(value)
    return [Operand((d.rng.randint(1, 3),), -1)]


def _reversed(d: Draw) -> list[Operand | None]:
    """The lengths run along the batch, and may be those of the sequence."""
    base = d.base(2, 4)
    rows, batch = d.rng.sample((0, 1), 2)
    d.attrs |= {"time_axis": rows, "batch_axis": batch}
    lengths = [d.rng.randint(1, max(1, base.shape[rows])) for _ in range(base.shape[batch])]
    return [base, d.ints(*lengths)]


def _transpose(d: Draw) -> list[Operand | None]:
    base = d.base()
    if d.flip(0.8):
        perm = list(range(len(base.shape)))
        d.rng.shuffle(perm)
        d.attrs["perm"] = perm
    return [base]


def _units(d: Draw) -> list[Operand | None]:
    base = d.base(1, 3)
    rank = len(base.shape)
    if d.op == "Unsqueeze":
        axes = d.rng.sample(range(-rank - 1, rank + 1), d.rng.randint(1, 2))
    else:
        axes = [dim - rank * d.rng.randint(0, 1) for dim, size in enumerate(base.shape) if size == 1]
    if d.op == "Squeeze" and (d.flip(0.2) or (d.opset < 13 and not axes)):
        return [base]
    if d.op == "Squeeze" and d.flip(0.3):
        axes = []  # whatever is 1
    if d.opset >= 13:
        return [base, d.ints(*axes)]
    d.attrs |= {"axes": axes} if axes else {}
    return [base]


def _reshape(d: Draw) -> list[Operand | None]:
    base = d.base(2, 4)
    shape = list(base.shape)
    at = d.rng.randrange(len(shape) - 1)
    if d.flip():
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    else:
        found = [size for size in (2, 4, 5, d.length) if shape[at] and shape[at] % size == 0]
        if found:
            size = d.rng.choice(found)
            shape[at : at + 1] = [shape[at] // size, size]
    target = list(shape)
    if d.flip():
        target[d.rng.randrange(len(target))] = -1
    for dim in range(min(len(target), len(base.shape))):
        if target[dim] == base.shape[dim] and d.flip(0.3):
            target[dim] = 0
    if d.opset >= 14 and d.flip(0.1):
        d.attrs["allowzero"] = 1
    return [base, d.ints(*target)]


def _flatten(d: Draw) -> list[Operand | None]:
    base = d.base(1, 4)
    d.attrs["axis"] = d.rng.randint(-len(base.shape), len(base.shape))
    return [base]


def _expand(d: Draw) -> list[Operand | None]:
    base = d.base()
    small = d.like(base)
    if small.axis is None and d.flip():
        small = base
    target = [
        1 if d.flip(0.2) and small.shape[-1 - n :][:1] == (size,) else size for n, size in enumerate(base.shape[::-1])
    ]
    return [small, Operand((len(target),), None, np.array(target[::-1], np.int64), d.flip(0.7))]


def _tile(d: Draw) -> list[Operand | None]:
    base = d.base()
    return [base, d.ints(*(d.rng.choice((1, 1, 2)) for _ in base.shape))]


def _concat(d: Draw) -> list[Operand | None]:
    base = d.base()
    axis = d.attrs["axis"] = d.axis(len(base.shape))
    found: list[Operand | None] = [base]
    for _ in range(d.rng.randint(0, 2)):
        shape = list(base.shape)
        shape[axis] = d.size()
        own = base.axis if base.axis is not None and shape[base.axis] == d.length else None
        found.append(Operand(tuple(shape), own))
    return found


def _split(d: Draw) -> list[Operand | None]:
    base = d.base()
    axis = d.attrs["axis"] = d.axis(len(base.shape))
    size = base.shape[axis]
    first = d.rng.randint(0, size)
    if d.opset >= 13 and d.flip(0.7):
        return [base, d.ints(first, size - first)]
    if d.opset >= 18:
        d.attrs["num_outputs"] = 2
    elif d.opset < 13:
        d.attrs["split"] = [first, size - first]
    return [base]


def _slice(d: Draw) -> list[Operand | None]:
    base = d.base()
    rank = len(base.shape)
    count = d.rng.choice((1, 1, 1, 2)) if rank > 1 else 1
    axes = d.rng.sample(range(rank), count)
    begins = [d.rng.choice((0, 1, -1, -2)) for _ in axes]
    ends = [d.rng.choice((1, -1, 99, 1 << 40)) for _ in axes]
    steps = [d.rng.choice((1, 1, 1, 2)) for _ in axes]
    if d.flip(0.1):
        begins, ends, steps = [-1] * count, [-99] * count, [-1] * count
    return [
        base,
        d.ints(*begins),
        d.ints(*ends),
        d.ints(*axes),
        *([d.ints(*steps)] if d.flip() or steps[0] < 0 else []),
    ]


def _pad(d: Draw) -> list[Operand | None]:
    base = d.base()
    rank = len(base.shape)
    pads = [d.rng.choice((0, 0, 1, -1)) for _ in range(2 * rank)]
    if base.axis is not None and d.flip(0.8):
        pads[base.axis] = pads[rank + base.axis] = 0
    d.attrs["mode"] = d.rng.choice(("constant", "constant", "reflect", "edge"))
    value = [d.number(2, d.kind(0))] if d.flip() else []
    return [base, d.ints(*pads), *value]


def _biased(d: Draw) -> list[Operand | None]:
    base = d.base(2, 3)
    own = 0 if base.axis == len(base.shape) - 1 else None
    return [base, *([Operand(base.shape[-1:], own)] if d.op == "BiasGelu" or d.flip() else [])]


def _rotary(d: Draw) -> list[Operand | None]:
    """Heads side by side or before the tokens, and a position of each token, or of the first one, or none."""
    batch, heads, size = d.rng.choice((1, 2, 3)), d.rng.choice((1, 2, 3)), d.rng.choice((4, 8))
    tokens, rows = 1, d.length + 3
    shape: tuple[int, ...] = (batch, d.length, heads * size)
    if d.flip():
        tokens, shape = 2, (batch, heads, d.length, size)
    d.attrs["interleaved"] = d.rng.randint(0, 1)
    x, table = Operand(shape, tokens), Operand((rows, size // 2))
    positions = Operand((batch, d.length), 1, d.numbers.integers(0, rows, (batch, d.length)))
    if d.domain == CONTRIB:
        return [x, positions if d.flip(0.8) else d.ints(2), table, table]
    d.attrs |= {"num_heads": heads} if tokens == 1 else {}
    own = Operand((batch, d.length, size // 2), 1)
    return [x, table, table, positions] if d.flip() else [x, own, own]


REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
FORMS: dict[str, WHOLE] = {
    "Dropout": _dropout,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"), _along),
    "CumSum": _cumsum,
    "TopK": _topk,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _norm),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _pooled),
    **dict.fromkeys((*(f"Reduce{each}" for each in REDUCTIONS), "ArgMax", "ArgMin"), _reduced),
    **dict.fromkeys(("MatMul", "MatMulInteger", "FusedMatMul"), _matmul),
    "MatMulNBits": _packed,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "OneHot": _one_hot,
    "Conv": _conv,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantisation),
    "Range": _range,
    "ConstantOfShape": _filled,
    "Transpose": _transpose,
    "ReverseSequence": _reversed,
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _units),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    **dict.fromkeys(("BiasGelu", "FastGelu"), _biased),
    "RotaryEmbedding": _rotary,
}
"""The shapes that an operator takes. One that is not listed takes operands that are broadcast to each other."""


@dataclass
class Case:
    """A model of one operator, with the inputs and the dimensions of the sequence."""

    model: onnx.ModelProto
    feeds: dict[str, Array]
    axes: dict[str, int]
    length: int
    detail: str


def drawn(rng: random.Random) -> Case | None:
    """A model of one operator; None where the operator is not in the drawn opset."""
    d = Draw(rng, rng.choice(OPERATORS if rng.random() < 0.7 else REDUCING))
    if d.schema is None:
        return None
    operands = d.operands()
    return _Builder(d, named=d.flip(0.7)).case(operands)


class _Builder:
    """Makes the model of drawn operands."""

    def __init__(self, d: Draw, named: bool) -> None:
        self.d, self.named = d, named
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, Array] = {}
        self.axes: dict[str, int] = {}
        self.words: list[str] = []

    def case(self, operands: Sequence[Operand | None]) -> Case:
        """The model."""
        d = self.d
        names = [self.operand(index, each) for index, each in enumerate(operands)]
        assert d.schema is not None
        count = 2 if d.op == "Split" else d.rng.randint(1, d.schema.outputs) if d.flip(0.3) else 1
        outputs = [f"y{number}" for number in range(count)]
        self.nodes.append(helper.make_node(d.op, names, outputs, "node", domain=d.domain, **d.attrs))
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "rule", self.inputs, results, self.weights)
        opsets = [helper.make_opsetid("", d.opset), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        told = {
            name: each.value if hasattr(each, "value") else each for name, each in d.attrs.items() if name != "value"
        }
        detail = f"{d.domain or 'ai.onnx'} {d.op} {d.opset}: {' '.join(self.words)} {told}, {d.length} tokens"
        return Case(model, self.feeds, self.axes, d.length, detail)

    def operand(self, index: int, operand: Operand | None) -> str:
        """The name of an input of the node."""
        if operand is None:
            return ""
        if operand.axis == -1:
            return self.computed(operand)
        d = self.d
        array = d.array(operand.shape, d.kind(index)) if operand.array is None else operand.array
        kind = d.kind(index)
        if array.dtype != kind and operand.array is not None and kind in (np.float32, np.float16, np.float64, np.int32):
            array = array.astype(kind)
        name = f"x{index}"
        self.words.append(f"{array.dtype}{list(array.shape)}{'' if operand.axis is None else '@' + str(operand.axis)}")
        fixed = operand.fixed or (d.flip(0.4) if operand.axis is None else d.flip(0.1) and not self.named and self.axes)
        if fixed:
            self.weights.append(numpy_helper.from_array(np.asarray(array), name))
            if operand.fixed or d.flip(0.8):
                return name
        default = bool(fixed)
        sizes: list[int | str] = [self.declared(name, dim, size, operand.axis) for dim, size in enumerate(array.shape)]
        self.inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), sizes))
        if default:
            self.words.append("(default)")
            if d.flip():
                self.feeds[name] = d.array(array.shape, array.dtype) if operand.array is None else array
            return name
        self.feeds[name] = array
        if operand.axis is not None:
            self.axes[name] = operand.axis
        return self.merged(name, array, operand) if d.flip(0.1) and operand.axis is not None else name

    def declared(self, name: str, dim: int, size: int, axis: int | None) -> int | str:
        """The size of an input's dimension as the model declares it."""
        if dim == axis:
            return "seq" if self.named else size
        return f"{name}_{dim}" if self.d.flip(0.2) else size

    def merged(self, name: str, array: Array, operand: Operand) -> str:
        """An input whose dimension of the sequence is merged with its neighbour."""
        if array.ndim < 2:
            return name
        assert operand.axis is not None
        first = max(0, operand.axis - self.d.rng.randint(0, 1))
        first = min(first, array.ndim - 2)
        target = [*array.shape[:first], -1, *array.shape[first + 2 :]]
        self.weights.append(numpy_helper.from_array(np.array(target, np.int64), f"{name}_merged"))
        self.nodes.append(helper.make_node("Reshape", [name, f"{name}_merged"], [f"{name}_m"], f"{name}_reshape"))
        self.words.append("(merged)")
        return f"{name}_m"

    def computed(self, operand: Operand) -> str:
        """A size that is that of the sequence of a further input: the limit of a Range, or the sizes of a tensor."""
        d = self.d
        x = np.zeros((2, d.length), np.float32)
        self.feeds["x"], self.axes["x"] = x, 1
        self.inputs.append(
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, "seq" if self.named else d.length])
        )
        for name, content in (("one", np.array([1])), ("zero", np.array([0]))):
            self.weights.append(numpy_helper.from_array(content, name))
        self.nodes.append(helper.make_node("Shape", ["x"], ["sizes"], "sizes"))
        self.nodes.append(helper.make_node("Gather", ["sizes", "one"], ["count"], "count"))
        if not operand.shape:
            self.weights.append(numpy_helper.from_array(np.zeros(0, np.int64), "none"))
            self.nodes.append(helper.make_node("Reshape", ["count", "none"], ["limit"], "limit"))
            return "limit"
        sizes = [
            "count" if each == 0 else "zero" if each == 2 else "one"
            for each in d.rng.sample(range(3), operand.shape[0])
        ]
        self.nodes.append(helper.make_node("Concat", sizes, ["target"], "target", axis=0))
        self.words.append("+".join(sizes))
        return "target"
