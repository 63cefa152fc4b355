"""Models that compute a linear attention in plain operators, in several forms, right or with one thing changed.

A `Recipe` says which form, which rule, and what differs from the recurrence (`Change`). The canonical layout is
[B,H,T,D], and that of a state [B,H,Dk,Dv] or [B,H,Dv,Dk].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
FORMS = ("step", "scan", "loop", "unrolled", "chunks", "chunk scan")
RULES = ("linear", "gated", "delta", "gated_delta")
LOW_RANK = ("general", "dplr")
"""Rules with a correction of rank one, in the forms of tokens."""
TOKEN_FORMS = FORMS[:4]
LAYOUTS = {"bhtd": (0, 1, 2, 3), "bthd": (0, 2, 1, 3), "tbhd": (1, 2, 0, 3)}
"""The layouts of inputs and output, with the permutation that makes the canonical one of them."""


@dataclass(frozen=True)
class Change:
    """What differs from the recurrence; nothing by default."""

    # At one number of tokens, or for some inputs.
    turns: str = ""
    """How the number of tokens at which the output is twice as large is spelled (`TURNS`)."""
    divided: bool = False
    """Is the output multiplied and divided by a number that is 0 for many tokens?"""
    # In one token.
    memory_key: str = "k"
    memory_state: str = "decayed"
    memory_sign: str = "Sub"
    beta: str = "both"
    write_key: str = "k"
    write_sign: str = "Add"
    read_key: str = "q"
    read_state: str = "new"
    decay: str = "before"
    bonus: bool = False
    bent: str = ""
    """An operator that the state goes through."""
    gate_factor: float = 1.0
    correction: str = ""
    """What a correction of rank one has otherwise: `turned` (write and read change places), `key` (write and key do),
    `state` (it reads the state after the decay instead of that before, or the reverse), `written` (it reads the state
    after the write), `decayed` (what is corrected decays, too), or `key on both` (write and read are the key)."""
    per_value: bool = False
    """Does each value dimension decay by a number of its own, that of a key dimension?"""
    turned: bool = False
    """Is the state transposed between two tokens?"""
    reset: str = ""
    """What a reset does otherwise: `half` (half of the state stays), `turned` (the others are reset), or `late` (the
    state becomes 0 behind the token)."""
    # In the order of tokens and heads.
    shifted: str = ""
    """The operand that is taken from the token before."""
    rolled: str = ""
    """The operand that is taken from the next head."""
    reversed: str = ""
    """The operand whose tokens are reversed."""
    head_mean: bool = False
    """Is each state the mean of those of all heads?"""
    last: str = "own"
    """The state that is returned: `own`, `before` or `first`."""
    late: str = ""
    """What the last token of an unrolled loop has otherwise: `decay`, `state` (it reads the first one), `beta`, or
    `output` (it changes places with the one before)."""
    # In chunks.
    diagonal: int = 0
    """The diagonal of the products inside a chunk."""
    decay_sign: int = 1
    inner_decay: bool = True
    outer_decay: bool = True
    key_decay: bool = True
    state_decay: str = "last"
    exclusive: bool = False
    """Are the sums of decays exclusive?"""
    inverse: str = "whole"
    """Which terms of the inverse there are: `whole`, `short`, `plus`, `turned`."""
    lower_beta: bool = True
    corrected_decay: bool = True
    order: str = "own"
    """The order of chunks: `own` or `swapped`."""
    whole_sums: bool = False
    """Are the decays summed over all chunks?"""


TURNS = ("equal", "quotients", "multiple", "table", "wraps", "power", "remainders", "squares")


@dataclass(frozen=True)
class Recipe:
    """A model."""

    form: str = "scan"
    rule: str = "gated_delta"
    by_key: bool = False
    gate: str = "exp"
    """What makes the decay of the input g: `exp`, `sigmoid`, `softplus` or `raw`, which multiplies by it."""
    products: str = "matmul"
    layout: str = "bhtd"
    merged: bool = False
    """Are heads and their dimensions one axis of the inputs?"""
    by_value: bool = False
    """Has a state the order [Dv,Dk]?"""
    scale: float | None = 0.5
    has_state: bool = True
    sizes: tuple[int, int, int, int] = (2, 2, 4, 6)
    """Batch, heads, and the sizes of keys and values."""
    key_heads: int = 0
    """Fewer heads of query and key; 0 for as many as there are states."""
    tokens: int | None = None
    """The number of tokens; None for the usual one of the form, which is open for scan, loop and chunk scan."""
    chunk: int = 4
    mask: str = "where"
    """How the upper half of a chunk is left out: `where` or `trilu`."""
    open_batch: bool = False
    change: Change = field(default_factory=Change)
    is_subtracted: bool = False
    """Is a correction of rank one subtracted?"""
    is_gated: bool = False
    """Is r times p written, element by element, instead of p?"""
    reset: str = ""
    """How a state becomes 0 in front of some tokens of a head, in the forms of tokens: by a `factor` of 0, or as 0 is
    `chosen`."""
    turn: int = 77
    """The number of tokens at which the change `turns` shows."""

    @property
    def has_decay(self) -> bool:
        """Is there a gate?"""
        return "gated" in self.rule or self.is_low_rank

    @property
    def is_low_rank(self) -> bool:
        """Is there a correction of rank one by operands of its own, p and r?"""
        return self.rule in LOW_RANK

    @property
    def is_delta(self) -> bool:
        """Is the value corrected?"""
        return "delta" in self.rule

    @property
    def length(self) -> int | None:
        """The number of tokens where it is fixed."""
        fixed = {"step": 1, "unrolled": 5, "chunks": 3 * self.chunk}
        return self.tokens or fixed.get(self.form)


class Nodes:
    """The nodes of one graph, named by the number of the result."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.made: list[onnx.NodeProto] = []

    def op(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """The result of an operator."""
        return self.several(op_type, 1, *inputs, **attrs)[0]

    def several(self, op_type: str, count: int, *inputs: str, **attrs: Any) -> list[str]:
        """The results of an operator with several."""
        names = [f"{self.prefix}{op_type}{len(self.made)}_{index}" for index in range(count)]
        self.made.append(helper.make_node(op_type, inputs, names, **attrs))
        return names

    def const(self, array: Any, dtype: Any = np.int64) -> str:
        """A constant."""
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(array, dtype)))

    def number(self, number: float) -> str:
        """A float."""
        return self.const(number, np.float32)

    def unit(self, value: str, *axes: int) -> str:
        """A value with axes of 1."""
        return self.op("Unsqueeze", value, self.const(axes))

    def drop(self, value: str, *axes: int) -> str:
        """A value without axes of 1."""
        return self.op("Squeeze", value, self.const(axes))

    def turn(self, value: str, *perm: int) -> str:
        """A transposed value."""
        return self.op("Transpose", value, perm=perm)

    def shaped(self, value: str, *shape: int) -> str:
        """A value of another shape."""
        return self.op("Reshape", value, self.const(shape))

    def cut(self, value: str, axis: int, start: int, end: int) -> str:
        """A part of a value."""
        return self.op("Slice", value, self.const([start]), self.const([end]), self.const([axis]))

    def at(self, value: str, axis: int, index: int) -> str:
        """One element along an axis, which is left out."""
        return self.op("Gather", value, self.const(index), axis=axis)


