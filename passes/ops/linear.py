"""Products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import (
    Context,
    Fact,
    Shape,
    broadcast,
    fresh,
    rule,
    shape_of_rank,
    shape_rule,
)

CONTRIB = "com.microsoft"
NCHWC = "com.microsoft.nchwc"
"""ONNX Runtime's blocked layout, which it saves with all optimisations. A tensor in it keeps its
dimensions; only the number of channels is rounded up."""
PRODUCTS = ("MatMul", "Gemm", "Einsum")
"""Products of tensors that sum over an axis. Quantised ones, convolutions and those of other
domains have more operands, or attributes."""


def matmul_shape(left: Shape | None, right: Shape | None) -> Shape | None:
    """numpy.matmul's result: a 1-D operand is a row on the left and a column on the right."""
    if not left or not right:
        return None
    batch = broadcast(left[:-2], right[:-2])
    if batch is None:
        return None
    columns = right[-1:] if len(right) > 1 else ()
    return (*batch, *left[-2:-1], *columns)


@rule("MatMul")
def _matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(0) or ctx.dtype(1))


@rule("Gemm")
@rule("FusedGemm", domain=CONTRIB)
def _gemm(ctx: Context) -> Fact:
    return Fact(gemm_shape(ctx, 0, 1), ctx.dtype(0) or ctx.dtype(1))


def gemm_shape(ctx: Context, left_index: int, right_index: int) -> Shape:
    """The shape of a product of two matrices, each of which may be transposed."""
    left, right = (shape_of_rank(2, ctx.shape(index)) for index in (left_index, right_index))
    return left[bool(ctx.int_attr("transA", 0))], right[not ctx.int_attr("transB", 0)]


