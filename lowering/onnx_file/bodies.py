"""The bodies of fused nodes: ONNX functions that compute what FlashAttentionScore computes, in
standard operators.

A file with bodies is complete: ONNX Runtime without the custom-op library and every other tool runs
the body, which is slower and needs memory for all scores. ONNX Runtime with the library takes the
kernel and never looks at the body.

A body is made for

    layouts    BSH, SBH, BSND, BNSD, with constant head counts and head sizes
    inputs     query, key, value, query_rope and key_rope, real_shift of rank 4 (pse_type 0 and 1),
               atten_mask, sink, actual_seq_kvlen of one number
    modes      sparse_mode 0 to 4
    attributes those of the prototype without dropout, and the extensions cpu_empty_rows,
               cpu_nan_rows, cpu_mask_value, cpu_masked_bias, cpu_masked_values, cpu_mask_batch
               (with masks of rank 4) and cpu_softcap
    results    attention_out

Every other node has no body, and its file needs the library. The arithmetic is float32, as in the
kernel. In opset 15 and later the result has the type of query (CastLike), so that a tool may
convert the file to float16. In opset 13 and 14, which have no CastLike, the type is fixed.

Values of keys that a row does not read need not be finite: a matrix product would make NaN of 0 *
inf. A row reads the keys that it attends, and masked ones to which cpu_mask_value leaves a weight.
So the products are computed with 0 in place of such values, and the effect of those that are read
is added.

Where all numbers are finite, none of this is needed: it is enough to compute what models compute,
with a number that is added to the scores at masked keys. This is as fast as the model was. If the
numbers of every run are proven to be finite and not huge (magnitudes.py), the body has nothing
else. Other bodies compute this first and look at the result. Only where that is not finite, a
branch computes it anew. What is left of a mask has the size of the mask, not of the scores, and
depends on nothing else if it can, so that ONNX Runtime computes it once for all layers:

    cpu_empty_rows   added at masked keys             a row without keys
    ---------------  -------------------------------  ----------------------------------------------------------
    "mean"           -inf, but the lowest float32 in  has the same score everywhere. Its query is replaced by 0,
                     rows without keys                unless its scores are known to be lost in the number
    "unmasked"       -inf, but 0 in rows without      is as if no mask was there
    "nan"            -inf                             is NaN
    "", "zero"       -inf                             is NaN in the softmax, and its result is replaced by 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.lowering.onnx_file.magnitudes import TAME
from fa_compiler.lowering.onnx_file.writer import CAST_LIKE, FunctionWriter, declared
from fa_compiler.op_registry import (
    FILE_DOMAIN,
    FILE_OP,
    GRAPH_OP,
    NodeView,
    TensorInfo,
    full_attrs,
    get,
)
from fa_compiler.op_registry.geometry import (
    BATCH_AXIS,
    FOLDED,
    LAYOUTS,
    SEQUENCE_AXIS,
    UNLIMITED,
    divide,
    measure,
    shape_of,
)
from fa_compiler.op_registry.node import Dim

OLDEST_OPSET = 13
"""ReduceSum and Unsqueeze take their axes as inputs from this opset on."""
ALLOWS_ZERO = 14
"""The first opset in which a Reshape makes sizes of 0, and takes none for a copy of another
size."""
TRILU = 14
"""The first opset with Trilu."""
SHAPE_OF_AXES = 15
"""The first opset in which Shape gives the sizes of some axes."""

_INPUTS = {
    "query",
    "key",
    "value",
    "real_shift",
    "atten_mask",
    "query_rope",
    "key_rope",
    "sink",
    "actual_seq_kvlen",
}
_UNREAD = {
    "scale_value",
    "keep_prob",
    "inner_precise",
    "seed",
    "offset",
    "out_dtype",
    "softmax_out_layout",
}
"""The attributes on which a body does not depend: the scale, which it takes from its node, and
those that do not change the result of a call that has a body."""
_TYPES = {
    "DT_FLOAT": TensorProto.FLOAT,
    "DT_FLOAT16": TensorProto.FLOAT16,
    "DT_BF16": TensorProto.BFLOAT16,
}
_TO_BSND = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "BSH": (0, 1, 2, 3), "SBH": (1, 0, 2, 3)}
_FROM_BNSD = {"BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}
_AT_TOP_LEFT = (0, 1, 2)
"""The values of sparse_mode whose bands begin at the first row and the first key."""
_COMPRESSED = 2048
_RANK = 4
"""The axes of scores."""
_FAR = 1 << 30
"""Farther away than any two tokens are."""


@dataclass(frozen=True)
class _Known:
    """What is known of sizes and numbers, as far as it changes a body."""

    one_batch: bool = False
    """Query, key and value have one batch, and it is not known whether mask and bias fit it."""
    fits: bool = False
    """Query, key and value have one batch, and mask and bias have no more batches and rows than
    these."""
    mask_has_lengths: bool = False
    """The last size of the mask is the number of keys and that of rows. It is told only where a
    band needs both."""
    bias_is_full: bool = False
    """The bias is not scaled, and as large as the scores of one sequence. The mask beside it is one
    of keys."""
    values_fit: bool = False
    """Key and value have one batch, though query may have another one."""
    rows_have_keys: bool = False
    """Each row reads a key, if there is one: a band hides keys behind the row only, and there are
    enough of them."""
    is_triangle: bool = False
    """And the band is a triangle whose first row is at the top left. Nothing else is masked."""
    is_tame: bool = False
    """All operands are finite in every run, and all scores below `TAME` (magnitudes.py)."""
    is_dequantised: bool = False
    """A DequantizeLinear makes an operand, but for operators that move elements."""


@dataclass(frozen=True)
class _Call:
    """What a body depends on, beside the attribute scale_value, which it takes from its node."""

    layout: str
    opset: int
    dtype: int
    heads: tuple[int, int]
    widths: dict[str, int]
    inputs: tuple[str, ...]
    attrs: dict[str, int | float | str]
    given: tuple[str, ...]
    """The attributes that the node has."""
    mask_excludes: bool
    """Whether the content of atten_mask counts. That of a compressed mask does not."""
    known: _Known

    @property
    def query_width(self) -> int:
        """D of query, its rope part included."""
        return self.widths["query"] + self.widths.get("query_rope", 0)


Lengths = Callable[[], tuple[str, str]]
"""Gives the numbers of rows and keys as int32 scalars, where a mask needs them."""


@dataclass(frozen=True)
class BodyKey:
    """What decides the body of a node: nodes with equal keys have equal bodies."""

    text: str
    call: _Call = field(compare=False, repr=False)

    @staticmethod
    def of(call: _Call) -> BodyKey:
        """The key of a call."""
        return BodyKey(repr(call), call)

    def for_any_call(self) -> BodyKey:
        """The key of the body that knows nothing of sizes and numbers, so that more nodes have it
        in common."""
        return BodyKey.of(
            replace(self.call, known=_Known(is_dequantised=self.call.known.is_dequantised))
        )


def body_key(
    view: NodeView, opset: int, is_tame: bool = False, is_dequantised: bool = False
) -> BodyKey | None:
    """What the body of a FlashAttentionScore depends on that only gives attention_out; None if it
    has no body. Raises NodeError for attributes that the operator does not have.

    `opset` is that of the model. `is_tame` says that all operands are finite in every run, with
    scores below `TAME`, and `is_dequantised` that a DequantizeLinear makes one of them.
    """
    call = _call_of(view, opset)
    if call is None:
        return None
    return BodyKey.of(
        replace(call, known=replace(call.known, is_tame=is_tame, is_dequantised=is_dequantised))
    )


def body_of(key: BodyKey, name: str = FILE_OP) -> onnx.FunctionProto:
    """The body, as a function of this name. It has the inputs of the prototype up to the last one
    of the node."""
    call = key.call
    writer = _Writer(call=call)
    writer.write()
    return writer.function(
        GRAPH_OP,
        call.opset,
        sorted(call.given),
        ["attention_out"],
        call.inputs,
        (FILE_DOMAIN, name),
    )


def _call_of(view: NodeView, opset: int) -> _Call | None:
    tensors = {
        name: tensor for name, tensor in view.inputs.items() if isinstance(tensor, TensorInfo)
    }
    attrs = full_attrs(get(GRAPH_OP), view.attrs)
    layout, dtype = str(attrs["input_layout"]), _TYPES.get(tensors["query"].dtype)
    if (
        opset < OLDEST_OPSET
        or dtype is None
        or layout not in BATCH_AXIS
        or not _INPUTS.issuperset(view.inputs)
    ):
        return None
    if not _has_written_attributes(attrs) or not _has_written_shapes(tensors, attrs):
        return None
    sizes = _sizes(tensors, layout, int(attrs["head_num"]))
    if sizes is None:
        return None
    heads, widths = sizes
    read = {name: value for name, value in attrs.items() if name not in _UNREAD}
    inputs = tuple(name for name in get(GRAPH_OP).input_names if name in tensors)
    given, excludes = tuple(sorted(view.attrs)), _mask_excludes(tensors, attrs)
    known = _known_sizes(tensors, layout, attrs)
    return _Call(layout, opset, dtype, heads, widths, inputs, read, given, excludes, known)


def _bounds(attrs: Mapping[str, Any]) -> tuple[int, int]:
    """How far a row sees to the front and to the back, beside the content of a mask."""
    if attrs["sparse_mode"] == 1:
        return UNLIMITED, UNLIMITED
    if attrs["sparse_mode"] in (2, 3):
        return UNLIMITED, 0
    return int(attrs["pre_tockens"]), int(attrs["next_tockens"])


def _known_sizes(
    tensors: Mapping[str, TensorInfo], layout: str, attrs: Mapping[str, Any]
) -> _Known:
    """What is known of the sizes of operands and mask, as far as it changes the body."""
    if not {"real_shift", "atten_mask"} & tensors.keys():
        return _Known()
    beside = _shapes_beside(tensors, attrs)
    batches = [_size_of(tensors[name], layout, BATCH_AXIS) for name in ("query", "key", "value")]
    rows, keys = (_size_of(tensors[name], layout, SEQUENCE_AXIS) for name in ("query", "key"))
    fits = _are_one(batches) and all(_fits(shape, batches[0], rows) for shape in beside.values())
    has_lengths = "atten_mask" in beside and _are_one([beside["atten_mask"][-1], rows, keys])
    counts = "actual_seq_kvlen" not in tensors and _bounds(attrs) != (UNLIMITED, UNLIMITED)
    is_full = fits and attrs["pse_type"] == 0 and _is_full(beside, rows)
    has_keys, is_triangle = _of_band(tensors, attrs, rows, keys)
    one_batch, values_fit = _are_one(batches), _are_one(batches[1:])
    return _Known(
        one_batch=one_batch and not fits,
        fits=fits,
        mask_has_lengths=has_lengths and counts,
        bias_is_full=is_full,
        values_fit=values_fit and not one_batch,
        rows_have_keys=has_keys,
        is_triangle=is_triangle,
    )


def _of_band(
    tensors: Mapping[str, TensorInfo], attrs: Mapping[str, Any], rows: Dim, keys: Dim
) -> tuple[bool, bool]:
    """Whether a band is all that masks and leaves each row a key, and whether it then begins at the
    top left. It leaves a key to each row if it begins there, or if there are no more rows than
    keys."""
    before, after = _bounds(attrs)
    if _mask_excludes(tensors, attrs) or before < UNLIMITED or not 0 <= after < UNLIMITED:
        return False, False
    if attrs["sparse_mode"] in _AT_TOP_LEFT:
        return True, True
    are_one = _are_one([rows, keys]) and "actual_seq_kvlen" not in tensors
    fit = (
        isinstance(rows, int)
        and isinstance(keys, int)
        and rows <= keys
        and "actual_seq_kvlen" not in tensors
    )
    return are_one or fit, are_one


def _shapes_beside(
    tensors: Mapping[str, TensorInfo], attrs: Mapping[str, Any]
) -> dict[str, tuple[Dim, ...]]:
    """The shapes of the bias, and of a mask whose content counts."""
    names = ("real_shift", "atten_mask") if _mask_excludes(tensors, attrs) else ("real_shift",)
    return {name: tensors[name].shape or () for name in names if name in tensors}


def _is_full(beside: Mapping[str, tuple[Dim, ...]], rows: Dim) -> bool:
    """Whether a bias has numbers for each head and row, beside a mask of keys."""
    if not {"real_shift", "atten_mask"} <= beside.keys():
        return False
    _, heads, rows_of_bias, _ = beside["real_shift"]
    return beside["atten_mask"][-2] == 1 and heads != 1 and _are_one([rows, rows_of_bias])


def _fits(shape: tuple[Dim, ...], batch: Dim, rows: Dim) -> bool:
    """Whether a mask or bias is known to have no more batches and rows than these."""
    batches = shape[0] if len(shape) == _RANK else 1
    return all(
        size == 1 or _are_one([size, wanted])
        for size, wanted in ((batches, batch), (shape[-2], rows))
    )


def _size_of(tensor: TensorInfo, layout: str, axes: Mapping[str, int]) -> Dim:
    return shape_of(tensor, LAYOUTS[layout])[axes[layout]]


def _are_one(sizes: Sequence[Dim]) -> bool:
    """Whether sizes are known to be equal."""
    return sizes[0] is not None and len(set(sizes)) == 1


def _has_written_attributes(attrs: Mapping[str, Any]) -> bool:
    """Whether a body is written for calls with these attributes: without dropout, slopes and the
    modes of prefixes and packed sequences."""
    return (
        attrs["keep_prob"] == 1.0
        and attrs["pse_type"] in (0, 1)
        and attrs["sparse_mode"] in range(5)
    )


def _has_written_shapes(tensors: Mapping[str, TensorInfo], attrs: Mapping[str, Any]) -> bool:
    """Whether a body is written for the ranks of bias, mask and key length, and for the size of a
    compressed mask."""
    bias, mask, length = (
        tensors.get(name) for name in ("real_shift", "atten_mask", "actual_seq_kvlen")
    )
    if bias is not None and (bias.shape is None or len(bias.shape) != 4):
        return False
    if length is not None and length.shape != (1,):
        return False
    if mask is None:
        return True
    if mask.shape is None or len(mask.shape) not in (2, 4):
        return False
    is_compressed = mask.shape[-2:] == (_COMPRESSED, _COMPRESSED)
    if not _mask_excludes(tensors, attrs) and not is_compressed and not _hides_nothing(mask):
        return False
    return len(mask.shape) == 4 or attrs.get("cpu_mask_batch") != "repeated"


def _mask_excludes(tensors: Mapping[str, TensorInfo], attrs: Mapping[str, Any]) -> bool:
    """Whether the content of atten_mask counts: it does in the modes 0 and 1, and for a mask of
    keys beside a band."""
    if "atten_mask" not in tensors or _hides_nothing(tensors["atten_mask"]):
        return False
    shape = tensors["atten_mask"].shape or ()
    beside_band = len(shape) == 4 and shape[2] == 1
    return attrs["sparse_mode"] in (0, 1) or beside_band


def _hides_nothing(mask: TensorInfo) -> bool:
    """Whether a mask is one number, which says that all keys are read."""
    return mask.value is not None and mask.value.size == 1 and not mask.value.any()


def _sizes(
    tensors: dict[str, TensorInfo], layout: str, n1: int
) -> tuple[tuple[int, int], dict[str, int]] | None:
    """(N1, N2) and the head size of each tensor; None if one is unknown before the model runs."""
    n2 = measure(layout, n1, tensors["query"], tensors["key"], tensors["value"]).n2
    if n1 <= 0 or not isinstance(n2, int) or n2 <= 0 or n1 % n2:
        return None
    widths: dict[str, int] = {}
    for name in ("query", "key", "value", "query_rope", "key_rope"):
        if name not in tensors:
            continue
        last, heads = (
            shape_of(tensors[name], LAYOUTS[layout])[-1],
            n1 if name.startswith("query") else n2,
        )
        width = divide(last, heads) if layout in FOLDED else last
        if not isinstance(width, int) or width <= 0:
            return None
        widths[name] = width
    return (n1, n2), widths


@dataclass(frozen=True)
class _Band:
    """A band: the number of keys, and the first and the last key that each row reads, "" without
    this bound. `allowed` are conditions on rows and keys."""

    length: str = ""
    first: str = ""
    last: str = ""
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Allowed:
    """The value that is true where a row reads a key. The `band` tells which rows read none;
    without it their keys have to be counted."""

    keys: str
    band: _Band | None = None


@dataclass(frozen=True)
class _Operands:
    """query [B,N1,S1,D], key [B,N1,S2,D] and value [B,N1,S2,Dv] with their rope parts, the scale,
    and bias and sink if there are any; all in float32."""

    query: str
    key: str
    value: str
    scale: str
    bias: str | None = None
    sink: str | None = None


@dataclass(frozen=True)
class _Mask:
    """What is allowed, the number to add to each score, and, if cpu_empty_rows needs them, the rows
    without keys."""

    allowed: _Allowed
    added: str
    empty: str


@dataclass
class _Writer(FunctionWriter):
    """Writes the nodes of one body. The methods return the names of values."""

    call: _Call = field(kw_only=True)
    operands: _Operands = field(init=False)
    """What the nodes behind the conversion to float32 read; a branch reads those of the writer that
    made it."""

    def write(self) -> None:
        self.operands = self._operands()
        if not self._may_be_plain():
            out = self.general(None)
        elif self.call.known.is_tame:
            out = self.plain(self._shared_mask())
        else:
            out = self._plain_if_finite()
        if {"real_shift", "atten_mask"} & set(self.call.inputs):
            out = self._of_operands(out)
        self._arrange(out)

    def _plain_if_finite(self) -> str:
        """The result [B,N1,S1,Dv] as `plain` computes it, if it is finite, or else as `general`
        does.

        A finite result is right. Each row has a product with each value, so all values are finite;
        a row that has keys has finite scores at these, or -inf, and -inf at the others. What
        `plain` makes of a row without keys does not depend on its scores, but for the rule "mean":
        there its query is replaced by 0, and a bias has to be small.
        """
        rule, nothing = self.call.attrs.get("cpu_empty_rows", ""), self.number(0.0)
        mask = self._shared_mask()
        if mask is None and not self._is_triangle():
            mask = self._mask(self._lengths_of_operands, self._batch_of_operands())
        empty = "" if mask is None else mask.empty
        if has_means := bool(empty) and rule == "mean":
            factor = self.op("Where", empty, nothing, self.number(1.0))
            self.operands = replace(
                self.operands, query=self.op("Mul", self.operands.query, factor)
            )
        held = self._held(
            *(("key", "value", "bias") if has_means else ("query", "key", "value", "bias"))
        )
        if self.operands.sink is not None:
            self.operands = replace(
                self.operands, sink=self.op("Min", self.operands.sink, self.number(math.inf))
            )
        out = self.plain(mask)
        rows = self.op("Where", empty, nothing, out) if empty and rule == "nan" else out
        squares, bound = self.op("ReduceSumSquare", rows, keepdims=0), self.number(math.inf)
        if has_means and self.operands.bias is not None:
            squares = self.op(
                "Add", squares, self.op("ReduceSumSquare", self.operands.bias, keepdims=0)
            )
            divisor = self.op("Add", self.op("Abs", self.operands.scale), self.number(1.0))
            bound = self.op("Div", self.number(TAME), divisor)
        general = self._branch(held)
        return self._unless(self.op("Less", squares, bound), out, general, general.general(mask))

    def _unless(self, is_right: str, out: str, branch: _Writer, other: str) -> str:
        """`out` if it is right, or else what a branch computes."""
        then = _graph("as_models_do", [helper.make_node("Identity", [out], ["finite"])], "finite")
        return self.op(
            "If", is_right, then_branch=then, else_branch=_graph("any_numbers", branch.nodes, other)
        )

    def _held(self, *names: str) -> dict[str, tuple[str, str]]:
        """Those of the operands that a branch may not read, because ONNX Runtime might move a
        DequantizeLinear forwards to them: its QDQPropagation (1.20 to 1.32) ends the process where
        a branch reads the result. It does not look through a Flatten, which costs nothing. They are
        held as a matrix and their shape."""
        call, (n1, n2) = self.call, self.call.heads
        is_cast, is_repeated = call.dtype != TensorProto.FLOAT, n2 not in (1, n1)
        computed = {
            "query": is_cast or "query_rope" in call.inputs,
            "key": is_cast or is_repeated or "key_rope" in call.inputs,
            "value": is_cast or is_repeated,
            "bias": self.operands.bias is None,
        }
        held = {name: getattr(self.operands, name) for name in names if not computed[name]}
        return {
            name: (self.op("Flatten", value, axis=3), self.op("Shape", value))
            for name, value in held.items()
        }

    def general(self, mask: _Mask | None) -> str:
        """The result [B,N1,S1,Dv] for operands of any numbers. `mask` is what is known of it
        already."""
        product = self._product()
        batch, bias = self._batch_and_bias(product)
        scores = self._scores(product, bias)
        first = self.call.attrs["pse_type"] == 1
        scaled_bias = (
            self.op("Mul", bias, self.operands.scale) if bias is not None and first else bias
        )
        allowed = (
            self._allowed(partial(self._lengths, scores), batch) if mask is None else mask.allowed
        )
        return self._attend(scores, scaled_bias, allowed)

    def plain(self, mask: _Mask | None) -> str:
        """The result [B,N1,S1,Dv] as models compute it. `mask` is what is known of it already."""
        product = self._product()
        batch, bias = self._batch_and_bias(product)
        is_one = mask is not None and bias is not None and self.call.known.bias_is_full
        scores = self._scores(product, None if is_one else bias)
        if self._is_triangle():
            return self._product_of_values(self.op("Add", scores, self._triangle(scores)))
        mask = mask or self._mask(partial(self._lengths, scores), batch)
        if mask is not None:
            added = self.op("Add", bias, mask.added) if is_one and bias is not None else mask.added
            scores = self.op("Add", scores, added)
        out = self._product_of_values(scores)
        rule = self.call.attrs.get("cpu_empty_rows", "")
        if mask is not None and mask.empty and rule in ("", "zero"):
            out = self.op("Where", mask.empty, self.number(0.0), out)
        return out

    def _product_of_values(self, scores: str) -> str:
        return self.op("MatMul", self._without_sink(self._shares(scores)), self.operands.value)

    def _is_triangle(self) -> bool:
        return self.call.known.is_triangle and self.call.opset >= TRILU

    def _triangle(self, scores: str) -> str:
        """-inf above the diagonal of a band, and 0 elsewhere."""
        infinite = numpy_helper.from_array(np.array([-math.inf], np.float32))
        filled = self.op("ConstantOfShape", self._axes(scores, 2, _RANK), value=infinite)
        _, after = _bounds(self.call.attrs)
        return self.op("Trilu", filled, self.scalar(after + 1), upper=1)

    def _product(self) -> str:
        """The products of query and key. TransposeOptimizer of ONNX Runtime joins transposed keys
        with a Transpose in front of rotary positions, which makes new ones for query; it does not
        look through a Reshape, which costs nothing."""
        key = self.operands.key
        if self.call.layout == "BNSD":
            key = self.op("Reshape", key, self.ints(0, 0, 0, 0))
        return self.op("MatMul", self.operands.query, self.op("Transpose", key, perm=[0, 1, 3, 2]))

    def _batch_and_bias(self, product: str) -> tuple[str | None, str | None]:
        """The batch size, if mask and bias are repeated to it, and the bias in this size."""
        bias = self.operands.bias
        if self.call.attrs.get("cpu_mask_batch") != "repeated":
            return None, bias
        batch = self._batch(product, self.operands.value)
        return batch, None if bias is None else self._repeated(bias, batch)

    def _scores(self, product: str, bias: str | None) -> str:
        """The scores of a product of query and key."""
        first = self.call.attrs["pse_type"] == 1
        if bias is not None and first:
            product = self.op("Add", product, bias)
        scores = self._capped(self.op("Mul", product, self.operands.scale))
        return self.op("Add", scores, bias) if bias is not None and not first else scores

    def _mask(self, lengths: Lengths, batch: str | None) -> _Mask | None:
        """What a mask adds to the scores; None if it excludes nothing."""
        rule, is_tame = self.call.attrs.get("cpu_empty_rows", ""), self.call.known.is_tame
        nothing, infinite = self.number(0.0), self.number(-math.inf)
        allowed = self._allowed(lengths, batch)
        if allowed is None:
            return None
        unread = self.call.known.rows_have_keys or (is_tame and rule in ("mean", "nan"))
        empty = "" if unread else self._empty(allowed)
        kept = self.op("Or", allowed.keys, empty) if empty and rule == "unmasked" else allowed.keys
        fill = infinite
        if rule == "mean" and not self.call.known.rows_have_keys:
            fill = self.number(float(np.finfo(np.float32).min))
        if rule == "mean" and empty:
            fill = self.op("Where", empty, fill, infinite)
        return _Mask(allowed, self.op("Where", kept, nothing, fill), empty)

    def _shared_mask(self) -> _Mask | None:
        """What the mask adds to the scores, if the mask alone says so: ONNX Runtime then sees that
        all layers compute the same. Else None."""
        call = self.call
        repeated = call.attrs.get("cpu_mask_batch") == "repeated"
        has_band = _bounds(call.attrs) != (UNLIMITED, UNLIMITED)
        if not call.mask_excludes or repeated or (has_band and not call.known.mask_has_lengths):
            return None
        return self._mask(self._lengths_of_mask, None)

    def _may_be_plain(self) -> bool:
        """Whether masked keys have no part in the result: no scores, and no share of what a sink
        leaves to empty rows."""
        attrs = self.call.attrs
        scored = (
            math.isfinite(float(attrs.get("cpu_mask_value", -math.inf)))
            or attrs.get("cpu_masked_bias") == "added"
        )
        empty_are_zero = attrs.get("cpu_empty_rows", "") in ("", "zero")
        return (
            "atten_mask" in self.call.inputs
            and not scored
            and ("sink" not in self.call.inputs or empty_are_zero)
        )

    def _branch(self, held: Mapping[str, tuple[str, str]]) -> _Writer:
        """The writer of a branch, whose names are no names of this one. Some of its operands are
        `held`."""
        branch = _Writer(call=self.call, offset=2000)
        branch.names = {stem: branch.offset + count for stem, count in self.names.items()}
        restored = {name: branch._restored(*parts) for name, parts in held.items()}
        branch.operands = replace(self.operands, **restored)
        return branch

    def _capped(self, scores: str) -> str:
        """The scores with their soft cap, if there is one."""
        softcap = float(self.call.attrs.get("cpu_softcap", 0.0))
        if not softcap:
            return scores
        cap = self.number(softcap)
        return self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)

    def _float(self, name: str) -> str:
        """An operand in float32. Behind a DequantizeLinear a Flatten comes first: ONNX Runtime
        would move the former behind what moves the elements here, and quantise them again, of which
        some types make an invalid model."""
        value = self.wide(name)
        if not self.call.known.is_dequantised:
            return value
        return self._restored(self.op("Flatten", value), self.op("Shape", name))

    def _restored(self, flat: str, shape: str) -> str:
        """A tensor that was flattened, in its shape."""
        zeros: dict[str, Any] = {"allowzero": 1} if self.call.opset >= ALLOWS_ZERO else {}
        return self.op("Reshape", flat, shape, **zeros)

    def _operands(self) -> _Operands:
        """The operands in float32."""
        n1, n2 = self.call.heads
        query = [
            self._arranged(name, n1, n1)
            for name in ("query", "query_rope")
            if name in self.call.inputs
        ]
        key = [
            self._arranged(name, n2, n1) for name in ("key", "key_rope") if name in self.call.inputs
        ]
        value = self._arranged("value", n2, n1)
        joined = [
            parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=3)
            for parts in (query, key)
        ]
        bias, sink = (
            self._float(name) if name in self.call.inputs else None
            for name in ("real_shift", "sink")
        )
        return _Operands(joined[0], joined[1], value, self.attribute("scale_value"), bias, sink)

    def _arranged(self, name: str, heads: int, repeated: int) -> str:
        """An operand as [B,N1,S,D] in float32, or [B,1,S,D] if all query heads share its only head.
        Several heads are repeated for the query heads that share them."""
        call, width = self.call, self.call.widths[name]
        value = self._float(name)
        if "actual_seq_kvlen" in call.inputs and not name.startswith("query"):
            axis = self.ints(SEQUENCE_AXIS[call.layout])
            value = self.op("Slice", value, self.ints(0), "actual_seq_kvlen", axis)
        if call.layout in ("BSH", "SBH"):
            value = self.op("Reshape", value, self.ints(0, 0, heads, width))
        if call.layout != "BNSD":
            perm = [_TO_BSND[call.layout][axis] for axis in (0, 2, 1, 3)]
            value = self.op("Transpose", value, perm=perm)
        if heads in (1, repeated):  # one head is read by all, as a product broadcasts
            return value
        return self.op(
            "Gather", value, self.ints(*np.repeat(range(heads), repeated // heads)), axis=1
        )

    def _batch(self, *operands: str) -> str:
        """The batch size [1] of what is computed of these operands."""
        return self.op("Max", *(self.size(name, 0) for name in operands))

    def _batch_of_operands(self) -> str | None:
        """The batch size, if the mask is repeated to it."""
        if self.call.attrs.get("cpu_mask_batch") != "repeated":
            return None
        return self._batch(self.operands.query, self.operands.key, self.operands.value)

    def _repeated(self, mask: str, batch: str) -> str:
        """A mask or bias [W,N1,S1,S2], repeated as often as W goes into the batch."""
        times = self.op("Div", batch, self.op("Max", self.size(mask, 0), self.ints(1)))
        return self.op("Tile", mask, self.op("Concat", times, self.ints(1, 1, 1), axis=0))

    def _attend(self, scores: str, bias: str | None, allowed: _Allowed | None) -> str:
        """The softmax of the scores, times the values."""
        attrs = self.call.attrs
        mask_value = float(np.float32(attrs.get("cpu_mask_value", -math.inf)))
        biased = attrs.get("cpu_masked_bias") == "added"
        if allowed is None:
            return self.op("MatMul", self._softmax(scores, None), self.operands.value)
        if not biased and not math.isfinite(mask_value):
            return self._attend_allowed(scores, allowed)
        fill = self.number(mask_value)
        if biased and bias is not None:
            fill = self.op("Add", fill, bias)
        return self._attend_scored(self.op("Where", allowed.keys, scores, fill), allowed.keys)

    def _attend_allowed(self, scores: str, allowed: _Allowed) -> str:
        """Excluded keys have no part in the softmax. cpu_empty_rows says what a row without keys
        is."""
        nothing, infinite = self.number(0.0), self.number(-math.inf)
        rule = self.call.attrs.get("cpu_empty_rows", "")
        empty = self._empty(allowed)
        kept = self.op("Or", allowed.keys, empty) if rule == "unmasked" else allowed.keys
        fill = self.op("Where", empty, nothing, infinite) if rule == "mean" else infinite
        weights = self._softmax(self.op("Where", kept, scores, fill), empty)
        if rule not in ("", "zero", "nan"):
            return self._weighted(weights, lambda writer: writer.op("Or", allowed.keys, empty))
        of_empty = self.number(math.nan) if rule == "nan" else nothing
        return self._weighted(self.op("Where", empty, of_empty, weights), lambda _: allowed.keys)

    def _empty(self, allowed: _Allowed) -> str:
        """The rows without keys, as far as they broadcast to the scores: their last axis is 1."""
        if allowed.band is not None:
            return self._empty_of_band(allowed.band)
        return self._none_of_row(allowed.keys)

    def _none_of_row(self, condition: str) -> str:
        """The rows in which a condition holds nowhere. Their last axis is 1."""
        count = self.op("ReduceSum", self.wide(condition), self.ints(-1), keepdims=1)
        return self.op("Equal", count, self.number(0.0))

    def _attend_scored(self, scores: str, allowed: str) -> str:
        """Excluded keys have a finite score. Their values count where their weight is no less than
        a normal float32, unless cpu_masked_values leaves them out."""
        weights = self._softmax(scores, None)
        if self.call.attrs.get("cpu_masked_values") == "zero":
            return self._weighted(
                self.op("Where", allowed, weights, self.number(0.0)), lambda _: allowed
            )
        least = float(np.finfo(np.float32).tiny)

        def read(writer: _Writer) -> str:
            return writer.op(
                "Or", allowed, writer.op("GreaterOrEqual", weights, writer.number(least))
            )

        return self._weighted(weights, read)

    def _softmax(self, scores: str, empty: str | None) -> str:
        """The softmax, with 0 for the rows that cpu_nan_rows names."""
        attrs, nothing = self.call.attrs, self.number(0.0)
        weights = self._shares(scores)
        if guard := attrs.get("cpu_nan_rows"):
            undefined = self.op("IsNaN", weights)
            if guard == "infinite":
                finite = self.op("Not", self.op("Equal", scores, self.number(-math.inf)))
                undefined = self.op("And", undefined, self._none_of_row(finite))
            if empty is not None:
                undefined = self.op("And", undefined, self.op("Not", empty))
            weights = self.op("Where", undefined, nothing, weights)
        return self._without_sink(weights)

    def _shares(self, scores: str) -> str:
        """The softmax of the scores, with a sink as one more column."""
        if self.operands.sink is not None:
            column = self.op("Reshape", self.operands.sink, self.ints(1, -1, 1, 1))
            front = self.op("Slice", self.op("Shape", scores), self.ints(0), self.ints(3))
            column = self.op("Expand", column, self.op("Concat", front, self.ints(1), axis=0))
            scores = self.op("Concat", scores, column, axis=3)
        return self.op("Softmax", scores, axis=-1)

    def _without_sink(self, weights: str) -> str:
        """The weights without the column of the sink."""
        if self.operands.sink is None:
            return weights
        return self.op("Slice", weights, self.ints(0), self.ints(-1), self.ints(3))

    def _joined(self, op_type: str, conditions: Sequence[str]) -> str:
        """And or Or of conditions, of which there is one at least."""
        joined = conditions[0]
        for condition in conditions[1:]:
            joined = self.op(op_type, joined, condition)
        return joined

    def _empty_of_band(self, band: _Band) -> str:
        """The rows whose band has no key."""
        zero, one = (self.scalar(number, np.int32) for number in (0, 1))
        empty = []
        if band.first:
            empty.append(self.op("GreaterOrEqual", band.first, band.length))
        if band.last:
            end = self.op("Sub", band.length, one)
            empty.append(self.op("Less", self.op("Min", band.last, end), zero))
        if band.first and band.last:
            empty.append(self.op("Less", band.last, band.first))
        return self._joined("Or", empty)

    def _lengths(self, scores: str) -> tuple[str, str]:
        """The numbers of rows and keys, from the scores."""
        shape = self.op("Shape", scores)
        return self._length(shape, 2), self._length(shape, 3)

    def _lengths_of_operands(self) -> tuple[str, str]:
        """The same from query and key."""
        rows, keys = (
            self._length(self.op("Shape", name), 2)
            for name in (self.operands.query, self.operands.key)
        )
        return rows, keys

    def _lengths_of_mask(self) -> tuple[str, str]:
        """The same from the mask, whose last size is both."""
        length = self._length(self.op("Shape", "atten_mask"), -1)
        return length, length

    def _length(self, shape: str, axis: int) -> str:
        """Positions are int32, which ONNX Runtime compares twice as fast as int64. No length comes
        near its limit."""
        return self.op("Cast", self.op("Gather", shape, self.scalar(axis)), to=TensorProto.INT32)

    def _allowed(self, lengths: Lengths, batch: str | None) -> _Allowed | None:
        """The allowed keys, as far as they broadcast to the scores; None without a mask. With
        `batch` the mask is repeated to this batch size."""
        call, mode = self.call, self.call.attrs["sparse_mode"]
        if "atten_mask" not in call.inputs:
            return None
        parts = []
        if call.mask_excludes:
            excluded = self.op("Cast", "atten_mask", to=TensorProto.BOOL)
            parts.append(
                self.op("Not", excluded if batch is None else self._repeated(excluded, batch))
            )
        band = self._band(lengths, int(mode))
        if not parts and not band.allowed:
            return None
        allowed = self._joined("And", [*parts, *band.allowed])
        return _Allowed(allowed, None if parts else band)

    def _band(self, lengths: Lengths, mode: int) -> _Band:
        """The bounds of key - row: -pre and next, or causal, from the top left (0, 2) or the bottom
        right (3, 4)."""
        before, after = _bounds(self.call.attrs)
        has_first, has_last = before < UNLIMITED, after < UNLIMITED
        if not has_first and not has_last:
            return _Band()
        rows, keys = lengths()
        zero, one = (self.scalar(number, np.int32) for number in (0, 1))
        row = self.op("Unsqueeze", self.op("Range", zero, rows, one), self.ints(1))
        if mode in (3, 4):
            row = self.op("Add", row, self.op("Sub", keys, rows))
        key = self.op("Range", zero, keys, one)
        first = self.op("Sub", row, self.scalar(_step(before), np.int32)) if has_first else ""
        last = self.op("Add", row, self.scalar(_step(after), np.int32)) if has_last else ""
        allowed = [self.op("GreaterOrEqual", key, first)] if has_first else []
        allowed += [self.op("LessOrEqual", key, last)] if has_last else []
        return _Band(keys, first, last, tuple(allowed))

    def _weighted(self, weights: str, read: Callable[[_Writer], str]) -> str:
        """weights @ value, where values that are not read need not be finite. `read` writes which
        are read."""
        if self.offset:  # a branch is for numbers that are not finite
            return self._weighted_any(weights, read(self))
        out = self.op("MatMul", weights, self.operands.value)
        if self.call.known.is_tame:
            return out
        is_finite = self.op(
            "Less", self.op("ReduceSumSquare", out, keepdims=0), self.number(math.inf)
        )
        branch = self._branch(self._held("value"))
        return self._unless(is_finite, out, branch, branch._weighted_any(weights, read(branch)))

    def _weighted_any(self, weights: str, read: str) -> str:
        """The same for any values: those that are not finite are 0 in the product, and add what
        they are where they are read."""
        nothing, value = self.number(0.0), self.operands.value
        lacking = self.op("Or", self.op("IsNaN", value), self.op("IsInf", value))
        total = self.op("MatMul", weights, self.op("Where", lacking, nothing, value))
        positive = self.op("And", self.op("Greater", weights, nothing), read)
        zero = self.op("And", self.op("Equal", weights, nothing), read)
        used, unused = self.wide(positive), self.wide(zero)

        def found(factor: str, kind: str) -> str:
            return self.op("Greater", self.op("MatMul", factor, self.wide(kind)), nothing)

        above = self.op("IsInf", value, detect_negative=0)
        below = self.op("IsInf", value, detect_positive=0)
        either = self.op("Add", used, unused)
        undefined = self.op(
            "Or", found(either, self.op("IsNaN", value)), found(unused, self.op("IsInf", value))
        )
        for where, term in (
            (found(used, above), math.inf),
            (found(used, below), -math.inf),
            (undefined, math.nan),
        ):
            total = self.op("Add", total, self.op("Where", where, self.number(term), nothing))
        return total

    def _of_operands(self, out: str) -> str:
        """The result, with the sizes that query, key and value give it.

        A mask or bias of more batches or rows than these is an error, as it is in the kernel: it
        does not repeat them.
        """
        if self.call.known.fits:
            return out
        operands, width = self.operands, self.call.widths["value"]
        if self.call.known.one_batch and self.call.query_width == width:
            return self.op("Reshape", out, self.op("Shape", operands.query))
        if self.call.known.one_batch:
            return self.op(
                "Reshape",
                out,
                self.op("Concat", self._axes(operands.query, 0, 3), self.ints(width), axis=0),
            )
        names = [
            operands.query,
            operands.key,
            *([] if self.call.known.values_fit else [operands.value]),
        ]
        sizes = [self.op("Max", *(self._axes(name, 0, 1) for name in names))]
        if self.call.query_width == width:
            sizes.append(self._axes(operands.query, 1, _RANK))
        else:
            sizes += [
                self.ints(self.call.heads[0]),
                self._axes(operands.query, 2, 3),
                self.ints(width),
            ]
        return self.op("Reshape", out, self.op("Concat", *sizes, axis=0))

    def _axes(self, name: str, start: int, end: int) -> str:
        """The sizes of some axes of a tensor, as a list."""
        if self.call.opset >= SHAPE_OF_AXES:
            return self.op("Shape", name, start=start, end=end)
        return self.op("Slice", self.op("Shape", name), self.ints(start), self.ints(end))

    def _arrange(self, out: str) -> None:
        call, n1 = self.call, self.call.heads[0]
        if call.layout != "BNSD":
            out = self.op("Transpose", out, perm=_FROM_BNSD[call.layout])
        if call.layout in ("BSH", "SBH"):
            out = self.op("Reshape", out, self.ints(0, 0, n1 * call.widths["value"]))
        if call.opset >= CAST_LIKE:
            self.op("CastLike", out, "query", out="attention_out")
        else:
            self.op("Cast", out, out="attention_out", to=call.dtype)


def _step(tokens: int) -> int:
    """The distance of a bound from the diagonal; a distance behind every key stays one."""
    return max(-_FAR, min(tokens, _FAR))


def _graph(name: str, nodes: Sequence[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [declared(output)])
