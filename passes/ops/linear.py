"""Products and convolutions."""

from __future__ import annotations

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import Context, Fact, Shape, broadcast, fresh, rule

CONTRIB = "com.microsoft"
NCHWC = "com.microsoft.nchwc"
"""ONNX Runtime's blocked layout, which it saves with all optimisations. A tensor in it keeps its dimensions; only the
number of channels is rounded up."""


def matmul_shape(left: Shape | None, right: Shape | None) -> Shape | None:
    """numpy.matmul's result: a 1-D operand is a row on the left and a column on the right."""
    if left is None or right is None or not left or not right:
        return None
    batch = broadcast(left[:-2], right[:-2])
    if batch is None:
        return None
    return (*batch, *(left[-2:-1] if len(left) > 1 else ()), *(right[-1:] if len(right) > 1 else ()))


@rule("MatMul")
def _matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(0) or ctx.dtype(1))


@rule("Gemm")
@rule("FusedGemm", domain=CONTRIB)
def _gemm(ctx: Context) -> Fact:
    return Fact(gemm_shape(ctx, 0, 1), ctx.dtype(0) or ctx.dtype(1))


def gemm_shape(ctx: Context, left_index: int, right_index: int) -> Shape:
    """The shape of a product of two matrices, each of which may be transposed."""
    left, right = ctx.shape(left_index), ctx.shape(right_index)
    left = left if left is not None and len(left) == 2 else fresh(2)
    right = right if right is not None and len(right) == 2 else fresh(2)
    return left[1 if ctx.int_attr("transA", 0) else 0], right[0 if ctx.int_attr("transB", 0) else 1]


@rule("Einsum")
def _einsum(ctx: Context) -> Fact:
    dtype = ctx.dtype(0)
    equation = ctx.attr("equation")
    if not isinstance(equation, str):
        return Fact(None, dtype)
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ctx.facts):
        return Fact(None, dtype)
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = ("..." if "..." in left else "") + "".join(
            letter for letter in sorted(set(letters)) if letters.count(letter) == 1
        )
    dims: dict[str, Dim] = {}
    ellipsis: Shape | None = ()
    for index, term in enumerate(terms):
        shape = ctx.shape(index)
        before, dots, after = term.partition("...")
        if shape is None:
            ellipsis = None if dots else ellipsis
            continue
        count = len(before) + len(after)
        if (len(shape) < count) if dots else (len(shape) != count):
            return Fact(None, dtype)
        end = len(shape) - len(after)
        if dots:
            ellipsis = broadcast(ellipsis, shape[len(before) : end])
        for letter, dim in zip(before + after, (*shape[: len(before)], *shape[end:]), strict=True):
            dims[letter] = Dim.broadcast(dims[letter], dim) if letter in dims else dim
    before, dots, after = right.partition("...")
    if dots and ellipsis is None:
        return Fact(None, dtype)
    middle = ellipsis if dots and ellipsis is not None else ()
    result = [dims.get(letter) or Dim.fresh() for letter in before]
    result += [*middle, *(dims.get(letter) or Dim.fresh() for letter in after)]
    return Fact(tuple(result), dtype)


@rule("Conv", "MaxPool", "AveragePool", "LpPool")
@rule("Conv", "MaxPool", "AveragePool", domain=NCHWC)
def _window(ctx: Context) -> list[Fact]:
    return [Fact(window_shape(ctx, 1 if ctx.node.op_type == "Conv" else None), ctx.dtype(0))]


@rule("FusedConv", domain=CONTRIB)
def _fused_conv(ctx: Context) -> Fact:
    return Fact(window_shape(ctx, 1), ctx.dtype(0))


