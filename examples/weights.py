"""Stores an exported graph without its weights, and fills it with random numbers when it is used.

`strip` replaces every large float tensor by a recipe. The tensor keeps its name, shape and dtype. Its content becomes
external data with the location `LOCATION`, and with keys for drawing the numbers (mean, std, seed). Such a file is
valid ONNX: a tool that does not know the recipe reports missing external data and does not compute with wrong numbers.
`fill` draws the numbers.

Small tensors and tensors with few distinct values (masks, window buffers, ones) are not replaced, because the meaning
of a graph depends on them.

    python examples/weights.py strip IN.onnx OUT.onnx
    python examples/weights.py fill IN.onnx OUT.onnx
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

LOCATION = "random-normal"
"""The external-data location that marks a tensor whose numbers are drawn when it is used."""

THRESHOLD = 1024
"""Tensors of at most this many elements are kept: biases, norms, shape vectors, scales."""

DISTINCT = 4
"""Tensors with at most this many distinct values are kept: masks and constant fills."""

LARGEST = 1e3
"""Tensors that hold a greater magnitude (or a NaN or infinity) are kept: they may be masks."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def strip(model: onnx.ModelProto, seed: int = 0, threshold: int = THRESHOLD) -> int:
    """Replace the weights of `model` in place by recipes and return how many tensors were replaced.

    The recipe keeps each weight's mean and standard deviation, so activations stay in their range.
    """
    count = 0
    for tensor in tensors(model):
        if tensor.data_type not in _FLOATS or int(np.prod(tensor.dims)) <= threshold:
            continue
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        values = numpy_helper.to_array(tensor).astype(np.float64)
        if not np.isfinite(values).all() or np.abs(values).max() > LARGEST:
            continue
        if np.unique(values).size <= DISTINCT:
            continue
        set_recipe(tensor, float(values.mean()), float(values.std()), seed + count)
        count += 1
    return count


def set_recipe(tensor: onnx.TensorProto, mean: float, std: float, seed: int = 0) -> None:
    """Make `tensor` a recipe: normal numbers with this mean and standard deviation."""
    for field in ("raw_data", "float_data", "int32_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    recipe = {
        "location": LOCATION,
        "mean": f"{mean:.6g}",
        "std": f"{std:.6g}",
        "seed": str(seed),
    }
    for key, value in recipe.items():
        tensor.external_data.add(key=key, value=value)


def fill(model: onnx.ModelProto) -> int:
    """Draw the numbers of every recipe of `model` in place; return how many tensors were filled.

    The stream of a tensor depends on its recipe's seed and its name alone, so the same graph always gets
    the same weights.
    """
    count = 0
    for tensor in tensors(model):
        recipe = {entry.key: entry.value for entry in tensor.external_data}
        if recipe.get("location") != LOCATION:
            continue
        rng = np.random.default_rng([int(recipe["seed"]), zlib.crc32(tensor.name.encode())])
        values = rng.standard_normal(tuple(tensor.dims), dtype=np.float32)
        values *= np.float32(float(recipe["std"]))
        values += np.float32(float(recipe["mean"]))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        tensor.raw_data = values.astype(dtype, copy=False).tobytes()
        count += 1
    return count


def load(path: str | Path) -> onnx.ModelProto:
    """Load a model and fill its recipes; other external data is loaded as usual."""
    model = onnx.load(str(path), load_external_data=False)
    fill(model)
    onnx.load_external_data_for_model(model, str(Path(path).parent))
    return model


def without_notes(model: onnx.ModelProto) -> None:
    """Drop the parts for humans and debuggers (doc strings, exporter metadata), in place.

    The newer torch exporter writes a Python stack trace on every node: most of a stripped file.
    """
    for message in _walk(model):
        if "doc_string" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("doc_string")
        if "metadata_props" in message.DESCRIPTOR.fields_by_name:
            message.ClearField("metadata_props")


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: initializers and constants, including those of subgraphs and functions."""
    for message in _walk(model):
        if isinstance(message, onnx.TensorProto):
            yield message


def _walk(message: Any) -> Iterator[Any]:
    """A protobuf message and every message inside it, except those inside tensors."""
    yield message
    if isinstance(message, onnx.TensorProto):
        return
    for _, value in message.ListFields():
        children = value if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else [value]
        for child in children:
            if hasattr(child, "ListFields"):
                yield from _walk(child)


def main(argv: list[str]) -> int:
    """The command line: `strip` or `fill` one file into another."""
    if len(argv) != 3 or argv[0] not in ("strip", "fill"):
        print("usage: weights.py strip|fill IN.onnx OUT.onnx", file=sys.stderr)
        return 2
    action, source, target = argv
    if Path(source).resolve() == Path(target).resolve():
        print("weights.py: OUT may not be IN", file=sys.stderr)
        return 2
    if action == "strip":
        model = onnx.load(source)
        print(f"{strip(model)} tensors stripped")
    else:
        model = load(source)
    onnx.save(model, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
