"""Single terms as parts of a mask or bias, each as a view along the axes of the scores."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Axes
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.structure import Padding
from fa_compiler.passes.movers import MOVES
from fa_compiler.passes.nodes import is_op, reads_type
from fa_compiler.passes.report import Code
from fa_compiler.passes.score_ops import Add, BiasOp, Masked, MaskTerm, Placed, Select, Term, Viewed


def excluded(term: MaskTerm, viewer: Viewer) -> Masked:
    """Where a selection or an added mask excludes keys."""
    if isinstance(term, Select):
        return Masked(aligned(term.operand, viewer, term.node), not term.keep)
    return _masked_by_addend(term, viewer)


def _masked_by_addend(term: Add[Placed], viewer: Viewer) -> Masked:
    """The boolean behind a float mask where there is one, else the float mask itself."""
    view = aligned(term.operand, viewer, term.node)
    node = view.base.producer()
    if is_op(node, "Where") and term.operand.fits:
        assert node is not None
        condition, *branches = node.inputs
        scalars = [viewer.info.scalar(branch) for branch in branches if branch is not None]
        if condition is not None and None not in scalars and scalars.count(0.0) == 1:
            inner = aligned(Placed(condition, viewer.alignment(condition, view.base_dims, node)), viewer, node)
            return Masked(_composed(view, inner), when=scalars[0] != 0.0)
    return Masked(view)


UNROUNDED = ("Add", "Sub", "Sum", "Mul", "Div", "Neg", "Max", "Min", "Clip", "Where")
"""Operators that ONNX Runtime computes in float32 where their type is a 16-bit one. It rounds the result when an
operator takes it that has a kernel of 16 bits, as those have that move elements; a single one between two that it
computes in float32 is computed in float32, too."""


def bias_ops(terms: tuple[Term, ...], viewer: Viewer, stepwise: bool = False) -> tuple[BiasOp, ...]:
    """The operations that make the bias; factors before the first of them only concern the scores.

    With `stepwise` 16-bit addends are as ONNX Runtime adds them, one by one: unrounded where nothing rounds them, and
    read where they were moved to if moving does.
    """
    operations: list[BiasOp] = []
    for term in terms:
        if isinstance(term, Add):
            view = aligned(term.operand, viewer, term.node)
            if stepwise and _is_rounded_behind(view.base, term.operand.value, viewer):
                view = aligned(term.operand, viewer, term.node, moved=False)
            viewed = Viewed(view, stepwise, stepwise and _is_moved_unrounded(view.base))
            operations.append(Add(term.node, viewed, term.sign))
        elif isinstance(term, Select):
            viewed = Viewed(aligned(term.operand, viewer, term.node))
            operations.append(Select(term.node, viewed, term.keep, term.fill))
        elif operations:
            operations.append(term)
    return tuple(operations)


def _is_rounded_behind(base: ir.Value, value: ir.Value, viewer: Viewer) -> bool:
    """Do the operators that move 16-bit numbers from where they were computed to a value round them? Behind a Cast from
    float32 the first one does."""
    mover = value.producer()
    if base is value or mover is None or viewer.info.dtype(value) == ir.DataType.FLOAT:
        return False
    if is_op(base.producer(), "Cast"):
        return True
    return is_op(base.producer(), *UNROUNDED) and not (mover.inputs[0] is base and _has_unrounded_readers(value))


def _is_moved_unrounded(value: ir.Value) -> bool:
    """Does a single operator move a value between two that ONNX Runtime computes in float32?"""
    mover = value.producer()
    source = mover.inputs[0] if mover is not None and is_op(mover, *MOVES) else None
    return source is not None and is_op(source.producer(), *UNROUNDED) and _has_unrounded_readers(value)


def _has_unrounded_readers(value: ir.Value) -> bool:
    """Is a value read by nothing but operators that ONNX Runtime computes in float32? A CastLike that takes its type
    reads nothing there: ONNX Runtime makes it a Cast."""
    readers = [each for each in value.consumers() if not reads_type(each, value)]
    return not value.is_graph_output() and all(is_op(reader, *UNROUNDED) for reader in readers)


def aligned(placed: Placed, viewer: Viewer, node: ir.Node, moved: bool = True) -> View:
    """The furthest view of a tensor whose dimensions run along its score axes; of one that may enlarge the scores the
    furthest that keeps the sizes of all of them; not `moved`, the tensor itself."""
    value, dims = placed.value, placed.dims
    view = viewer.view(value, factors=False) if moved else viewer.base_view(value)
    if not placed.fits and view is not None and _repeats(view, viewer):
        view = viewer.base_view(value)
    if view is None:
        raise Decline(Code.SHAPE, f"the rank of {value.name!r} is unknown", node)
    space = viewer.space
    for own, wanted in zip(view.dims, dims, strict=True):
        if not wanted:
            space.drop(own)
    pairs = [(own, wanted) for own, wanted in zip(view.dims, dims, strict=True) if own and wanted]
    if all(space.unify(own, wanted) for own, wanted in pairs):
        return view
    # Element by element with the scores a dimension is theirs or 1, whatever is known of its size. Where theirs is
    # several axes merged, the builder spreads the term over it before taking it apart.
    own_dims: list[Axes] = []
    for own, wanted in zip(viewer.base_dims(value), dims, strict=True):
        merged = len(space.resolve(wanted)) > 1 and not space.size(own).is_const
        if own and wanted and not merged and not space.unify(own, wanted):
            raise Decline(Code.SHAPE, f"the shape of {value.name!r} was not proven to fit the scores", node)
        own_dims.append(wanted if own else ())
    return View(value, tuple(own_dims), tuple(own_dims), stops=((value, tuple(own_dims)),))


def _repeats(view: View, viewer: Viewer) -> bool:
    """Has a view axes that its base has not?"""
    own = {axis for dim in viewer.space.resolve_all(view.base_dims) for axis in dim}
    return any(axis not in own for dim in viewer.space.resolve_all(view.dims) for axis in dim)


def padded(padding: Padding, viewer: Viewer, node: ir.Node) -> Masked:
    """Where padding excludes keys beside a structural mask."""
    return Masked(aligned(Placed(padding.given.value, padding.dims, padding.fits), viewer, node), padding.given.when)


def _composed(outer: View, inner: View) -> View:
    """A view of the inner base with the outer view's dimensions."""
    return View(inner.base, inner.base_dims, outer.dims)