def window_shape(ctx: Context, weights_index: int | None) -> Shape | None:
    """The shape of a convolution with these weights, or of a pool, which has none."""
    shape = ctx.shape(0)
    if shape is None or len(shape) < 3:
        return None
    spatial = len(shape) - 2
    weights = None if weights_index is None else ctx.shape(weights_index)
    channels = shape[1]
    if weights_index is not None:
        channels = weights[0] if weights else Dim.fresh()
    listed = ctx.ints_attr("kernel_shape")
    if listed is not None:
        kernel = [Dim(item) for item in listed]
    elif weights is not None:
        kernel = list(weights[2:])
    else:
        return (shape[0], channels, *fresh(spatial))
    strides = ctx.ints_attr("strides") or [1] * spatial
    dilations = ctx.ints_attr("dilations") or [1] * spatial
    pads = ctx.ints_attr("pads") or [0] * (2 * spatial)
    mode = ctx.attr("auto_pad") or "NOTSET"
    fitting = len(kernel) == len(strides) == len(dilations) == len(pads) // 2 == spatial
    # ONNX Runtime ignores the dilation when it pads, so it gives fewer elements than ONNX defines.
    padded_short = mode in ("SAME_UPPER", "SAME_LOWER") and set(dilations) != {1}
    ceil_mode = ctx.int_attr("ceil_mode", 0) != 0
    if (ceil_mode and mode not in ("NOTSET", "VALID")) or padded_short or not fitting:
        return (shape[0], channels, *fresh(spatial))
    result = []
    for index, length in enumerate(shape[2:]):
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            result.append(Dim.ceildiv(length, strides[index]))
            continue
        before, after = (pads[index], pads[index + spatial]) if mode == "NOTSET" else (0, 0)
        window = (kernel[index] - 1) * dilations[index] + 1
        reach = length + before + after - window
        if ceil_mode:
            # A last window that begins behind the axis counts in some versions only. A window of this length never
            # begins there. ONNX Runtime refuses negative results.
            whole = (window - strides[index] - after).is_at_least(0)
            result.append(Dim.ceildiv(reach, strides[index]) + 1 if whole else Dim.fresh())
        elif weights_index is not None or reach.is_at_least(0):
            result.append(Dim.floordiv(reach, strides[index]) + 1)
        else:
            # A window may be longer than its axis in a pool. ONNX Runtime rounds the negative rest toward zero.
            result.append(Dim.max(Dim.truncdiv(reach, strides[index]) + 1, 0))
    return (shape[0], channels, *result)


@rule("ConvTranspose")
def _conv_transpose(ctx: Context) -> Fact:
    shape, weights = ctx.shape(0), ctx.shape(1)
    if shape is None or len(shape) < 3:
        return Fact(None, ctx.dtype(0))
    channels = weights[1] * ctx.int_attr("group", 1) if weights is not None and len(weights) > 1 else Dim.fresh()
    return Fact((shape[0], channels, *fresh(len(shape) - 2)), ctx.dtype(0))


@rule("Resize", "Upsample")
def _resize(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    sizes = ctx.dims(3)
    if shape is None:
        return Fact(None, ctx.dtype(0))
    plain = ctx.attr("axes") is None and ctx.attr("keep_aspect_ratio_policy") in (None, "stretch")
    if sizes is not None and len(sizes) == len(shape) and plain:
        return Fact(tuple(sizes), ctx.dtype(0))
    return Fact(fresh(len(shape)), ctx.dtype(0))


@rule("ReorderInput", domain=NCHWC)
def _to_blocks(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    if shape is None or len(shape) != 4:
        return Fact(None, ctx.dtype(0))
    height, width = shape[1:3] if ctx.int_attr("channels_last", 0) else shape[2:]
    return Fact((shape[0], Dim.fresh(), height, width), ctx.dtype(0))


@rule("ReorderOutput", domain=NCHWC)
def _from_blocks(ctx: Context) -> Fact:
    shape, channels = ctx.shape(0), ctx.int_attr("channels", 0)
    if shape is None or len(shape) != 4 or channels < 1:
        return Fact(None, ctx.dtype(0))
    last = ctx.int_attr("channels_last", 0)
    return Fact((shape[0], *shape[2:], Dim(channels)) if last else (shape[0], Dim(channels), *shape[2:]), ctx.dtype(0))


@rule("GridSample")
def _grid_sample(ctx: Context) -> Fact:
    shape, grid = ctx.shape(0), ctx.shape(1)
    if shape is None:
        return Fact(None, ctx.dtype(0))
    spatial = fresh(len(shape) - 2) if grid is None else grid[1:-1]
    return Fact((*shape[:2], *spatial), ctx.dtype(0))