@rule("Einsum")
def _einsum(ctx: Context) -> Fact:
    equation = ctx.attr("equation")
    if not isinstance(equation, str):
        return Fact(None, ctx.dtype(0))
    operands, result = einsum_terms(equation)
    sizes = _einsum_sizes(ctx, operands)
    shape = None if sizes is None else sizes.of(result)
    return Fact(shape, ctx.dtype(0))


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """The terms of the operands and of the result. A result that is not written has the letters
    that occur once, in the order of the alphabet, behind an ellipsis if there is one."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        once = (letter for letter in sorted(set(letters)) if letters.count(letter) == 1)
        right = "..." * ("..." in left) + "".join(once)
    return left.split(","), right


@dataclass
class _EinsumSizes:
    """The sizes of the letters of an equation, and of its ellipsis; None where that is unknown."""

    letters: dict[str, Dim]
    ellipsis: Shape | None

    def of(self, term: str) -> Shape | None:
        """The shape of the result of this term."""
        before, dots, after = term.partition("...")
        middle = self.ellipsis if dots else ()
        if middle is None:
            return None
        first, last = (
            [self.letters.get(letter) or Dim.fresh() for letter in part] for part in (before, after)
        )
        return (*first, *middle, *last)


def _einsum_sizes(ctx: Context, terms: Sequence[str]) -> _EinsumSizes | None:
    """The sizes that the operands give; None where there are other operands than terms, or one has
    another rank than its term."""
    if len(terms) != len(ctx.facts):
        return None
    sizes = _EinsumSizes({}, ())
    for index, term in enumerate(terms):
        shape = ctx.shape(index)
        before, dots, after = term.partition("...")
        if shape is None:
            if dots:
                sizes.ellipsis = None
            continue
        hidden = len(shape) - len(before) - len(after)
        if hidden < 0 or (hidden > 0 and not dots):
            return None
        end = len(shape) - len(after)
        if dots:
            sizes.ellipsis = broadcast(sizes.ellipsis, shape[len(before) : end])
        for letter, dim in zip(before + after, (*shape[: len(before)], *shape[end:]), strict=True):
            sizes.letters[letter] = Dim.broadcast(sizes.letters.get(letter, 1), dim)
    return sizes


@rule("Conv", "MaxPool", "AveragePool", "LpPool")
@rule("Conv", "MaxPool", "AveragePool", domain=NCHWC)
def _window(ctx: Context) -> list[Fact]:
    weights_index = {"Conv": 1}.get(ctx.node.op_type)
    return [Fact(window_shape(ctx, weights_index), ctx.dtype(0))]


@rule("FusedConv", domain=CONTRIB)
def _fused_conv(ctx: Context) -> Fact:
    return Fact(window_shape(ctx, 1), ctx.dtype(0))


def window_shape(ctx: Context, weights_index: int | None) -> Shape | None:
    """The shape of a convolution with these weights, or of a pool, which has none."""
    shape = ctx.shape(0)
    if shape is None or len(shape) < 3:
        return None
    weights, channels, is_pool = None, shape[1], weights_index is None
    if weights_index is not None:
        weights = ctx.shape(weights_index)
        channels = weights[0] if weights else Dim.fresh()
    windows = _windows(ctx, weights, len(shape) - 2)
    if windows is None:
        return (shape[0], channels, *fresh(len(shape) - 2))
    lengths = (
        window.count(length, is_pool) for window, length in zip(windows, shape[2:], strict=True)
    )
    return (shape[0], channels, *lengths)


@dataclass(frozen=True)
class _Window:
    """The windows along one axis. `length` counts the gaps of a dilation; `same` pads as many
    elements as keep the length, but for the stride."""

    length: Dim
    stride: int
    before: int
    after: int
    same: bool
    rounds_up: bool

    def count(self, axis: Dim, is_pool: bool) -> Dim:
        """How many windows an axis of this length has."""
        if self.same:
            return Dim.ceildiv(axis, self.stride)
        reach = axis + self.before + self.after - self.length
        if self.rounds_up:
            # A last window that begins behind the axis counts in some versions only. A window of
            # this length never begins there. ONNX Runtime refuses negative results.
            whole = (self.length - self.stride - self.after).is_at_least(0)
            return Dim.ceildiv(reach, self.stride) + 1 if whole else Dim.fresh()
        if not is_pool or reach.is_at_least(0):
            return Dim.floordiv(reach, self.stride) + 1
        # A window may be longer than its axis in a pool. ONNX Runtime rounds the negative rest
        # toward zero.
        return Dim.max(Dim.truncdiv(reach, self.stride) + 1, 0)


def _windows(ctx: Context, weights: Shape | None, spatial: int) -> list[_Window] | None:
    """The windows along each axis; None where they are unknown, or where ONNX Runtime differs from
    ONNX."""
    kernel = _kernel(ctx, weights)
    strides = ctx.ints_attr("strides") or [1] * spatial
    dilations = ctx.ints_attr("dilations") or [1] * spatial
    pads = ctx.ints_attr("pads") or [0] * (2 * spatial)
    if (
        kernel is None
        or not len(kernel) == len(strides) == len(dilations) == len(pads) // 2 == spatial
    ):
        return None
    mode, rounds_up = ctx.attr("auto_pad") or "NOTSET", ctx.int_attr("ceil_mode", 0) != 0
    same = mode in ("SAME_UPPER", "SAME_LOWER")
    if rounds_up and mode not in ("NOTSET", "VALID"):
        return None
    if same and set(dilations) != {1}:
        # ONNX Runtime ignores the dilation when it pads, so it gives fewer elements than ONNX
        # defines.
        return None
    if mode != "NOTSET":
        pads = [0] * (2 * spatial)
    lengths = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    rows = zip(lengths, strides, pads[:spatial], pads[spatial:], strict=True)
    return [_Window(*row, same, rounds_up) for row in rows]


def _kernel(ctx: Context, weights: Shape | None) -> list[Dim] | None:
    """The sizes of a window without its dilation; None where they are unknown."""
    listed = ctx.ints_attr("kernel_shape")
    if listed is not None:
        return [Dim(item) for item in listed]
    if weights is None:
        return None
    return list(weights[2:])


@shape_rule("ConvTranspose")
def _conv_transpose(ctx: Context, shape: Shape) -> Shape | None:
    if len(shape) < 3:
        return None
    weights, channels = ctx.shape(1), Dim.fresh()
    if weights is not None and len(weights) > 1:
        channels = weights[1] * ctx.int_attr("group", 1)
    return shape[0], channels, *fresh(len(shape) - 2)


@shape_rule("Resize", "Upsample")
def _resize(ctx: Context, shape: Shape) -> Shape:
    sizes = ctx.dims(3)
    plain = ctx.attr("axes") is None and ctx.attr("keep_aspect_ratio_policy") in (None, "stretch")
    return (
        tuple(sizes)
        if sizes is not None and len(sizes) == len(shape) and plain
        else fresh(len(shape))
    )


@shape_rule("ReorderInput", domain=NCHWC, rank=4)
def _to_blocks(ctx: Context, shape: Shape) -> Shape:
    height, width = shape[1:3] if ctx.int_attr("channels_last", 0) else shape[2:]
    return shape[0], Dim.fresh(), height, width


@shape_rule("ReorderOutput", domain=NCHWC, rank=4)
def _from_blocks(ctx: Context, shape: Shape) -> Shape | None:
    channels = ctx.int_attr("channels", 0)
    if channels < 1:
        return None
    if ctx.int_attr("channels_last", 0):
        return shape[0], *shape[2:], Dim(channels)
    return shape[0], Dim(channels), *shape[2:]


@shape_rule("GridSample")
def _grid_sample(ctx: Context, shape: Shape) -> Shape:
    spatial = (ctx.shape(1) or fresh(len(shape)))[1:-1]
    return *shape[:2], *spatial
