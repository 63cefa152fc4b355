"""Calls of operators that are attention already, drawn from their schemas.

The schemas are those of the installed ONNX Runtime. They say which inputs, outputs and attributes there are, of which
types, and which of them may be absent: so an input that a later release adds is drawn without a change here. What a
schema does not say is how large an input is and what it holds. `FORMS` knows both by the input's name; of a name that
it does not know the shape is one of `ANY` or `COUNTS`, and integers are small. ONNX Runtime says which calls are right:
a case is the first of some draws that it takes.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as runtime
from onnx import helper, numpy_helper

from fa_compiler.passes.attention_ops import FAMILIES
from tools.fuzz.difference import LARGEST, Array, Feed

Sizes = dict[str, int]
Rng = np.random.Generator
TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}
"""The types that are drawn: those that NumPy has and that an attention has a CPU kernel for."""
RARE = ("float64", "int64", "int32", "int8", "uint8")
"""Types that are drawn seldom where a float is allowed, too."""
LETTERS = "BSTPM"
"""Sizes that a model may leave open: batch, rows, new keys, keys of a past, room of a cache."""


@dataclass(frozen=True)
class Port:
    """An input or output of a schema: its name, its type parameter, the types it may have, whether it may be absent."""

    name: str
    parameter: str
    types: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class Schema:
    """What is read of an operator's schema. `attributes` has the kind, the description and whether it is required."""

    domain: str
    name: str
    version: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, tuple[str, str, bool]]

    @staticmethod
    def of(schema: Any) -> Schema:
        """The schema as this module needs it, from onnx's or ONNX Runtime's object."""
        allowed = {each.type_param_str: tuple(each.allowed_type_strs) for each in schema.type_constraints}

        def ports(given: Any) -> tuple[Port, ...]:
            return tuple(
                Port(
                    each.name,
                    each.typeStr if hasattr(each, "typeStr") else each.type_str,
                    tuple(TYPES[x] for x in allowed.get(_type(each), (_type(each),)) if x in TYPES),
                    "Optional" in str(each.option),
                )
                for each in given
            )

        attributes = {
            name: (str(each.type).split(".")[-1], each.description or "", bool(each.required))
            for name, each in schema.attributes.items()
        }
        return Schema(
            schema.domain, schema.name, schema.since_version, ports(schema.inputs), ports(schema.outputs), attributes
        )


def _type(port: Any) -> str:
    return str(port.typeStr if hasattr(port, "typeStr") else port.type_str)


@functools.cache
def schemas() -> tuple[Schema, ...]:
    """The operators that are read (passes/attention_ops) and have a schema and a kernel in ONNX Runtime."""
    found = [each for each in runtime.get_all_operator_schema() if (each.domain, each.name) in FAMILIES]
    return tuple(sorted(map(Schema.of, found), key=lambda each: (each.domain, each.name, each.version)))


Shape = tuple[str | int, ...]
"""Sizes by their names in `Sizes`, or as numbers."""
Content = Callable[["Call", tuple[int, ...], Rng], Array]