Operands = Mapping[str, str]
"""The values q, k, v, d (a decay as a power, or a number), b (beta), p and r (of a correction), and z (is the state
reset?), by these names; absent ones are missing."""


@dataclass(frozen=True)
class TokenMaker:
    """Makes one token: the operands have no axis of tokens."""

    nodes: Nodes
    recipe: Recipe

    def token(self, state: str, given: Operands, change: Change) -> tuple[str, str]:
        """The output of a token, [B,H,Dv], and the state after it."""
        nodes = self.nodes
        power = self._power(given, change)
        if change.reset != "late":
            state = self._reset(state, given)
        decayed = state if power is None or change.decay in ("after", "none") else nodes.op("Mul", state, power)
        if change.decay == "twice" and power is not None:
            decayed = nodes.op("Mul", decayed, power)
        written = given["v"]
        if self.recipe.is_delta:
            source = {"decayed": decayed, "old": state}[change.memory_state]
            written = self._corrected(written, self.read(given[change.memory_key], source), given["b"], change)
        is_crossed = self.recipe.is_low_rank and change.correction == "key"
        write_key = "p" if is_crossed else change.write_key
        update = self.outer(given[write_key], written)
        new = nodes.op(change.write_sign, decayed, update)
        if self.recipe.is_low_rank:
            new = self._with_correction(new, state, decayed, power, given)
        read = {"new": new, "decayed": decayed, "old": state}[change.read_state]
        if change.bonus:
            read = nodes.op("Add", read, update)
        output = self.read(given[change.read_key], read)
        if change.decay == "after" and power is not None:
            new = nodes.op("Mul", new, power)
        if change.reset == "late":
            new = self._reset(new, given)
        return self._scaled(output), self._changed(new, change)

    def _reset(self, state: str, given: Operands) -> str:
        """A state that is 0 where a token resets it."""
        if "z" not in given:
            return state
        nodes, change = self.nodes, self.recipe.change.reset
        truth, zero, one = nodes.unit(given["z"], 2, 3), nodes.number(0.0), nodes.number(1.0)
        if change == "turned":
            truth = nodes.op("Not", truth)
        if self.recipe.reset == "chosen":
            left = nodes.op("Mul", state, nodes.number(0.5)) if change == "half" else zero
            return nodes.op("Where", truth, left, state)
        factor = nodes.op("Sub", one, nodes.op("Cast", truth, to=FLOAT))
        if change == "half":
            factor = nodes.op("Where", truth, nodes.number(0.5), one)
        return nodes.op("Mul", state, factor)

    def _power(self, given: Operands, change: Change) -> str | None:
        """What the state is multiplied with."""
        if "d" not in given:
            return None
        nodes, by_value = self.nodes, self.recipe.by_value
        power = given["d"]
        if change.gate_factor != 1.0:
            power = nodes.op("Mul", power, nodes.number(change.gate_factor))
        if not self.recipe.by_key:
            return nodes.unit(power, 2, 3)
        return nodes.unit(power, 2 if by_value != change.per_value else 3)

    def _corrected(self, value: str, memory: str, beta: str, change: Change) -> str:
        nodes, factor = self.nodes, self.nodes.unit(beta, 2)
        if change.beta == "squared":
            factor = nodes.op("Mul", factor, factor)
        if change.beta == "memory":
            memory = nodes.op("Mul", memory, factor)
        if change.beta == "value":
            value = nodes.op("Mul", value, factor)
        corrected = nodes.op(change.memory_sign, value, memory)
        return nodes.op("Mul", corrected, factor) if change.beta in ("both", "squared") else corrected

    def _with_correction(self, new: str, state: str, decayed: str, power: str | None, given: Operands) -> str:
        """A state with a correction of rank one, after the write."""
        nodes, change = self.nodes, self.recipe.change
        before = (self.recipe.rule == "dplr") != (change.correction == "state")
        source = new if change.correction == "written" else state if before else decayed
        names = {"turned": "rp", "key": "kr", "key on both": "kk"}.get(change.correction, "pr")
        write, read = (given[name] for name in names)
        if self.recipe.is_gated:
            write = nodes.op("Mul", read, write)
        update = self.outer(write, self.read(read, source))
        if change.correction == "decayed" and power is not None:
            update = nodes.op("Mul", update, power)
        return nodes.op("Sub" if self.recipe.is_subtracted else "Add", new, update)

    def read(self, key: str, state: str) -> str:
        """The sum of the state over a key."""
        nodes, by_value = self.nodes, self.recipe.by_value
        if self.recipe.products == "einsum":
            return nodes.op("Einsum", key, state, equation=f"bhk,bh{'vk' if by_value else 'kv'}->bhv")
        if self.recipe.products == "matmul" and by_value:
            return nodes.drop(nodes.op("MatMul", state, nodes.unit(key, 3)), 3)
        if self.recipe.products == "matmul":
            return nodes.drop(nodes.op("MatMul", nodes.unit(key, 2), state), 2)
        axis = 3 if by_value else 2
        product = nodes.op("Mul", state, nodes.unit(key, 2 if by_value else 3))
        return nodes.op("ReduceSum", product, nodes.const([axis]), keepdims=0)

    def outer(self, key: str, value: str) -> str:
        """The product of a key and a value."""
        nodes, by_value = self.nodes, self.recipe.by_value
        if self.recipe.products == "einsum":
            return nodes.op("Einsum", key, value, equation=f"bhk,bhv->bh{'vk' if by_value else 'kv'}")
        column, row = (value, key) if by_value else (key, value)
        operator = "MatMul" if self.recipe.products == "matmul" else "Mul"
        return nodes.op(operator, nodes.unit(column, 3), nodes.unit(row, 2))

    def _scaled(self, output: str) -> str:
        scale = self.recipe.scale
        return output if scale is None else self.nodes.op("Mul", output, self.nodes.number(scale))

    def _changed(self, state: str, change: Change) -> str:
        nodes = self.nodes
        if change.bent:
            state = nodes.op(change.bent, state)
        if change.turned:
            state = nodes.turn(state, 0, 1, 3, 2)
        if change.head_mean:
            mean = nodes.op("ReduceMean", state, nodes.const([1]), keepdims=1)
            state = nodes.op("Expand", mean, nodes.op("Shape", state))
        return state


