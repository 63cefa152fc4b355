# ruff: noqa
# mypy: ignore-errors
"""The inference through ONNX against the rules that it replaces: random calls of each operator, and written graphs.

A difference is a fault unless its operator stands in EXPLAINED. To know more (a size, a type) is no difference.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from fa_compiler.lowering.ascend.graph import Attr, Op
from fa_compiler.lowering.ascend.infer import Fact, InferenceError, infer
from fa_compiler.lowering.ascend.infer.graph import infer_model
from fa_compiler.lowering.ascend.old_infer import RULES
from fa_compiler.lowering.ascend.old_infer import InferenceError as OldError
from fa_compiler.lowering.ascend.old_infer import OpFacts as OldFacts
from fa_compiler.lowering.ascend.old_infer.graph import infer_model as old_infer_model
from fa_compiler.op_registry import names
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind
from tests.lowering.ascend.graphs import attention, branches

F, H, I, I32, B = "DT_FLOAT", "DT_FLOAT16", "DT_INT64", "DT_INT32", "DT_BOOL"

EXPLAINED = {
    "old error": {"EuclideanNorm", "ReduceLogSum", "HcomReceive", "GatherV2"},
    "new error": {"ConcatD", "GatherV2", "Range", "StridedSliceV2", "SoftmaxGrad", "Cumsum"},
    "type": {"LogicalAnd", "LogicalNot", "LogicalOr", "ReduceAll", "ReduceAny", "TanhGrad"},
    "shape": {"NonZero", "RmsNorm"},
}
"""Old errors: the attribute noop_with_empty_axes was asked of operators that GE made without it; a required attribute
of hcom is missing, which another check says. New errors: what fits in no run, although something else is unknown. Types:
of logical operators whose inputs are no booleans. Shapes: NonZero and RmsNorm of scalars."""


def vec(items, hole, r, dtype=I):
    a = np.empty(len(items), dtype=object)
    a[:] = [None if r.random() < hole else i for i in items]
    return Fact(dtype, (len(items),), a)


def scal(i, r, one=False):
    a = np.empty(() if not one else (1,), dtype=object)
    a[...] = i
    return Fact(I, a.shape, a if r.random() < 0.9 else None)


def open_(shape, r, p=0.25):
    return tuple(-1 if r.random() < p else s for s in shape)


def call(name, r):
    spec = ge_prototype(name)
    rank = r.randint(0, 4)
    x = [r.choice([0, 1, 1, 2, 3, 4, 6]) for _ in range(rank)]
    dt = r.choice([F, F, F, H, I, B])
    hole = r.choice([0, 0, 0.2, 1])
    ins = {}

    def T(shape, d=None):
        if r.random() < 0.05:
            return Fact(d or dt, None)
        f = Fact(d or dt, open_(shape, r))
        if (d or dt) in (I, B) and r.random() < 0.5 and np.prod(shape) <= 16:
            v = np.empty(shape, dtype=object)
            v[...] = np.array(
                [
                    r.choice([None, 0, 1, 2, 3, -1]) if (d or dt) == I else r.randint(0, 1)
                    for _ in range(int(np.prod(shape)))
                ],
                dtype=object,
            ).reshape(shape)
            f = Fact(d or dt, tuple(shape), v)
        return f

    def ax(n=None):
        return [
            r.randint(-rank - (r.random() < 0.03), max(rank - 1, 0) + (r.random() < 0.03))
            for _ in range(n if n is not None else r.randint(0, 2))
        ]

    def bc():
        s = list(x)
        for i in range(len(s)):
            if r.random() < 0.3:
                s[i] = 1
        if r.random() < 0.05 and s:
            s[0] = 5
        return s[r.randint(0, len(s)) :] if r.random() < 0.4 else s

    binary = (
        name
        in ("Add", "Sub", "Mul", "RealDiv", "TruncateDiv", "FloorDiv", "FloorMod", "Mod", "Minimum", "Maximum", "Pow")
        or "x1" in spec.input_names
        or name in ("SelectV2", "AddN")
        or name.endswith("Grad")
        or name == "GeluGradV2"
    )
    for e in spec.inputs:
        n = e.name
        if e.kind is Kind.OPTIONAL and r.random() < 0.5:
            continue
        if e.kind is Kind.DYNAMIC:
            for k in range(r.randint(1, 3)):
                s = bc() if name == "AddN" else list(x)
                if name == "ConcatD" and s:
                    s[r.randrange(len(s))] = r.choice([1, 2, 3])
                ins[f"{n}{k}"] = T(s, None if r.random() < 0.95 else H)
        elif name in ("MatMulV2", "BatchMatMulV2", "MatMul", "BatchMatMul"):
            d = [2, 3]
            if n == "x1":
                ins[n] = T(
                    [*([r.choice([1, 2])] * (r.randint(0, 2) if name[0] == "B" else 0)), *r.choice([[2, 3], [3, 2]])], F
                )
            elif n == "x2":
                ins[n] = T(
                    [*([r.choice([1, 2])] * (r.randint(0, 2) if name[0] == "B" else 0)), *r.choice([[3, 4], [4, 3]])], F
                )
            else:
                ins[n] = T([r.choice([3, 4])], F)
        elif name in ("Conv2D", "Conv3DV2", "AvgPoolV2", "MaxPoolV3"):
            k = 3 if name == "Conv3DV2" else 2
            if n == "x":
                ins[n] = T([1, r.choice([2, 3]), *[r.randint(3, 8) for _ in range(k)]], F)
            elif n == "filter":
                ins[n] = T([4, r.choice([2, 2, 3, 1]), *[r.randint(1, 4) for _ in range(k)]], F)
            else:
                ins[n] = T([4], F)
        elif n == "perm":
            p = list(range(rank))
            r.shuffle(p)
            if r.random() < 0.1 and p:
                p[0] -= rank
            if r.random() < 0.05 and p:
                p[0] = p[-1]
            ins[n] = vec(p, hole, r)
        elif n == "axes":
            ins[n] = vec(ax(), hole, r)
        elif n in ("dimension", "split_dim") or (n == "axis"):
            ins[n] = scal(ax(1)[0], r, r.random() < 0.1)
        elif n == "shape" or n == "dims":
            tot = int(np.prod(x))
            s = (
                list(bc())
                if name == "BroadcastTo"
                else r.choice([[tot], [-1], [1, tot], [-1, 1], [2, -1], [tot, -1], list(x), x[::-1], [0, -1], [3, 3]])
            )
            if name == "BroadcastTo":
                s = [r.choice([1, 2, 3])] * r.randint(0, 1) + list(x)
            if name == "Fill":
                s = [abs(i) for i in s]
            ins[n] = vec(s, hole, r) if r.random() < 0.95 else Fact(I, (len(s),))
        elif n == "multiples":
            ins[n] = vec([r.randint(0, 3) for _ in range(rank + (r.random() < 0.05))], hole, r)
        elif n == "paddings":
            ins[n] = vec([r.randint(-1, 2) for _ in range(2 * rank + (r.random() < 0.05))], hole, r)
        elif n in ("begin", "end", "strides"):
            k = r.randint(0, rank) if n == "begin" else K
            K = k
            if "axes_n" not in ins:
                pass
            ins[n] = vec(
                [
                    r.choice([-3, -1, 0, 1, 2, 9, 2**63 - 1, -(2**63)])
                    if n != "strides"
                    else r.choice([1, 1, 2, -1, 0 if r.random() < 0.1 else 1])
                    for _ in range(k)
                ],
                hole,
                r,
            )
        elif n == "size_splits":
            tot = x[0] if x else 4
            ins[n] = vec(r.choice([[1, tot - 1], [tot], [-1, 1], [1, -1], [2, 2], [1, 1, -1]]), hole, r)
        elif n in ("k", "depth", "num_segments"):
            ins[n] = scal(r.randint(0, 4), r, r.random() < 0.05)
        elif n in ("start", "limit", "delta"):
            ins[n] = scal(r.randint(-2, 9), r)
        elif n == "sizes":
            ins[n] = vec([r.randint(1, 5) for _ in range(rank + (r.random() < 0.05))], hole, r)
        elif n == "indices" or n == "index":
            ins[n] = T(r.choice([[], [2], [3, 1], list(x), [2, 2]]), I)
        elif n == "segment_ids":
            ins[n] = T(x[: r.randint(0, rank)], I)
        elif n in ("gamma", "beta"):
            ins[n] = T(x[min(1, rank) :], dt)
        elif n == "condition":
            ins[n] = T(bc(), B)
        elif n in ("on_value", "off_value", "value", "constant_values"):
            ins[n] = T([] if r.random() < 0.95 else [1], dt)
        elif binary:
            ins[n] = T(bc(), None if r.random() < 0.95 else F)
        else:
            ins[n] = T(x)
    if "axes" in ins and name == "StridedSliceV2":
        ins["axes"] = vec(ax(K if r.random() < 0.95 else None), hole, r)
    at = {}
    for a in spec.attrs:
        n = a.name
        v = a.value_if_absent
        if n in ("N", "num_split"):
            v = (
                sum(k.startswith("x") for k in ins)
                if n == "N"
                else (
                    len(ins["size_splits"].value)
                    if "size_splits" in ins
                    else r.choice([1, 2, 3, 0 if r.random() < 0.1 else 2])
                )
            )
        elif n in ("concat_dim", "split_dim", "dim", "axis") and a.type == "Int" and name != "Reshape":
            v = ax(1)[0]
        elif n == "axis" and a.type == "ListInt" or n == "axes":
            v = tuple(ax())
        elif n in (
            "keep_dims",
            "noop_with_empty_axes",
            "paddings_contiguous",
            "transpose",
            "transpose_x1",
            "transpose_x2",
            "adj_x1",
            "adj_x2",
        ):
            v = r.random() < 0.5
        elif n == "begin_norm_axis":
            v = min(1, rank)
        elif n == "begin_params_axis":
            v = min(1, rank)
        elif n == "dst_type":
            v = r.choice([0, 1, 3, 9, 12])
        elif n == "dtype" and a.type == "Int":
            v = r.choice([3, 9])
        elif n in ("strides", "ksize", "dilations"):
            k = 3 if name == "Conv3DV2" else 2
            v = (1, 1, *[r.randint(1, 3) for _ in range(k)])
        elif n == "pads":
            v = tuple(r.randint(0, 2) for _ in range(2 * (3 if name == "Conv3DV2" else 2)))
        elif n == "data_format":
            v = "NCDHW" if name == "Conv3DV2" else r.choice(["NCHW", "NCHW", "NHWC"])
        elif n == "groups":
            v = r.choice([1, 1, 2])
        elif n == "padding_mode":
            v = "CALCULATED"
        if v is not None and r.random() < 0.97:
            at[n] = Attr(a.type, v)
    return Op("op", name, attrs=at), ins


def run(function, error):
    try:
        return [(fact.dtype, fact.shape, fact.value) for fact in function()]
    except error as found:
        return str(found)


def agree(a, b):
    return a is None or b is None or (len(a) == len(b) and all(p == q or -1 in (p, q) for p, q in zip(a, b)))


def difference(old, new):
    if isinstance(old, str) or isinstance(new, str):
        return (
            ""
            if isinstance(old, str) and isinstance(new, str)
            else "old error"
            if isinstance(old, str)
            else "new error"
        )
    for one, other in zip(old, new):
        if not agree(one[1], other[1]):
            return "shape"
        if one[0] and other[0] and one[0] != other[0]:
            return "type"
        if not hasattr(one[2], "flat") or other[2] is None or one[2].shape != other[2].shape:
            continue
        if any(None not in (a, b) and int(a) != int(b) for a, b in zip(one[2].flat, other[2].flat)):
            return "value"
    return ""


@pytest.mark.parametrize("name", sorted(name for name in RULES if ge_prototype(name) and name not in names()))
def test_random_calls(name):
    draw = random.Random(name)
    for _ in range(40):
        op, inputs = call(name, draw)
        try:
            old = run(lambda: RULES[name](OldFacts(op, inputs)), OldError)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            continue
        new = run(lambda: infer(op, inputs), InferenceError)
        kind = difference(old, new)
        assert not kind or name in EXPLAINED.get(kind, ()), (kind, inputs, op.attrs, old, new)


def test_graphs():
    for model in (attention(), branches()):
        old, new = old_infer_model(model), infer_model(model)
        assert (old.errors, old.differences, old.without_rule) == (new.errors, new.differences, new.without_rule)