def _normal(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    return rng.standard_normal(shape)


def _bias(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    """Numbers, some of which exclude keys, at times those of a whole row."""
    numbers = rng.standard_normal(shape)
    kind = rng.integers(4)
    if kind:
        excluding = rng.choice([-np.inf, -LARGEST, -65504.0, -1e4, -1e9])
        numbers = np.where(rng.random(shape) < 0.3, excluding, numbers if kind > 1 else 0.0)
        if rng.random() < 0.3 and len(shape) > 1:
            numbers = np.where(rng.random((*shape[:-1], 1)) < 0.3, excluding, numbers)
    return numbers


def _padding(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    """Lengths, or 1 where a key counts."""
    if len(shape) == 1:
        return rng.integers(0, call.sizes["L"] + 1, shape)
    return rng.choice([0, 1, 1, 1, 2, -1] if rng.random() < 0.2 else [0, 1, 1], shape)


def _behind(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    """The last keys of batch entries."""
    short = rng.integers(0, max(1, call.sizes["S"]), shape) if rng.random() < 0.3 else 0
    return np.maximum(np.resize(call.before, shape) + call.sizes["S"] - 1 - short, 0)


def _number(name: str) -> Content:
    return lambda call, shape, rng: np.full(shape, call.sizes[name])


def _below(name: str) -> Content:
    return lambda call, shape, rng: rng.integers(0, max(1, call.sizes[name]), shape)


def _beams(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    """ONNX Runtime ends the process where there are several beams without the table of their caches."""
    return np.full(shape, call.sizes["B"] if "cache_indirection" in call.shapes else 1)


def _scale(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    return rng.random(shape) * 0.02 + 0.01


def _small(call: Call, shape: tuple[int, ...], rng: Rng) -> Array:
    return rng.integers(0, max(1, call.sizes["S"]) + 1, shape)


@dataclass(frozen=True)
class Form:
    """The shapes that an input may have, what it holds, and whether it is a constant: always, never, or at times."""

    shapes: tuple[Shape, ...]
    content: Content = _normal
    constant: float = 0.0


WIDE: tuple[Shape, ...] = (("B", "S", "ND"),)
KEYS: tuple[Shape, ...] = (("B", "T", "KD"), ("B", "T", "KD"), ("B", "K", "T", "D"))
OVER_SCORES: tuple[Shape, ...] = (
    ("B", "N", "S", "L"), (1, "N", "S", "L"), ("B", 1, "S", "L"), (1, 1, "S", "L"), ("B", 1, 1, "L"), ("S", "L"),
    ("L",),
)  # fmt: skip
PADDINGS: tuple[Shape, ...] = (("B",), ("2B",), ("3B+2",), ("B", "L"), ("B", "S", "L"), ("B", 1, "L", "L"))
CACHE: tuple[Shape, ...] = (("B", "K", "P", "D"),)
PROJECTED: tuple[Shape, ...] = (("QKV",),)
ONE: tuple[Shape, ...] = ((), (1,))
FORMS: dict[str, Form] = {
    "query": Form((*WIDE, *WIDE, *WIDE, ("B", "S", "N", 3, "D"), ("B", "S", "QKV"))),
    "key": Form((*KEYS, ("B", "T", "K", 2, "D"))),
    "value": Form((("B", "T", "KE"), ("B", "T", "KE"), ("B", "K", "T", "E"))),
    "Q": Form((("B", "N", "S", "D"), ("B", "S", "ND"))),
    "K": Form((("B", "K", "T", "D"), ("B", "T", "KD"))),
    "V": Form((("B", "K", "T", "E"), ("B", "T", "KE"))),
    "past_key": Form(CACHE),
    "past_value": Form((("B", "K", "P", "E"),)),
    "past": Form(((2, "B", "N", "P", "D"),)),
    "attn_mask": Form(OVER_SCORES, _bias),
    "attention_bias": Form(OVER_SCORES[:4], _bias),
    "nonpad_kv_seqlen": Form((("B",),), _below("T+1"), 0.3),
    "key_padding_mask": Form(PADDINGS, _padding),
    "mask_index": Form(PADDINGS, _padding),
    "seqlens_k": Form((("B",),), _behind, 0.7),
    "total_sequence_length": Form(ONE, _number("L"), 0.7),
    "past_sequence_length": Form(((1,), ()), _number("before"), 0.5),
    "cos_cache": Form((("M", "D/2"),), _normal, 0.5),
    "sin_cache": Form((("M", "D/2"),), _normal, 0.5),
    "position_ids": Form((("B", "S"),), _below("M")),
    "head_sink": Form((("N",),)),
    "k_scale": Form(((1,), (1, "K", 1, "D")), _scale, 0.9),
    "v_scale": Form(((1,), (1, "K", 1, "D")), _scale, 0.9),
    "beam_width": Form(((1,),), _beams, 0.8),
    "cache_indirection": Form(((1, "B", "P"), ("B", 1, "P"), ("B", 2, "P")), _below("B")),
    "bias": Form(PROJECTED),
    "input": Form((("B", "S", "I"),)),
    "weights": Form((("I", "QKV"),), _normal, 0.8),
    "weight": Form((("I", "QKV"),), _normal, 0.8),
    "input_scale": Form(ONE, _scale, 0.8),
    "weight_scale": Form((*ONE, ("QKV",)), _scale, 0.8),
    "input_zero_point": Form(ONE, _below("Z"), 0.8),
    "weight_zero_point": Form(ONE, _below("Z"), 0.8),
}
"""What is known of inputs by their names."""
ANY: tuple[Shape, ...] = ((1,), ("N",), ("D",), ("B", "S"), ("B", "L"), ("B", "N", "S", "L"))
COUNTS: tuple[Shape, ...] = (*[("B",)] * 5, (1,), (), ("B", "S"), ("B", "L"))
"""The shapes of inputs without a row in FORMS: floats, and integers."""
TOGETHER = (("past_key", "past_value"), ("cos_cache", "sin_cache"), ("k_scale", "v_scale"), ("key", "value"))
"""Optional inputs that are seldom right without each other."""
BESIDE = (("k_scale", ("past_key", "past_value")), ("cache_indirection", ("beam_width",)))
"""Optional inputs that are seldom right without others, in operators that have all of these."""
APART = (("nonpad_kv_seqlen", ("past_key", "past_value")), ("past", ("attention_bias",)))
"""Optional inputs that are seldom right beside each other."""
PRESENT = {
    "past_key": 0.45,
    "k_scale": 0.08,
    "v_scale": 0.08,
    "q_norm_weight": 0.02,
    "k_norm_weight": 0.02,
    "past_sequence_length": 0.15,
    "cache_indirection": 0.15,
    "beam_width": 0.05,
}
"""How often optional inputs are present. The others are in 0.3 of the calls, and those without a row in FORMS in
half."""
ONE_ROW = ("DecoderMaskedMultiHeadAttention",)
"""Operators that take one row of the query."""
FLOATS = (0.0, 0.5, 1.0, 2.0, -1.0, 1e-3, -1e4, -LARGEST, -np.inf, np.inf, np.nan)


@dataclass
class Call:
    """One call: the schema, which parts of it are present, sizes, types, and the attributes."""

    schema: Schema
    rng: random.Random
    sizes: Sizes = field(default_factory=dict)
    before: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    """How many keys of a past count, for each batch entry."""
    types: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    open: frozenset[str] = frozenset()

    @staticmethod
    def drawn(seed: int, draw: int = 0) -> Call:
        """A call of the operator of a seed; each draw gives another one. Operators with many inputs are drawn more
        often."""
        (schema,) = random.Random(seed).choices(schemas(), [len(each.inputs) for each in schemas()])
        rng = random.Random(f"{seed} {draw}")
        call = Call(schema, rng)
        present = call._present()
        call._draw_types(present)
        call._draw_attributes(present)
        call._draw_sizes(present)
        call._draw_shapes(present)
        numbers = np.random.default_rng(rng.getrandbits(32))
        for port in present:
            if rng.random() < call._form(port.name).constant:
                call.constants[port.name] = call._array(port.name, numbers)
        call.open = frozenset(letter for letter in LETTERS if rng.random() < 0.5)
        return call

    # -- what is drawn ------------------------------------------------------------------------------------

    def _present(self) -> list[Port]:
        rng = self.rng
        optional = {
            port.name: PRESENT.get(port.name, 0.3 if port.name in FORMS else 0.5)
            for port in self.schema.inputs
            if port.optional
        }
        chosen = {port.name for port in self.schema.inputs if rng.random() < optional.get(port.name, 1.0)}
        if rng.random() < 0.9:
            chosen |= {name for name in ("key", "value") if any(port.name == name for port in self.schema.inputs)}
        for names in TOGETHER:
            if chosen.intersection(names) and rng.random() < 0.97:
                chosen |= {port.name for port in self.schema.inputs if port.name in names}
        for one, others in BESIDE:
            known = {port.name for port in self.schema.inputs}
            if one in chosen and known.issuperset(others) and rng.random() < 0.95:
                chosen |= set(others)
        if self.schema.name in ONE_ROW and "past_key" in chosen and rng.random() < 0.97:
            chosen.add("past_sequence_length")
        for one, others in APART:
            if one in chosen and rng.random() < 0.9:
                chosen -= set(others)
        return [port for port in self.schema.inputs if port.name in chosen]

    def _draw_types(self, present: Sequence[Port]) -> None:
        for port in (*self.schema.inputs, *self.schema.outputs):
            types = port.types or ("float32",)
            common = [each for each in types if each not in RARE] or list(types)
            drawn = self.rng.choice(common if self.rng.random() < 0.95 else types)
            drawn = "float32" if "float32" in common and self.rng.random() < 0.5 else drawn
            self.types.setdefault(port.parameter, drawn)
        first = self.types[self.schema.inputs[0].parameter]
        for parameter in ("T1", "T2", "U", "T_CACHE"):
            given = {port.parameter: port.types for port in self.schema.inputs}
            if first in given.get(parameter, ()) and self.types[parameter] != "bool" and self.rng.random() < 0.95:
                self.types[parameter] = first

    def _draw_attributes(self, present: Sequence[Port]) -> None:
        rng, names = self.rng, {port.name for port in present}
        for name, (kind, text, required) in self.schema.attributes.items():
            if not required and rng.random() < 0.75:
                continue
            if kind == "INT":
                self.attributes[name] = rng.choice([0, 1, 1, 1] if rng.random() < 0.8 else [2, -1, 3, 10])
            elif kind == "FLOAT":
                self.attributes[name] = rng.choice(FLOATS if rng.random() < 0.3 else FLOATS[1:4])
            elif kind == "STRING":
                self.attributes[name] = rng.choice(re.findall(r"'(\w+)'", text) or ["NONE"])
        quants = [name for name in self.schema.attributes if name.endswith("quant_type")]
        if "T_CACHE" in self.types and rng.random() < 0.95:
            self.types["T_CACHE"] = self.types["T"]
            dropped = (*quants, "kv_cache_bit_width")
            self.attributes = {name: each for name, each in self.attributes.items() if name not in dropped}
        if {"k_scale", "v_scale"} <= names and rng.random() < 0.9 and "T_CACHE" in self.types:
            self.types["T_CACHE"] = rng.choice([*["int8"] * 9, "uint8"])
            kind = rng.choice(["PER_TENSOR", "PER_CHANNEL"])
            self.attributes |= dict.fromkeys(quants, kind) | ({"kv_cache_bit_width": 8} if rng.random() < 0.97 else {})
        if self.attributes.get("sliding_window_cache") == 1 and rng.random() < 0.95:
            self.attributes["local_window_size"] = rng.choice([1, 2, 3])
        if "cos_cache" in names and "do_rotary" in self.schema.attributes and rng.random() < 0.95:
            self.attributes["do_rotary"] = 1
        elif "do_rotary" in self.attributes and rng.random() < 0.9:
            self.attributes["do_rotary"] = 0

    def _draw_sizes(self, present: Sequence[Port]) -> None:
        rng, names = self.rng, {port.name for port in present}
        grouped = "kv_num_heads" in self.schema.attributes
        n, b, s = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 3, 5, 8])
        ends = "weight" in names or "total_sequence_length" in names  # the process, in ONNX Runtime
        if rng.random() < 0.06 and not ends:
            b, s = rng.choice([(0, s), (b, 0)])
        if self.schema.name in ONE_ROW and rng.random() < 0.97:
            s = 1
        k = rng.choice([each for each in (1, 2, 3, 4) if n % each == 0]) if grouped else n
        past = bool(names & {"past_key", "past", "past_sequence_length"})
        held = rng.choice([0, 1, 2, 4]) if past else 0
        if "total_sequence_length" in names and past and s > 1 and rng.random() < 0.9:
            b, held = rng.choice([(1, held), (b, 0)])
        d = rng.choice([8, 8, 16, 16, 4, 1, 5, 32])
        if "total_sequence_length" in names and rng.random() < 0.95:
            d = rng.choice([8, 16, 16, 32]) if "cos_cache" not in names else 16
        e = d if rng.random() < 0.7 or (grouped and self.schema.domain) else rng.choice([1, 3, 8])
        if past and self.schema.domain and rng.random() < 0.95:
            e = d
        if "weights" in names:  # with narrower values ONNX Runtime writes beyond its memory
            e = max(d, e)
        same = "total_sequence_length" in names or rng.random() < 0.5 or self.schema.name in ONE_ROW
        t = s if same else rng.choice([1, 2, 3, 6, 7])
        if "total_sequence_length" in names and past and rng.random() < 0.1:  # keys that another layer has written
            t = 0
        room = held
        if "seqlens_k" in names or "past_sequence_length" in names:
            room = held + s + rng.choice([0, 3, 8]) if rng.random() < 0.7 or self.schema.name in ONE_ROW else held
        # The rows of the query count behind the past, whether their keys are new or another layer has written them.
        # Where the total length is less, ONNX Runtime reads a bias beyond its rows.
        room = room if t else max(room, held + s)
        short = [rng.randint(0, held) if rng.random() < 0.4 else held for _ in range(b)]
        self.before = np.array(short if room > held else [held] * b, np.int64)
        length = (held if past else 0) + (t or s)
        self.sizes = {
            "B": b, "S": s, "T": t, "P": room, "M": max(16, room + t), "N": n, "K": k, "D": d, "E": e, "L": length,
            "before": held, "I": rng.choice([4, 8]), "Z": 255, "ND": n * d, "KD": k * d, "KE": k * e, "2B": 2 * b,
            "3B+2": 3 * b + 2, "D/2": d // 2, "T+1": t + 1, "QKV": (n + 2 * k) * d if grouped else n * (2 * d + e),
        }  # fmt: skip
        heads = {"num_heads": n, "q_num_heads": n, "kv_num_heads": k}
        self.attributes |= {name: size for name, size in heads.items() if name in self.attributes}
        flat = any(port.name == "Q" for port in present) and rng.random() < 0.4
        if "q_num_heads" in self.schema.attributes:
            self.attributes = {key: each for key, each in self.attributes.items() if key not in heads}
            self.attributes |= {"q_num_heads": n, "kv_num_heads": k} if flat else {}
        if "qkv_hidden_sizes" in self.schema.attributes and e != d:
            self.attributes["qkv_hidden_sizes"] = [n * d, n * d, n * e]
        self.sizes["flat"] = int(flat)

    def _draw_shapes(self, present: Sequence[Port]) -> None:
        rng, names = self.rng, {port.name for port in present}
        for port in present:
            self.shapes[port.name] = rng.choice(self._form(port.name).shapes)
        if self.schema.name in ONE_ROW and "mask_index" in names and rng.random() < 0.95:
            self.shapes["mask_index"] = ("B", "L")
        if "Q" in names:
            for name in "QKV":
                self.shapes[name] = FORMS[name].shapes[self.sizes["flat"]]
        if "query" in names:
            whole = "key" not in names
            side_by_side = ("B", "S", "QKV") if "total_sequence_length" in names else ("B", "S", "N", 3, "D")
            self.shapes["query"] = side_by_side if whole else ("B", "S", "ND")
        if {"key", "value"} <= names:
            cached = rng.random() < 0.25 and "total_sequence_length" not in names
            if self.sizes["D"] != self.sizes["E"]:
                cached = False
            if self.schema.name in ONE_ROW and rng.random() < 0.95:
                cached = "past_key" not in names
                self.attributes["past_present_share_buffer"] = int(not cached)
            self.shapes["key"], self.shapes["value"] = (
                (("B", "K", "T", "D"), ("B", "K", "T", "E")) if cached else (("B", "T", "KD"), ("B", "T", "KE"))
            )
        forms: dict[Any, Shape] = {"PER_CHANNEL": (1, "K", 1, "D"), "PER_TENSOR": (1,)}
        if (form := forms.get(self.attributes.get("k_quant_type"))) is not None:
            self.shapes |= {name: form for name in ("k_scale", "v_scale") if name in names}

    # -- what it becomes ----------------------------------------------------------------------------------

    def _form(self, name: str) -> Form:
        port = next(port for port in self.schema.inputs if port.name == name)
        floating = self.types[port.parameter].startswith("float")
        return FORMS.get(name) or (Form(ANY) if floating else Form(COUNTS, _small, 0.3))

    def _dtype(self, port: Port) -> str:
        if port.parameter in TYPES:
            return TYPES[port.parameter]
        return self.types[port.parameter]

    def _size(self, word: str | int) -> int:
        return word if isinstance(word, int) else self.sizes[word]

    def _array(self, name: str, rng: Rng) -> Array:
        port = next(port for port in self.schema.inputs if port.name == name)
        shape = tuple(self._size(word) for word in self.shapes[name])
        dtype = np.dtype(self._dtype(port))
        with np.errstate(all="ignore"):
            made = np.asarray(self._form(name).content(self, shape, rng))
            if dtype == np.bool_:
                return np.asarray(made > -0.5)
            if dtype.kind in "iu" and made.dtype.kind == "f":
                info = np.iinfo(dtype)
                made = np.clip(np.rint(made * 40.0) + (128 if dtype == np.uint8 else 0), info.min, info.max)
            return made.astype(dtype)

    def renamed(self, name: str) -> str:
        """The name of an input in the model: query, key and value are those that tools/fuzz/difference.py knows."""
        return {"query": "q", "key": "k", "value": "v", "Q": "q", "K": "k", "V": "v", "input": "q"}.get(name, name)

    def model(self) -> onnx.ModelProto:
        """The model of the call."""
        rng = self.rng
        kinds = {np.dtype(name): helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in TYPES.values()}
        names = [self.renamed(port.name) if port.name in self.shapes else "" for port in self.schema.inputs]
        while names and not names[-1]:
            names.pop()
        most = len(self.schema.outputs)
        # Without room for the caches ONNX Runtime ends the process in operators of one row, reads other memory in place
        # of the past in GroupQueryAttention, and refuses others.
        cached = {"past_key", "past", "k_scale"}.intersection(self.shapes)
        needs_room = self.schema.name in ONE_ROW or (cached and self.schema.name == "GroupQueryAttention")
        count = 3 if cached and (needs_room or rng.random() < 0.9) else rng.choice([1, 3])
        if most > 3 and rng.random() < 0.06:
            count = most
            self.attributes |= {name: rng.choice([1, 2]) for name in ("qk_output",) if name in self.schema.attributes}
        ports = self.schema.outputs[:count]
        given = 1.0 if needs_room else 0.97
        outputs = [port.name if rng.random() < given or not index else "" for index, port in enumerate(ports)]
        node = helper.make_node(
            self.schema.name, names, outputs, name="op", domain=self.schema.domain, **self.attributes
        )
        inputs = []
        for name, shape in self.shapes.items():
            port = next(port for port in self.schema.inputs if port.name == name)
            if name not in self.constants:
                dims = [each if each in self.open else self._size(each) for each in shape]
                inputs.append(
                    helper.make_tensor_value_info(self.renamed(name), kinds[np.dtype(self._dtype(port))], dims)
                )
        results = [
            helper.make_tensor_value_info(name, kinds[np.dtype(self._dtype(port))], None)
            for name, port in zip(outputs, ports, strict=True)
            if name
        ]
        tensors = [numpy_helper.from_array(array, self.renamed(name)) for name, array in self.constants.items()]
        opset = self.schema.version if self.schema.domain == "" else rng.choice([17, 21])
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "g", inputs, results, tensors)
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feeds(self, seed: int, count: int = 3) -> list[Feed]:
        """Plain inputs, larger ones, and some with NaN or an infinity in one of them."""
        rng = np.random.default_rng(seed)
        made = []
        for index in range(count):
            arrays = {name: self._array(name, rng) for name in self.shapes if name not in self.constants}
            if index == 1:
                arrays = {
                    name: array * np.asarray(3, array.dtype) if name in VALUES else array
                    for name, array in arrays.items()
                }
            spoiled = self._spoiled(arrays, rng) if index == 2 else ()
            named = {self.renamed(name): array for name, array in arrays.items()}
            style = ("plain", "large", "spoiled")[index]
            made.append(Feed(style, named, spoiled=tuple(map(self.renamed, spoiled))))
        return made

    def _spoiled(self, arrays: dict[str, Array], rng: Rng) -> tuple[str, ...]:
        """Put NaN or an infinity into one float input."""
        given = [name for name in arrays if name in SPOILED and arrays[name].dtype.kind == "f" and arrays[name].size]
        if not given:
            return ()
        name = str(rng.choice(given))
        array = arrays[name]
        number = rng.choice([np.nan, np.inf, -np.inf]) if name in VALUES else np.nan
        place: list[Any] = [slice(None) if rng.random() < 0.5 else int(rng.integers(size)) for size in array.shape]
        array[tuple(place)] = number
        return (name,)


VALUES = ("query", "key", "value", "Q", "K", "V")
SPOILED = (*VALUES, "past_key", "past_value", "attention_bias", "attn_mask", "head_sink")
