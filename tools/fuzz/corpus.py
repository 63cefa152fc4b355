"""The models that the ordinary tests of the fusion give it, with numbers for a run: what the kind `tested` changes.

    python -m tools.fuzz.corpus        # runs tests/passes without its random tests, and writes corpus.json.xz anew

A test that only looks at the report runs nothing; its models are fed with numbers of the types they declare.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fa_compiler.op_registry import DOMAIN
from tools.fuzz.difference import Array

PATH = Path(__file__).with_name("corpus.json.xz")
MOST_BYTES = 24_000
"""Of a model: larger ones are of kept graphs, which are sources of their own."""
MOST_OF_A_TEST = 4
LARGEST = 1 << 20
"""Numbers that are drawn for a model; what declares more is about sizes that no memory holds."""
SIZES = {"B": 2, "N": 2, "S": 4, "T": 6}


@dataclass(frozen=True)
class Kept:
    """One model, the test it is from, what the user vouches for there, and an array for each input."""

    test: str
    model: bytes
    assume: tuple[str, ...]
    arrays: Mapping[str, Array | tuple[str, tuple[int, ...]]]
    """Of plain normal numbers only the type and the shape."""

    def feeds(self) -> dict[str, Array]:
        """The arrays."""
        rng = np.random.default_rng(0)
        return {
            name: rng.standard_normal(each[1]).astype(each[0]) if isinstance(each, tuple) else each
            for name, each in self.arrays.items()
        }


@cache
def corpus() -> Sequence[Kept]:
    """Every kept model."""
    return [_kept(each) for each in json.loads(lzma.decompress(PATH.read_bytes()))]


def _kept(entry: Mapping[str, Any]) -> Kept:
    arrays = {name: _array(each) for name, each in entry["arrays"].items()}
    return Kept(entry["test"], base64.b64decode(entry["model"]), tuple(entry["assume"]), arrays)


def _array(entry: Mapping[str, Any]) -> Array | tuple[str, tuple[int, ...]]:
    shape = tuple(entry["shape"])
    if "numbers" not in entry:
        return entry["dtype"], shape
    return np.frombuffer(base64.b64decode(entry["numbers"]), np.dtype(entry["dtype"])).reshape(shape).copy()


def _entry(kept: Kept) -> dict[str, Any]:
    """A kept model as JSON."""
    arrays: dict[str, Any] = {}
    for name, each in kept.arrays.items():
        if isinstance(each, tuple):
            arrays[name] = {"dtype": each[0], "shape": each[1]}
        else:
            numbers = base64.b64encode(each.tobytes()).decode()
            arrays[name] = {"dtype": each.dtype.name, "shape": each.shape, "numbers": numbers}
    model = base64.b64encode(kept.model).decode()
    return {"test": kept.test, "assume": kept.assume, "arrays": arrays, "model": model}


def _short(array: Array) -> Array | tuple[str, tuple[int, ...]]:
    """What is kept of an array."""
    plain = array.dtype.kind == "f" and array.size > 8 and bool((np.abs(array) < 8).all() and array.all())
    return (str(array.dtype), array.shape) if plain and abs(float(array.std()) - 1.0) < 0.5 else array


class _Recorder:
    """Notes what is fused and what is run while tests run, as a plugin of pytest."""

    def __init__(self) -> None:
        self.test = ""
        self.fused: dict[str, tuple[str, bytes, tuple[str, ...]]] = {}
        self.count: dict[str, int] = {}
        self.runs: dict[tuple[str, frozenset[str]], Mapping[str, Array]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what draws its models: the search draws them itself."""
        items[:] = [item for item in items if not getattr(item.obj, "is_hypothesis_test", False)]

    def pytest_runtest_setup(self, item: Any) -> None:
        """Note the test."""
        self.test = item.nodeid

    def note(self, model: ir.Model, options: Any) -> None:
        """A model that is about to be fused."""
        if (options is not None and options.target != "ort") or self.count.get(self.test, 0) >= MOST_OF_A_TEST:
            return
        proto = ir.to_proto(model)
        data = proto.SerializeToString(deterministic=True)
        key = hashlib.sha256(data).hexdigest()
        apart = any(each.data_location == onnx.TensorProto.EXTERNAL for each in proto.graph.initializer)
        if any(node.domain == DOMAIN for node in proto.graph.node) or apart:
            return
        if len(data) <= MOST_BYTES and key not in self.fused:
            self.count[self.test] = self.count.get(self.test, 0) + 1
            self.fused[key] = self.test, data, () if options is None else tuple(sorted(options.assume))

    def ran(self, feeds: Mapping[str, Any]) -> None:
        """The inputs of a run."""
        arrays = {name: np.array(array) for name, array in feeds.items() if isinstance(array, np.ndarray | np.generic)}
        if len(arrays) == len(feeds) and sum(array.nbytes for array in arrays.values()) < 1 << 16:
            self.runs.setdefault((self.test, frozenset(arrays)), arrays)

    def kept(self) -> list[Kept]:
        """The models, each with the numbers of a run that fits."""
        found = []
        for test, data, assume in self.fused.values():
            model = onnx.ModelProto.FromString(data)
            held = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
            inputs = [each for each in model.graph.input if each.name not in held]
            defaults = {each.name: held[each.name] for each in model.graph.input if each.name in held}
            if {each.type.tensor_type.elem_type for each in inputs} & {TensorProto.UNDEFINED, TensorProto.STRING}:
                continue
            names = frozenset(each.name for each in inputs)
            function, file = test.partition("[")[0], test.partition("::")[0]
            alike = [each for each in self.runs if names <= each[1] and each[0].startswith(file)]
            alike.sort(key=lambda each: (each[0] != test, not each[0].startswith(function)))
            options = [self.runs[each] for each in alike]
            given = next((each for each in options if _fit(inputs, each)), None)
            if given is None and _size(inputs) > LARGEST:
                continue
            given = given or _drawn(inputs)
            arrays = {**defaults, **{name: given[name] for name in sorted(names)}}
            found.append(Kept(function, data, assume, {name: _short(array) for name, array in arrays.items()}))
        return sorted(found, key=lambda each: (each.test, each.model))


