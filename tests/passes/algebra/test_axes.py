"""Arrangements of axes and layout plans, by what they say of every element: tensors of numbers are moved along."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.symbolic import Dim, product
from fa_compiler.passes.ir.nodes import permutation
from fa_compiler.passes.layout.plan import (
    COPY_COST,
    LAYOUTS,
    Expand,
    Reshape,
    SqueezeUnsqueeze,
    Transpose,
    cost,
    plan_moves,
)

Array = npt.NDArray[np.int64]


def dim(space: AxisSpace, *sizes: int) -> Axes:
    """One dimension of axes of these sizes."""
    return tuple(axis for size in sizes for axis in space.new(Dim(size)))


def numbered(dims: Arrangement, order: Axes) -> Array:
    """A tensor that holds, at each place, the number of the element of `order` (axes in row-major order)."""
    sizes = [axis.size.const or 0 for axis in order]
    elements = np.arange(math.prod(sizes)).reshape(sizes)
    flat = [order.index(axis) for each in dims for axis in each]
    return elements.transpose(flat).reshape([math.prod(axis.size.const or 0 for axis in each) for each in dims])


# -- Branches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A record with axes at every depth that `settle` looks into."""

    name: str
    axes: Axes
    parts: tuple[Arrangement, ...]
    named: Mapping[str, Axes]
    space: AxisSpace


def test_a_branch_keeps_what_it_learns_to_itself() -> None:
    space = AxisSpace()
    (whole,) = dims = space.new(Dim(6))
    branch = space.branch()
    parts = branch.reshape((dims,), [Dim(2), Dim(3)])
    assert parts is not None and branch.resolve(dims) == (*parts[0], *parts[1])
    assert space.resolve(dims) == (whole,)
    assert branch.branch().resolve(dims) == branch.resolve(dims)


def test_a_record_is_settled_in_the_finest_parts_of_its_axes() -> None:
    space = AxisSpace()
    split, whole = space.new(Dim(6)), space.new(Dim(5))
    held = Held("a", split, ((split, whole), ((),)), {"b": split, "c": whole}, space)
    assert space.settle(held) is held
    branch = space.branch()
    branch.reshape((split,), [Dim(2), Dim(3)])
    parts = branch.resolve(split)
    assert len(parts) == 2
    assert branch.settle(held) == Held("a", parts, ((parts, whole), ((),)), {"b": parts, "c": whole}, branch)
    assert branch.settle((whole, "x", 3)) == (whole, "x", 3)


# -- Reshape ----------------------------------------------------------------------------------------


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Sizes of a base, a permutation of its dimensions, and a target of the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=5))
    sizes = draw(st.permutations(factors))
    perm = draw(st.permutations(range(len(sizes))))
    target: list[int] = []
    for factor in (sizes[index] for index in perm):
        if target and draw(st.booleans()):
            target[-1] *= factor
        else:
            target.append(factor)
        if draw(st.booleans()):
            target.append(1)
    if draw(st.booleans()):
        target = list(draw(st.permutations(target)))
    return list(sizes), list(perm), target


@given(reshapes())
def test_reshape_tells_where_every_element_is(case: tuple[list[int], list[int], list[int]]) -> None:
    sizes, perm, target = case
    space = AxisSpace()
    base = tuple(space.new(Dim(size)) for size in sizes)
    source = tuple(base[index] for index in perm)
    result = space.reshape(source, [Dim(size) for size in target])
    if result is None:
        # Only sizes that cut across each other, such as (2, 3) into (3, 2), are unproven.
        assert target != [sizes[index] for index in perm]
        return
    order = tuple(axis for each in space.resolve_all(base) for axis in each)
    before = numbered(space.resolve_all(source), order)
    after = numbered(space.resolve_all(result), order)
    np.testing.assert_array_equal(after, before.reshape(target))


@pytest.mark.parametrize(
    ("sizes", "target"),
    [
        ((6,), (2, 3)),
        ((2, 3), (6,)),
        ((2, 3, 4), (6, 4)),
        ((2, 12), (2, 3, 4)),
        ((4, 6), (2, 2, 3, 2)),
        ((1, 6, 1), (6,)),
        ((6,), (1, 6, 1, 1)),
        ((8,), (2, 2, 2)),
    ],
)
def test_reshapes_that_have_to_be_proven(sizes: tuple[int, ...], target: tuple[int, ...]) -> None:
    space = AxisSpace()
    base = tuple(space.new(Dim(size)) for size in sizes)
    result = space.reshape(base, [Dim(size) for size in target])
    assert result is not None
    assert [space.size(each).const for each in result] == list(target)


