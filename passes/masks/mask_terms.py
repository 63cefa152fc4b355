"""Single terms as parts of a mask or bias: their tensors become views along the axes of the
scores."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, flat_axes
from fa_compiler.passes.answer.decline import Decline, if_possible
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import inputs_of, is_op, without_none
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.score_ops import (
    Add,
    AlignedTensor,
    BiasOp,
    BiasOperand,
    ExcludedPositions,
    MaskTerm,
    Select,
    Term,
)
from fa_compiler.passes.masks.sixteen_bits import is_moved_unrounded, is_rounded_behind
from fa_compiler.passes.masks.structure import Padding


def excluded(term: MaskTerm, viewer: Viewer) -> ExcludedPositions:
    """The positions that a selection or an added mask excludes."""
    if isinstance(term, Select):
        return ExcludedPositions(aligned(term.operand, viewer, term.node), not term.keep)
    return _masked_by_addend(term, viewer)


def _masked_by_addend(term: Add[AlignedTensor], viewer: Viewer) -> ExcludedPositions:
    """The boolean by which a float mask is chosen, where there is one; else the float mask
    itself."""
    view = aligned(term.operand, viewer, term.node)
    node = view.base.producer()
    if is_op(node, "Where") and term.operand.never_enlarges:
        condition, *branches = node.inputs
        scalars = [viewer.info.scalar(branch) for branch in without_none(branches)]
        if condition is not None and None not in scalars and scalars.count(0.0) == 1:
            inner = aligned(
                AlignedTensor(condition, viewer.alignment(condition, view.base_dims, node)),
                viewer,
                node,
            )
            return ExcludedPositions(_composed(view, inner), when=scalars[0] != 0.0)
    return ExcludedPositions(view)


def bias_ops(terms: tuple[Term, ...], viewer: Viewer, stepwise: bool = False) -> tuple[BiasOp, ...]:
    """The operations that make the bias. Factors before the first addend or selection concern only
    the scores, and are left out.

    With `stepwise`, 16-bit addends are the numbers that ONNX Runtime adds: unrounded where it does
    not round them, and read after the operators that move them where these do round.
    """
    operations: list[BiasOp] = []
    for term in terms:
        if isinstance(term, Add):
            view = aligned(term.operand, viewer, term.node)
            if stepwise and is_rounded_behind(view.base, term.operand.value, viewer.info):
                view = aligned(term.operand, viewer, term.node, moved=False)
            viewed = _as_added(view, viewer) if stepwise else BiasOperand(view)
            operations.append(Add(term.node, viewed, term.sign))
        elif isinstance(term, Select):
            viewed = BiasOperand(aligned(term.operand, viewer, term.node))
            operations.append(Select(term.node, viewed, term.keep, term.fill))
        elif operations:
            operations.append(term)
    return tuple(operations)


def _as_added(view: View, viewer: Viewer) -> BiasOperand:
    """An addend as ONNX Runtime adds it."""
    return BiasOperand(
        view, True, is_moved_unrounded(view.base, viewer.info), _summands(view, viewer)
    )


def _summands(view: View, viewer: Viewer) -> tuple[View, ...]:
    """Views of the two tensors whose sum is the base of a view, if one of them is repeated: a
    relative position bias plus the mask of shifted windows, which is the same for each image. Empty
    for other bases."""
    adder = view.base.producer()
    if not is_op(adder, "Add"):
        return ()
    operands = inputs_of(adder)
    views = if_possible(
        lambda: tuple(viewer.broadcast_view(operand, view.base_dims, adder) for operand in operands)
    )
    if views is None or not any(_repeats(summand, viewer) for summand in views):
        return ()
    return views


def aligned(placed: AlignedTensor, viewer: Viewer, node: ir.Node, moved: bool = True) -> View:
    """The view of a tensor along its score axes. Raises Decline where its shape is not proven to
    fit.

    The view looks through the operators that move elements. It is the tensor itself if `moved` is
    false, or if the tensor may enlarge the scores and one of these operators repeats it or states
    another size: a Reshape of no elements may state any size beside a 0.
    """
    value, space = placed.value, viewer.space
    view = _view_upstream(placed, viewer) if moved else viewer.base_view(value)
    if view is None:
        raise Decline(Code.SHAPE, f"the rank of {value.name!r} is unknown", node)
    dims = list(zip(view.dims, placed.dims, strict=True))
    for own, wanted in dims:
        if not wanted:
            space.assume_one(own)
    if all(space.unify(own, wanted) for own, wanted in dims if own and wanted):
        return view
    return _expanded_view(placed, viewer, node)


def _view_upstream(placed: AlignedTensor, viewer: Viewer) -> View | None:
    """The view of a tensor through the operators that move elements, unless they may hide that it
    enlarges the scores; None where its rank is unknown."""
    view = viewer.view(placed.value, factors=False)
    if view is None or placed.never_enlarges:
        return view
    hidden = _repeats(view, viewer) or _resized(view, placed.value, viewer)
    return viewer.base_view(placed.value) if hidden else view


def _expanded_view(placed: AlignedTensor, viewer: Viewer, node: ir.Node) -> View:
    """The view of a tensor that the builder expands along its score axes. Raises Decline where its
    shape is not proven to fit.

    The term is combined with the scores element by element, so each of its dimensions has their
    size or 1, whatever is known of it. Where a dimension of the scores merges several axes, the
    builder expands the term before it takes that dimension apart.
    """
    value, space = placed.value, viewer.space
    own_dims: list[Axes] = []
    for own, wanted in zip(viewer.base_dims(value), placed.dims, strict=True):
        merged = len(space.resolve(wanted)) > 1 and not space.size(own).is_const
        if own and wanted and not merged and not space.unify(own, wanted):
            raise Decline(
                Code.SHAPE, f"the shape of {value.name!r} was not proven to fit the scores", node
            )
        own_dims.append(wanted if own else ())
    return View(
        value, tuple(own_dims), tuple(own_dims), equivalent_values=((value, tuple(own_dims)),)
    )


def _repeats(view: View, viewer: Viewer) -> bool:
    """Does a view have axes that its base lacks?"""
    own, axes = (flat_axes(viewer.space.resolve_all(dims)) for dims in (view.base_dims, view.dims))
    return not set(own).issuperset(axes)


def _resized(view: View, value: ir.Value, viewer: Viewer) -> bool:
    """Has the value other sizes than the dimensions of its view, in a run in which it has no
    elements?"""
    shape = viewer.info.sizes(value)
    return any(viewer.space.size(dim) != size for dim, size in zip(view.dims, shape, strict=True))


def padded(padding: Padding, viewer: Viewer, node: ir.Node) -> ExcludedPositions:
    """The positions that padding excludes beside a structural mask. Raises Decline where its shape
    is not proven to fit."""
    given = padding.given
    if given.cut is None:
        view = aligned(
            AlignedTensor(given.value, padding.dims, padding.never_enlarges), viewer, node
        )
    else:
        view = _aligned_but(given.cut, given.value, padding.dims, viewer, node)
    return ExcludedPositions(view, given.when, given.cut)


def _aligned_but(
    cut: int, value: ir.Value, dims: Arrangement, viewer: Viewer, node: ir.Node
) -> View:
    """The view of a tensor along its score axes, which may be longer than the scores in the
    dimension `cut`. Raises Decline where another dimension is not proven to fit."""
    for place, (own, wanted) in enumerate(zip(viewer.base_dims(value), dims, strict=True)):
        if place != cut and own and wanted and not viewer.space.unify(own, wanted):
            raise Decline(
                Code.SHAPE, f"the shape of {value.name!r} was not proven to fit the scores", node
            )
    return View(value, dims, dims, equivalent_values=((value, dims),))


def _composed(outer: View, inner: View) -> View:
    """A view of the inner base with the outer view's dimensions."""
    return View(inner.base, inner.base_dims, outer.dims)