def _fit(inputs: Sequence[onnx.ValueInfoProto], arrays: Mapping[str, Array]) -> bool:
    """Are arrays of the types and sizes that a model declares?"""
    sizes_of: dict[str, int] = {}
    for each in inputs:
        tensor, array = each.type.tensor_type, arrays[each.name]
        if helper.tensor_dtype_to_np_dtype(tensor.elem_type) != array.dtype:
            return False
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        known = tensor.HasField("shape")
        if known and (
            len(sizes) != array.ndim or any(a not in (0, b) for a, b in zip(sizes, array.shape, strict=True))
        ):
            return False
        named = zip(tensor.shape.dim, array.shape, strict=True) if known else ()
        if any(dim.dim_param and sizes_of.setdefault(dim.dim_param, size) != size for dim, size in named):
            return False
    return True


def _shape(declared: onnx.ValueInfoProto) -> list[int]:
    """The declared sizes, with numbers for the open ones."""
    return [dim.dim_value or SIZES.get(dim.dim_param, 3) for dim in declared.type.tensor_type.shape.dim]


def _size(inputs: Sequence[onnx.ValueInfoProto]) -> int:
    """How many numbers these inputs hold."""
    return sum(math.prod(_shape(each)) for each in inputs)


def _drawn(inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, Array]:
    """Numbers of the declared types and sizes."""
    rng, made = np.random.default_rng(0), {}
    for each in inputs:
        shape, dtype = _shape(each), np.dtype(helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type))
        numbers = rng.standard_normal(shape) if dtype.kind not in "iub" else rng.integers(0, 2, shape)
        made[each.name] = np.asarray(numbers).astype(dtype)
    return made


def record() -> Sequence[Kept]:
    """What the tests of tests/passes give the fusion."""
    from fa_compiler.passes import fusion

    recorder, fuse, run = _Recorder(), fusion.fuse, ort.InferenceSession.run

    def noted(model: ir.Model, options: Any = None, progress: Any = None) -> Any:
        recorder.note(model, options)
        return fuse(model, options, progress)

    def running(self: Any, names: Any, feeds: Any, *more: Any) -> Any:
        recorder.ran(feeds)
        return run(self, names, feeds, *more)

    def drawn_by(feeds: Callable[..., dict[str, Array]]) -> Callable[..., dict[str, Array]]:
        def drawn(self: Any, *seed: int) -> dict[str, Array]:
            made = feeds(self, *seed)
            recorder.ran(made)
            return made

        return drawn

    fusion.fuse, ort.InferenceSession.run = noted, running
    # The tests take these by name when they are imported, so that is only now.
    from tests.passes.attention_ops import test_group_cache
    from tests.passes.operators import Operator

    for kind in (Operator, test_group_cache.Case):
        kind.feeds = drawn_by(kind.feeds)
    arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore", "tests/passes"]
    if pytest.main(arguments, plugins=[recorder]):
        raise SystemExit("a test fails")
    return recorder.kept()


def main() -> None:
    """Write the file."""
    found = record()
    PATH.write_bytes(lzma.compress(json.dumps([_entry(each) for each in found]).encode(), preset=9))
    print(f"{len(found)} models, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