@pytest.mark.parametrize(
    ("sizes", "target"), [((2, 3), (3, 2)), ((4,), (6,)), ((4,), (2,)), ((4,), (2, 2, 2)), ((), (2,))]
)
def test_reshapes_that_cannot_be(sizes: tuple[int, ...], target: tuple[int, ...]) -> None:
    space = AxisSpace()
    base = tuple(space.new(Dim(size)) for size in sizes)
    assert space.reshape(base, [Dim(size) for size in target]) is None


def test_reshape_with_symbols() -> None:
    b, s = Dim.symbol("B"), Dim.symbol("S")
    space = AxisSpace()
    (batch,), (rows,), (wide,) = base = (space.new(b), space.new(s), space.new(Dim(32)))
    apart = space.reshape(base, [b, s, Dim(4), Dim(8)])
    assert apart is not None
    heads, depth = apart[2], apart[3]
    assert space.resolve((wide,)) == (*heads, *depth)
    folded = space.reshape((apart[0], heads, apart[1], depth), [b * 4, s, Dim(8)])
    assert folded == ((batch, *heads), (rows,), depth)
    assert space.reshape((apart[0], heads, apart[1], depth), [b, s * 4, Dim(8)]) is not None
    # B * S rows cannot be cut at S unless S comes last in them.
    assert space.reshape(((rows, batch),), [b, s]) is None


def test_empty_tensors() -> None:
    space = AxisSpace()
    base = (space.new(Dim(0)), space.new(Dim(4)))
    assert space.reshape(base, [Dim(0), Dim(2), Dim(2)]) is not None
    result = space.reshape(base, [Dim(4), Dim(0)])
    assert result is None or [space.size(each).const for each in result] == [4, 0]


def test_product_of_nothing() -> None:
    assert product([]) == Dim(1)


# -- unify ------------------------------------------------------------------------------------------


@given(st.permutations([2, 2, 3]), st.permutations([2, 2, 3]), st.integers(0, 2), st.integers(0, 2))
def test_unified_dimensions_are_the_same_axes(one: list[int], other: list[int], left: int, right: int) -> None:
    """Whatever is cut, both run over the same axes afterwards, and no element is lost."""
    space = AxisSpace()
    first = dim(space, *one[:left], math.prod(one[left:]))
    second = dim(space, *other[:right], math.prod(other[right:]))
    known = dict(space._parts)
    if space.unify(first, second):
        assert space.resolve(first) == space.resolve(second)
    else:
        assert space._parts == known
    assert space.size(first).const == space.size(second).const == 12


def test_unify_is_all_or_nothing() -> None:
    space = AxisSpace()
    first, second = dim(space, 2, 6), dim(space, 2, 4)
    assert not space.unify(first, second)
    assert space.resolve(first) == first
    assert space.resolve(second) == second


def test_unify_cuts_the_coarser_one() -> None:
    space = AxisSpace()
    merged, (heads, depth) = dim(space, 12), dim(space, 3, 4)
    assert space.unify(merged, (heads, depth))
    assert space.resolve(merged) == space.resolve((heads, depth))
    assert len(space.resolve(merged)) == 2


def test_unify_symbols() -> None:
    s, t = Dim.symbol("S"), Dim.symbol("T")
    space = AxisSpace()
    (a,), (b,), (c,) = space.new(s), space.new(t), space.new(Dim(5))
    assert space.unify((a,), (b,))
    assert space.resolve((a,)) == space.resolve((b,))
    # The constant size is the one to keep.
    assert space.unify((a,), (c,))
    assert space.size((a,)).const == space.size((b,)).const == 5


@pytest.mark.parametrize("merged", [False, True])
def test_unify_batches_beside_the_same_heads(merged: bool) -> None:
    """Batch and heads in one dimension are never 1, so they are equal, and the batches are."""
    b, c = Dim.symbol("B"), Dim.symbol("C")
    space = AxisSpace()
    one = (*space.new(b), *space.new(Dim(4)))
    other = space.new(c * 4) if merged else (*space.new(c), *space.new(Dim(4)))
    assert space.unify(one, other)
    assert space.resolve(one) == space.resolve(other)
    assert len(space.resolve(one)) == 2


def test_unify_dimensions_that_may_be_one() -> None:
    """Either may be repeated along the other, in a run in which it is 1."""
    b, c, h = map(Dim.symbol, "BCH")
    space = AxisSpace()
    assert not space.unify((*space.new(b), *space.new(h)), (*space.new(c), *space.new(h)))