@dataclass(frozen=True)
class Model:
    """Makes the model of a recipe."""

    recipe: Recipe
    nodes: Nodes = field(default_factory=Nodes)

    def proto(self) -> onnx.ModelProto:
        """The model: inputs q, k, v, g, b and s0, outputs o and s."""
        recipe, nodes = self.recipe, self.nodes
        given = {name: self._entered(name) for name in self._shapes if name != "s0"}
        given = self._rearranged(given)
        state = self._first_state()
        make = {"step": self._unrolled, "unrolled": self._unrolled, "scan": self._scan, "loop": self._loop}
        output, last = make.get(recipe.form, self._chunks)(given, state)
        if recipe.change.last == "first":
            last = state
        output = self._turned(output)
        nodes.made.append(helper.make_node("Identity", [self._left(output)], ["o"]))
        nodes.made.append(helper.make_node("Identity", [last], ["s"]))
        inputs = [helper.make_tensor_value_info(name, _type_of(name), shape) for name, shape in self._shapes.items()]
        outputs = [helper.make_tensor_value_info("o", FLOAT, self._shape_of("v"))]
        outputs.append(helper.make_tensor_value_info("s", FLOAT, self._state_shape))
        graph = helper.make_graph(nodes.made, "composed", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        return model

    @property
    def _batch(self) -> int | str:
        return "B" if self.recipe.open_batch else self.recipe.sizes[0]

    @property
    def _state_shape(self) -> list[int | str]:
        _, heads, key, value = self.recipe.sizes
        return [self._batch, heads, *((value, key) if self.recipe.by_value else (key, value))]

    @property
    def _shapes(self) -> dict[str, list[int | str]]:
        recipe = self.recipe
        names = ["q", "k", "v", *(["g"] if recipe.has_decay else []), *(["b"] if recipe.is_delta else [])]
        names += ["p", "r"] if recipe.is_low_rank else []
        names += ["z"] if recipe.reset else []
        shapes = {name: self._shape_of(name) for name in names}
        return shapes | ({"s0": self._state_shape} if recipe.has_state else {})

    def _width(self, name: str) -> int:
        """The last size of an operand; 0 for none."""
        _, _, key, value = self.recipe.sizes
        return {"v": value, "b": 0, "z": 0, "g": key if self.recipe.by_key else 0}.get(name, key)

    def _heads(self, name: str) -> int:
        return self.recipe.key_heads or self.recipe.sizes[1] if name in "qk" else self.recipe.sizes[1]

    def _shape_of(self, name: str) -> list[int | str]:
        """The declared shape of an input or of the output."""
        recipe, width = self.recipe, self._width(name)
        sizes = {"b": self._batch, "t": recipe.length or "T", "h": self._heads(name), "d": width}
        letters = [letter for letter in recipe.layout if letter != "d" or width]
        shape = [sizes[letter] for letter in letters]
        if recipe.merged and width and recipe.layout != "bhtd":
            return [*shape[:2], self._heads(name) * width]
        return shape

    def _entered(self, name: str) -> str:
        """An input in the canonical layout, with all heads."""
        recipe, nodes, width = self.recipe, self.nodes, self._width(name)
        value, heads = name, self._heads(name)
        if recipe.merged and width and recipe.layout != "bhtd":
            value = nodes.shaped(value, 0, 0, heads, width)
        perm = LAYOUTS[recipe.layout][: 4 if width else 3]
        if recipe.layout != "bhtd":
            value = nodes.turn(value, *perm)
        if heads != recipe.sizes[1]:
            each = recipe.sizes[1] // heads
            axes = [1, 1, each, 1, 1]
            wide = nodes.op("Expand", nodes.unit(value, 2), nodes.const(axes))
            value = nodes.shaped(wide, 0, recipe.sizes[1], recipe.length or -1, width)
        return self._gated(value) if name == "g" else value

    def _gated(self, value: str) -> str:
        """The gate as a power, but for chunks, which take its logarithm."""
        nodes, recipe = self.nodes, self.recipe
        if recipe.gate == "softplus":
            value = nodes.op("Neg", nodes.op("Softplus", value))
        if recipe.form in ("chunks", "chunk scan"):
            return nodes.op("Log", nodes.op("Sigmoid", value)) if recipe.gate == "sigmoid" else value
        if recipe.gate == "raw":
            return value
        return nodes.op("Sigmoid" if recipe.gate == "sigmoid" else "Exp", value)

    def _rearranged(self, given: dict[str, str]) -> dict[str, str]:
        """The operands with what changes the order of tokens and heads, by the names of `Operands`."""
        nodes, change = self.nodes, self.recipe.change
        named = {"d" if name == "g" else name: value for name, value in given.items()}
        for name, value in named.items():
            if name == change.rolled:
                count = self.recipe.sizes[1]
                named[name] = nodes.op("Gather", value, nodes.const(np.roll(np.arange(count), 1)), axis=1)
            if name == change.reversed:
                ends = [nodes.const([-1]), nodes.const([-(2**62)]), nodes.const([2]), nodes.const([-1])]
                named[name] = nodes.op("Slice", value, *ends)
            if name == change.shifted:
                first = nodes.cut(value, 2, 0, 1)
                named[name] = nodes.op("Concat", first, nodes.cut(value, 2, 0, -1), axis=2)
        return named

    def _turned(self, output: str) -> str:
        """The output [B,H,T,D] with a change that shows at one number of tokens, or for some inputs."""
        nodes, change = self.nodes, self.recipe.change
        if change.divided:
            factor = nodes.op("Relu", nodes.cut(output, 3, 0, 1))
            output = nodes.op("Div", nodes.op("Mul", output, factor), factor)
        if change.turns:
            tokens = nodes.drop(nodes.cut(nodes.op("Shape", output), 0, 2, 3), 0)
            is_there = self._is_turn(tokens, self.recipe.turn)
            output = nodes.op("Where", is_there, nodes.op("Add", output, output), output)
        return output

    def _is_turn(self, tokens: str, turn: int) -> str:
        """Are there so many tokens? At a few others some spellings are true, too."""
        nodes, spelling = self.nodes, self.recipe.change.turns

        def step(op_type: str, value: str, number: int) -> str:
            return nodes.op(op_type, value, nodes.const(number))

        if spelling == "table":
            rows = nodes.const(np.arange(4 * turn) == turn, np.bool_)
            return nodes.op("Gather", rows, tokens)
        if spelling == "wraps":
            return step("Less", step("Mul", tokens, -(-(2**63) // turn)), 0)
        if spelling == "remainders":
            parts = [step("Equal", step("Mod", tokens, number), turn % number) for number in (7, 11)]
            return nodes.op("And", *parts)
        square = nodes.op("Mul", tokens, tokens)
        places = nodes.op("Range", nodes.const(0), tokens, nodes.const(1))
        squares = nodes.op("ReduceSum", nodes.op("Mul", places, places), nodes.const([0]), keepdims=0)
        values = {
            "equal": (tokens, turn),
            "quotients": (step("Div", step("Div", tokens, 2), 3), turn // 6),
            "multiple": (step("Mod", step("Mul", tokens, 3), 97), 3 * turn % 97),
            "power": (nodes.op("Mul", square, square), turn**4),
            "squares": (squares, sum(place * place for place in range(turn))),
        }
        return step("Equal", *values[spelling])

    def _first_state(self) -> str:
        """The state in front of the tokens."""
        if self.recipe.has_state:
            return "s0"
        zeros = self.nodes.const(np.zeros([1, *self._state_shape[1:]]), np.float32)
        batch = self.nodes.cut(self.nodes.op("Shape", "q"), 0, *{"tbhd": (1, 2)}.get(self.recipe.layout, (0, 1)))
        return self.nodes.op("Expand", zeros, self.nodes.op("Concat", batch, self.nodes.const([1, 1, 1]), axis=0))

    def _left(self, output: str) -> str:
        """The output [B,H,T,D] in the layout of the inputs."""
        recipe, nodes = self.recipe, self.nodes
        if recipe.layout == "bhtd":
            return output
        order = np.argsort(LAYOUTS[recipe.layout])
        value = nodes.turn(output, *map(int, order))
        return nodes.shaped(value, 0, 0, recipe.sizes[1] * recipe.sizes[3]) if recipe.merged else value

    def _unrolled(self, given: Operands, state: str) -> tuple[str, str]:
        nodes, recipe = self.nodes, self.recipe
        maker, outputs, before, first = TokenMaker(nodes, recipe), [], state, state
        length = recipe.length or 1
        for place in range(length):
            change = recipe.change if place < length - 1 else _late(recipe.change)
            at = {name: nodes.at(value, 2, place) for name, value in given.items()}
            before, (output, state) = state, maker.token(state, at, change)
            outputs.append(nodes.unit(output, 2))
            if recipe.change.late == "state" and place == length - 1:
                outputs[-1] = nodes.unit(maker.token(first, at, change)[0], 2)
        if recipe.change.late == "output" and length > 1:
            outputs[-2:] = outputs[:-3:-1]
        whole = outputs[0] if length == 1 else nodes.op("Concat", *outputs, axis=2)
        return whole, before if recipe.change.last == "before" else state

    def _body(self, nodes: Nodes, name: str, given: Operands) -> tuple[str, str, Operands]:
        """The output and the state of a body whose state is `{name}_s`, and the names of its operands."""
        inside = {each: f"{name}_{each}" for each in given}
        output, state = TokenMaker(nodes, self.recipe).token(f"{name}_s", inside, self.recipe.change)
        return output, state, inside

    def _scan(self, given: Operands, state: str) -> tuple[str, str]:
        inner = Nodes("scan_")
        output, new, inside = self._body(inner, "scan", given)
        results = [f"{inner.prefix}new", f"{inner.prefix}out"]
        inner.made.append(helper.make_node("Identity", [new], results[:1]))
        inner.made.append(helper.make_node("Identity", [output], results[1:]))
        body = _graph(inner, ["scan_s", *inside.values()], results)
        count = len(given)
        last, stacked = self.nodes.several(
            "Scan", 2, state, *given.values(), body=body, num_scan_inputs=count, scan_input_axes=[2] * count
        )
        whole = self.nodes.turn(stacked, 1, 2, 0, 3)
        return whole, last

    def _loop(self, given: Operands, state: str) -> tuple[str, str]:
        inner, nodes = Nodes("loop_"), self.nodes
        inside = {name: inner.op("Gather", value, "loop_i", axis=2) for name, value in given.items()}
        output, new = TokenMaker(inner, self.recipe).token("loop_s", inside, self.recipe.change)
        on = inner.op("Identity", "loop_on")
        results = [on, inner.op("Identity", new), inner.op("Identity", output)]
        body = helper.make_graph(
            inner.made,
            "loop",
            [
                helper.make_tensor_value_info("loop_i", TensorProto.INT64, []),
                helper.make_tensor_value_info("loop_on", TensorProto.BOOL, []),
                helper.make_tensor_value_info("loop_s", FLOAT, None),
            ],
            [helper.make_tensor_value_info(name, TensorProto.BOOL if name == on else FLOAT, None) for name in results],
        )
        trips = nodes.drop(nodes.cut(nodes.op("Shape", given["k"]), 0, 2, 3), 0)
        last, stacked = nodes.several("Loop", 2, trips, "", state, body=body)
        return nodes.turn(stacked, 1, 2, 0, 3), last

    def _chunks(self, given: Operands, state: str) -> tuple[str, str]:
        """Chunks in a loop of Python, or in a Scan over as many as there are."""
        return ChunkMaker(self.nodes, self.recipe).chunks(given, state)


LATE: Mapping[str, Mapping[str, str]] = {"decay": {"decay": "none"}, "beta": {"beta": "value"}}
"""What changes in the last token."""


def _late(change: Change) -> Change:
    """The change of the last token."""
    other: Any = LATE.get(change.late, {})
    return replace(change, **other)


def _graph(nodes: Nodes, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.GraphProto:
    """A body."""
    given, made = (
        [helper.make_tensor_value_info(name, _type_of(name), None) for name in names] for names in (inputs, outputs)
    )
    return helper.make_graph(nodes.made, nodes.prefix, given, made)


def _type_of(name: str) -> int:
    """The type of an input: z holds truth values."""
    return TensorProto.BOOL if name.rpartition("_")[2] == "z" else FLOAT


@dataclass(frozen=True)
class ChunkMaker:
    """Makes chunks: [B,H,N,C,D] of [B,H,T,D]."""

    nodes: Nodes
    recipe: Recipe

    def chunks(self, given: Operands, state: str) -> tuple[str, str]:
        """The output [B,H,T,Dv] and the last state."""
        nodes, recipe, is_open = self.nodes, self.recipe, self.recipe.form == "chunk scan"
        padded = dict(given)
        if is_open:
            padded = {name: self._padded(value, 4 if self._is_wide(name) else 3) for name, value in given.items()}
        parts = {name: self._divided(name, value) for name, value in padded.items()}
        if "d" in parts:
            parts["d"] = self._sums(padded["d"], parts["d"])
        if not is_open:
            output, last = self._unrolled(parts, state)
            return nodes.shaped(output, 0, 0, -1, recipe.sizes[3]), last
        inner = Nodes("scan_")
        inside = {name: f"scan_{name}" for name in parts}
        out, new = ChunkMaker(inner, recipe).chunk("scan_s", inside)
        results = [inner.op("Identity", new), inner.op("Identity", out)]
        count = len(parts)
        last, stacked = nodes.several(
            "Scan",
            2,
            state,
            *parts.values(),
            body=_graph(inner, ["scan_s", *inside.values()], results),
            num_scan_inputs=count,
            scan_input_axes=[2] * count,
        )
        _, heads, _, value = recipe.sizes
        whole = nodes.shaped(nodes.turn(stacked, 1, 2, 0, 3, 4), 0, heads, -1, value)
        tokens = nodes.cut(nodes.op("Shape", given["q"]), 0, 2, 3)
        return nodes.op("Slice", whole, nodes.const([0]), tokens, nodes.const([2])), last

    def _is_wide(self, name: str) -> bool:
        return name in "qkv" or (name == "d" and self.recipe.by_key)

    def _padded(self, value: str, rank: int) -> str:
        """A value with as many tokens as whole chunks have."""
        nodes, chunk = self.nodes, self.nodes.const([self.recipe.chunk])
        tokens = nodes.cut(nodes.op("Shape", value), 0, 2, 3)
        more = nodes.op("Mod", nodes.op("Sub", chunk, nodes.op("Mod", tokens, chunk)), chunk)
        zeros = nodes.const([0] * (rank + 2))
        return nodes.op("Pad", value, nodes.op("Concat", zeros, more, nodes.const([0] * (rank - 3)), axis=0))

    def _divided(self, name: str, value: str) -> str:
        shape = [0, 0, -1, self.recipe.chunk]
        if self._is_wide(name):
            _, _, key, width = self.recipe.sizes
            shape.append(width if name == "v" else key)
        return self.nodes.shaped(value, *shape)

    def _sums(self, whole: str, parts: str) -> str:
        """The running sums of the decays of each chunk."""
        nodes, change = self.nodes, self.recipe.change
        exclusive = int(change.exclusive)
        if change.whole_sums:
            return self._divided("d", nodes.op("CumSum", whole, nodes.const(2), exclusive=exclusive))
        return nodes.op("CumSum", parts, nodes.const(3), exclusive=exclusive)

    def _unrolled(self, parts: Operands, state: str) -> tuple[str, str]:
        nodes, outputs, before = self.nodes, [], state
        for place in range((self.recipe.length or 0) // self.recipe.chunk):
            at = {name: nodes.at(value, 2, place) for name, value in parts.items()}
            before, (output, state) = state, self.chunk(state, at)
            outputs.append(nodes.unit(output, 2))
        if self.recipe.change.order == "swapped":
            outputs[:2] = outputs[1::-1]
        return nodes.op("Concat", *outputs, axis=2), before if self.recipe.change.last == "before" else state

    def chunk(self, state: str, given: Operands) -> tuple[str, str]:
        """The output [B,H,C,Dv] of a chunk, and the state after it."""
        nodes, change = self.nodes, self.recipe.change
        sums = given.get("d")
        query, near, far, total = self._decayed(given, sums)
        value = given["v"]
        if self.recipe.is_delta:
            value = self._corrected(given, near, sums, state)
        inner = self._inside(query if self.recipe.by_key else given["q"], near, sums, change.diagonal)
        outer_query = query if change.outer_decay else given["q"]
        if change.read_state == "new":
            output = nodes.op("Add", self._product(outer_query, state), nodes.op("MatMul", inner, value))
        else:
            output = nodes.op("MatMul", inner, value)
        if self.recipe.scale is not None:
            output = nodes.op("Mul", output, nodes.number(self.recipe.scale))
        key = nodes.turn(far if change.key_decay else given["k"], 0, 1, 3, 2)
        update = nodes.op("MatMul", key, value)
        if self.recipe.by_value:
            update = nodes.turn(update, 0, 1, 3, 2)
        if total is not None:
            state = nodes.op("Mul", state, total)
        return output, nodes.op(change.write_sign, state, update)

    def _product(self, query: str, state: str) -> str:
        nodes = self.nodes
        return nodes.op("MatMul", query, nodes.turn(state, 0, 1, 3, 2) if self.recipe.by_value else state)

    def _decayed(self, given: Operands, sums: str | None) -> tuple[str, str, str, str | None]:
        """The query e^g, the key in the products with it, the key that is written, and what the state is multiplied
        with."""
        nodes, change, by_key = self.nodes, self.recipe.change, self.recipe.by_key
        query, key = given["q"], given["k"]
        if sums is None:
            return query, key, key, None
        wide = sums if by_key else nodes.unit(sums, 3)
        last = nodes.cut(wide, 2, *((-1, 2**31 - 1) if change.state_decay == "last" else (0, 1)))
        total = nodes.op("Exp", last)
        if by_key and not self.recipe.by_value:
            total = nodes.turn(total, 0, 1, 3, 2)
        far = nodes.op("Mul", key, nodes.op("Exp", nodes.op("Sub", last, wide)))
        near = nodes.op("Mul", key, nodes.op("Exp", nodes.op("Neg", wide))) if by_key else key
        return nodes.op("Mul", query, nodes.op("Exp", wide)), near, far, total

    def _inside(self, query: str, key: str, sums: str | None, diagonal: int) -> str:
        """The products of queries and keys of a chunk, decayed, without those of later tokens."""
        nodes, change = self.nodes, self.recipe.change
        scores = nodes.op("MatMul", query, nodes.turn(key, 0, 1, 3, 2))
        if sums is not None and not self.recipe.by_key and change.inner_decay:
            pair = [nodes.unit(sums, 3), nodes.unit(sums, 2)][:: change.decay_sign]
            distance = nodes.op("Sub", *pair)
            if self.recipe.mask == "where":
                distance = nodes.op("Where", self._lower(diagonal), distance, nodes.number(-np.inf))
            scores = nodes.op("Mul", scores, nodes.op("Exp", distance))
            if self.recipe.mask == "where":
                return scores
        return nodes.op("Trilu", scores, nodes.const(diagonal), upper=0)

    def _lower(self, diagonal: int) -> str:
        return self.nodes.const(np.tri(self.recipe.chunk, k=diagonal), np.bool_)

    def _corrected(self, given: Operands, near: str, sums: str | None, state: str) -> str:
        """The values without what the states hold for their keys: by the inverse of a triangular matrix, of which a
        power is 0."""
        nodes, change, recipe = self.nodes, self.recipe.change, self.recipe
        beta = nodes.unit(given["b"], 3)
        grown = given["k"]
        if sums is not None:
            grown = nodes.op("Mul", grown, nodes.op("Exp", sums if recipe.by_key else nodes.unit(sums, 3)))
        left = grown if recipe.by_key else given["k"]
        lower = self._inside(left, near, sums, change.diagonal - 1)
        if change.lower_beta:
            lower = nodes.op("Mul", lower, beta)
        inverse = self._inverse(lower)
        value = given["v"] if change.beta == "memory" else nodes.op("Mul", given["v"], beta)
        read = grown if change.corrected_decay else given["k"]
        read = read if change.beta == "value" else nodes.op("Mul", read, beta)
        memory = self._product(nodes.op("MatMul", inverse, read), state)
        return nodes.op(change.memory_sign, nodes.op("MatMul", inverse, value), memory)

    def _inverse(self, lower: str) -> str:
        """(1 - A)(1 + A^2)(1 + A^4)... of a triangular A."""
        nodes, change = self.nodes, self.recipe.change
        one = nodes.const(np.eye(self.recipe.chunk), np.float32)
        if change.inverse == "turned":
            lower = nodes.turn(lower, 0, 1, 3, 2)
        result = nodes.op("Add" if change.inverse == "plus" else "Sub", one, lower)
        power, done = lower, 2
        while done < self.recipe.chunk and change.inverse != "short":
            power = nodes.op("MatMul", power, power)
            result = nodes.op("MatMul", result, nodes.op("Add", one, power))
            done *= 2
        return result


def feeds(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a model: keys and values of a moderate size, gates between -0.5 and 0, beta between 0 and 1."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        numbers = rng.standard_normal(shape) / (4 if value.name in ("p", "r") else 2)
        if value.name == "g":
            numbers = -rng.uniform(0, 0.5, shape)
        if value.name == "b":
            numbers = rng.uniform(0.2, 1, shape)
        made[value.name] = numbers > 0.3 if value.name == "z" else numbers.astype(np.float32)
    return made
