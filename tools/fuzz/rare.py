"""What few models write, and what looks like it: the rarer productions of tools/fuzz/grammar.py.

cached operands   int8 caches, and blocks of a cache gathered by a table; a result that is quantised
folded products   heads folded into the batch, in the other order at times
second products   of parts of query and key with rotary positions, or of a key that is the same for all tokens
factors           one number for each head, row, batch entry or key, on the scores or the probabilities
shifts            scores less their maximum along an axis, and a multiple of that
sinks             one more score in front or behind, along any axis, left out again or not; gates on the result
"""

from __future__ import annotations

import random

import numpy as np

from tools.fuzz.graph import Graph, Size

BLOCK = 2
BLOCKS = 5
SHARES: tuple[tuple[Size, ...], ...] = (
    (1, "N", 1, 1), (1, "N", 1, 1), ("N", 1, 1), ("B", 1, "S", 1), ("B", "N", "S", 1), ("B", 1, 1, 1), (), ("T",),
    ("B", 1, 1, "T"), ("S", 1),
)  # fmt: skip


class Rare:
    """Productions over a graph, for a composer that says how often each is drawn."""

    rng: random.Random
    g: Graph
    dtype: str
    score_type: str

    # -- operands -----------------------------------------------------------------------------------

    def _int8(self, name: str, dims: tuple[str, ...]) -> str:
        """A cache of int8, with one scale, or one for each head or number."""
        rng, g = self.rng, self.g
        held = g.input("int8", "int8", dims, name=name)
        axis = rng.choice([None, None, 1, 3, 2])
        count = 1 if axis is None or dims[axis] in g.open else g.size(dims[axis])
        scale = np.full((), 0.02) if axis is None or dims[axis] in g.open else 0.01 + 0.005 * np.arange(count)
        if rng.random() < (0.25 if self.dtype == "float32" or g.opset >= 19 else 0.8):
            form = [1, 1, 1, 1]
            form[axis or 0] = count
            return g.op("Mul", g.cast(held, self.dtype), g.const(scale.reshape(form), self.dtype))
        point = np.zeros(scale.shape) if rng.random() < 0.4 else np.full(scale.shape, rng.choice([3, -5]))
        more = {} if scale.ndim == 0 else {"axis": axis}
        if self.dtype == "float32" or g.opset >= 19:
            return g.op("DequantizeLinear", held, g.const(scale, self.dtype), g.const(point, "int8"), **more)
        wide = g.op("DequantizeLinear", held, g.const(scale, "float32"), g.const(point, "int8"), **more)
        return g.cast(wide, self.dtype)

    def _paged(self, name: str, heads: str, depth: str, table: str) -> str:
        """Keys or values [B, heads, T, depth] out of the blocks of a pool, in the order of a table."""
        rng, g = self.rng, self.g
        inner: tuple[Size, ...] = (BLOCK, heads, depth) if rng.random() < 0.7 else (heads, BLOCK, depth)
        pool = g.input("value", self.dtype, (BLOCKS, *inner), name=name)
        found = g.op("Gather", pool, table, axis=0 if rng.random() < 0.95 else 1)
        if inner[0] != BLOCK:
            found = g.op("Transpose", found, perm=[0, 1, 3, 2, 4])
        rows = g.reshape(found, ("B", "T", heads, depth))
        return g.op("Transpose", rows, perm=[0, 2, 1, 3])

    def _table(self) -> str:
        """Which blocks belong to a batch entry."""
        g = self.g
        g.sizes["T"] = BLOCK * max(1, g.sizes["T"] // BLOCK)
        g.open -= {"T"}
        return g.input("table", self.rng.choice(["int64", "int32"]), ("B", g.sizes["T"] // BLOCK), number=BLOCKS)

    def _quantised(self, result: str) -> str:
        """The result as int8, by a power of two or another scale."""
        rng, g = self.rng, self.g
        scale = rng.choice([2.0**-5, 2.0**-6, 0.03, 0.1])
        point = rng.choice([0, 0, 0, 3])
        return g.op("QuantizeLinear", result, g.const(scale, "float32"), g.const(point, "int8"))

    # -- scores -------------------------------------------------------------------------------------

    def _folded(self, query: str, key: str) -> str:
        """The product of heads that are folded into the batch; of both operands in the same order, or not."""
        rng, g = self.rng, self.g
        turned = rng.random() < 0.3
        flat = []
        for value, (rows, depth) in ((query, ("S", "D")), (key, ("T", "D"))):
            if turned and (value == key or rng.random() < 0.5):
                value = g.op("Transpose", value, perm=[1, 0, 2, 3])
            number = [-1, -1 if rows in g.open else g.size(rows), g.size(depth)]
            shape = g.const(number, "int64")
            if rows in g.open:
                shape = g.op(
                    "Concat", g.const([-1], "int64"), g.measured(rows), g.const([g.size(depth)], "int64"), axis=0
                )
            flat.append(g.op("Reshape", value, shape))
        product = g.op("MatMul", flat[0], g.op("Transpose", flat[1], perm=[0, 2, 1]))
        return g.reshape(product, ("B", "N", "S", "T"))

    def _second_product(self, scores: str) -> str:
        """A second product added to the first."""
        rng, g = self.rng, self.g
        tokens: Size = rng.choice(["T", "T", 1])
        heads: Size = rng.choice(["N", "N", 1])
        left = g.input("value", self.dtype, ("B", "N", "S", 3))
        right = g.input("value", self.dtype, ("B", heads, tokens, 3))
        product = g.op("MatMul", left, g.op("Transpose", right, perm=[0, 1, 3, 2]))
        if rng.random() < 0.5:
            product = g.op("Mul", product, g.number(rng.choice([0.5, 2.0, 0.25, -1.0, 1e-31]), self.dtype))
        return g.op("Add", *((scores, product) if rng.random() < 0.7 else (product, scores)))

    def _share(self, dtype: str) -> str:
        """A tensor of factors: bounded, or as large as the input makes them."""
        rng, g = self.rng, self.g
        given = g.input("bias", dtype, rng.choice(SHARES))
        match rng.choice(["sigmoid", "sigmoid", "clip", "exp", "given", "steps"]):
            case "sigmoid":
                return g.op("Sigmoid", given)
            case "clip":
                low, high = g.const(rng.choice([0.0, 0.5, -1.0]), dtype), g.const(2.0, dtype)
                return g.op("Clip", given, low, high)
            case "exp":
                return g.op("Exp", g.op("Min", given, g.const(rng.choice([3.0, 60.0]), dtype)))
            case "steps":
                return g.cast(g.op("Greater", given, g.const(0.0, dtype)), dtype)
            case _:
                return given

    def _shared(self, value: str, dtype: str) -> str:
        """Scores or probabilities times a tensor, or divided by it."""
        rng, g = self.rng, self.g
        share = self._share(dtype)
        if rng.random() < 0.35:
            return g.op("Div", value, share)
        return g.op("Mul", *((value, share) if rng.random() < 0.7 else (share, value)))

    def _shifted(self, scores: str) -> str:
        """Scores less their maximum along an axis, or that less the scores."""
        rng, g, dtype = self.rng, self.g, self.score_type
        most = self._reduced("ReduceMax", scores, rng.choice([-1, -1, -1, -2, 1]))
        moved = g.op("Sub", *((scores, most) if rng.random() < 0.8 else (most, scores)))
        if rng.random() < 0.5:
            moved = g.op("Mul", moved, g.number(rng.choice([0.5, 2.0, -1.0, 32.0]), dtype))
        elif rng.random() < 0.3:
            moved = self._shared(moved, dtype)
        return moved

    def _reduced(self, op_type: str, value: str, axis: int = -1, keepdims: bool = True) -> str:
        """A reduction; its axes are an input since opset 18, of ReduceSum before."""
        g = self.g
        if op_type == "ReduceSum" or g.opset >= 18:
            return g.op(op_type, value, g.const([axis], "int64"), keepdims=int(keepdims))
        return g.op(op_type, value, axes=[axis], keepdims=int(keepdims))

    # -- sinks --------------------------------------------------------------------------------------

    def _sunk(self, scores: str, value: str) -> tuple[str, str]:
        """Probabilities beside a sink, and the values they are for: the sink along the keys or another axis, in front
        or behind, left out again, or the wrong column left out, or none."""
        rng, g, dtype = self.rng, self.g, self.score_type
        axis = rng.choice([3, 3, 3, 3, 2, 1])
        first = rng.random() < 0.4
        if rng.random() < 0.4:
            pads = [0] * 8
            pads[axis + (0 if first else 4)] = 1
            joined = g.op("Pad", scores, g.const(pads, "int64"), g.const(rng.choice([0.0, -1.0, 2.0]), dtype))
        else:
            dims: list[Size] = ["B", "N", "S", "T"]
            dims[axis] = 1
            form: tuple[Size, ...] = rng.choice(
                [(1, "N", 1, 1), (1, "N", 1, 1), (1, 1, 1, 1), tuple(dims), ("B", 1, 1, 1)]
            )
            wide = g.op("Expand", g.input("sink", dtype, form), g.shape(dims))
            joined = g.op("Concat", *((wide, scores) if first else (scores, wide)), axis=axis)
        p = g.op("Softmax", joined, axis=-1)
        if axis == 3 and rng.random() < 0.12:  # nothing is left out: one more value, for the sink
            row = g.op("Slice", value, g.const([0], "int64"), g.const([1], "int64"), g.const([2], "int64"))
            return p, g.op("Concat", *((row, value) if first else (value, row)), axis=2)
        if rng.random() < 0.12:
            first = not first
        start, end = (1, 1 << 60) if first else (0, -1)
        bounds = [g.const([number], "int64") for number in (start, end, axis)]
        return g.op("Slice", p, *bounds), value

    def _gated(self, result: str, scores: str) -> str:
        """The result times the share that a sink would leave it."""
        rng, g = self.rng, self.g
        axis = rng.choice([-1, -1, -1, -1, -2])
        kept = rng.random() < 0.5
        dims: list[Size] = [*rng.choice([(1, "N", 1), (1, "N", 1), (), ("B", 1, "S"), (1, 1, "S"), ("B", "N", "S")])]
        if dims and kept:
            dims.append(1)
        sink = g.input("sink", self.score_type, dims)
        if rng.random() < 0.7:
            sink = g.op("Min", sink, g.const(9.0, self.score_type))
        else:
            g.words.append("a sink of any size")
        total = self._reduced("ReduceLogSumExp", scores, axis, kept)
        difference = g.op("Sub", *((total, sink) if rng.random() < 0.9 else (sink, total)))
        gate = g.op("Sigmoid", difference)
        if not kept:
            place = rng.choice([-1, -1, -1, 2])
            gate = g.unsqueeze(gate, [place]) if rng.random() < 0.6 else g.reshape(gate, ("B", "N", "S", 1))
        elif rng.random() < 0.2:
            gate = g.reshape(gate, rng.choice([("B", "N", "S", 1), ("B", "N", 1, "S"), ("B", "S", "N", 1)]))
        return g.op("Mul", result, gate)