@pytest.mark.parametrize("sizes", [((2,), (3,)), ((2,), ()), ((), (5,)), ((2, 3), (3, 2)), ((4, 2), (2, 4, 2))])
def test_sizes_that_do_not_match(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    space = AxisSpace()
    assert not space.unify(dim(space, *sizes[0]), dim(space, *sizes[1]))


# -- layout plans -----------------------------------------------------------------------------------


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[Arrangement, Arrangement, Axes]:
    """A source, a target that has all its axes and perhaps more, and the source's axes."""
    space = AxisSpace()
    every = dim(space, *draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=5)))
    own = every[: draw(st.integers(1, len(every)))]

    def grouped(axes: list[object]) -> Arrangement:
        dims: list[list[object]] = [[]]
        for axis in axes:
            if draw(st.booleans()):
                dims.append([])
            dims[-1].append(axis)
        return tuple(tuple(each) for each in dims)  # type: ignore[misc]

    return grouped(list(draw(st.permutations(own)))), grouped(list(draw(st.permutations(every)))), own


@given(arrangements())
def test_a_plan_puts_every_element_where_it_belongs(case: tuple[Arrangement, Arrangement, Axes]) -> None:
    source, target, own = case
    plan = plan_moves(source, target)
    assert plan is not None
    tensor = numbered(source, own)
    for move in plan:
        sizes = [math.prod(axis.size.const or 0 for axis in each) for each in move.dims]
        match move:
            case Reshape():
                tensor = tensor.reshape(sizes)
            case SqueezeUnsqueeze(removed, inserted):
                tensor = np.squeeze(tensor, removed)
                for index in inserted:
                    tensor = np.expand_dims(tensor, index)
            case Transpose(perm):
                tensor = tensor.transpose(perm)
            case SqueezeUnsqueeze(removed, inserted):
                tensor = np.expand_dims(np.squeeze(tensor, removed), inserted)
            case Expand():
                tensor = np.broadcast_to(tensor, sizes)
        assert list(tensor.shape) == sizes
    every = tuple(axis for each in target for axis in each)
    missing = [axis for axis in every if axis not in own]
    # Along an axis that the source lacks, all elements are the same: number those first.
    wanted = numbered(target, (*missing, *own)) % math.prod(axis.size.const or 0 for axis in own)
    np.testing.assert_array_equal(tensor, wanted)


def test_axes_are_never_dropped() -> None:
    space = AxisSpace()
    first, second = dim(space, 2), dim(space, 3)
    assert plan_moves((first, second), (first,)) is None


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("BSH", "BSH", 0),
        ("BSND", "BSND", 0),
        ("BSH", "BSND", 1),
        ("BSND", "BSH", 1),
        ("BSND", "BNSD", COPY_COST),
        ("BNSD", "BSND", COPY_COST),
        ("BSH", "BNSD", COPY_COST + 1),
        ("BNSD", "BSH", COPY_COST + 1),
        ("SBH", "BSH", COPY_COST),
        ("SBH", "BNSD", COPY_COST + 1),
    ],
)
def test_what_layouts_cost(source: str, target: str, expected: int) -> None:
    space = AxisSpace()
    groups = dim(space, 2), dim(space, 4), dim(space, 5), dim(space, 8)
    plan = plan_moves(LAYOUTS[source](*groups), LAYOUTS[target](*groups))
    assert plan is not None
    assert cost(plan) == expected


def test_sizes_of_one_need_no_copy() -> None:
    space = AxisSpace()
    rows, depth = dim(space, 5), dim(space, 8)
    plan = plan_moves(((), rows, (), depth), ((), (), rows, depth))
    assert plan == (SqueezeUnsqueeze((0, 2), (0, 1), ((), (), rows, depth)),)
    assert plan_moves((rows, depth), ((), rows, depth, ())) == (SqueezeUnsqueeze((), (0, 3), ((), rows, depth, ())),)
    assert plan_moves(((), rows, depth), (rows, depth)) == (SqueezeUnsqueeze((0,), (), (rows, depth)),)


@pytest.mark.parametrize(("perm", "expected"), [(None, [2, 1, 0]), ([1, 0, 2], [1, 0, 2])])
def test_permutation(perm: list[int] | None, expected: list[int]) -> None:
    assert permutation(_transpose(perm), 3) == expected


@pytest.mark.parametrize("perm", [[0, 1, 3], [0, 0, 1], [0, -2, 1], [0, 1], [0, 1, 2, 3]])
def test_what_is_no_permutation(perm: list[int]) -> None:
    """The ONNX checker takes such a Transpose."""
    assert permutation(_transpose(perm), 3) is None


def _transpose(perm: list[int] | None) -> ir.Node:
    attributes = [] if perm is None else [ir.AttrInt64s("perm", perm)]
    return ir.Node("", "Transpose", [ir.val("x")], attributes)
