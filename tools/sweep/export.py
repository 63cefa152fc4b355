"""Export the rows of the sweep, each in a process of its own.

    python -m tools.sweep.export --state build/sweep [--only REGEX] [--timeout 240] [--collections A B]

The interpreter needs what requirements.txt lists (for optimum: requirements-optimum.txt). The folder `exports` of the
state gets ID.onnx, its inputs ID.npz, and ID.json with what became of it. A row with an ID.json is not exported again,
so a broken run continues; `--again` exports those that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tools.sweep.child import attempt
from tools.sweep.rows import Row

COLLECTIONS = ("transformers", "exporter", "timm", "vit_pytorch", "x_transformers", "diffusers")
"""Those of requirements.txt."""
OPSET = {"torchscript": 17, "dynamo": 20}


def rows_of(collection: str) -> list[Row]:
    """The rows of a collection."""
    rows: list[Row] = import_module(f"tools.sweep.{collection}_rows").ROWS
    return rows


def randomised(module: Any) -> Any:
    """Draw the weights, so that scores differ from each other and no gate is closed. The module is changed."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.normal_(0, min(fan_in**-0.5, 0.5))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def tensors(result: Any) -> Iterator[Any]:
    """The tensors in what a module returns, in order."""
    import torch

    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for each in result.values():
            yield from tensors(each)
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from tensors(each)


def flat(module: Any, names: list[str]) -> Any:
    """A module with the inputs by position, and a tuple of floating-point tensors as its result."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *given: Any) -> Any:
            found = tensors(self.inner(**dict(zip(names, given, strict=True))))
            return tuple(each for each in found if each.is_floating_point())

    return Flat().eval()


def rms_norm(given: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """torch.nn.functional.rms_norm in smaller steps: the exporter of TorchScript does not know it."""
    import torch

    axes = tuple(range(-len(shape), 0))
    least = torch.finfo(given.dtype).eps if eps is None else eps
    normal = given * torch.rsqrt(given.square().mean(axes, keepdim=True) + least)
    return normal if weight is None else normal * weight


def with_torch(row: Row, exporter: str, target: Path) -> dict[str, Any]:
    """Export with one of torch's exporters. Returns the inputs."""
    import torch

    module, inputs = row.make(exporter)
    names, values = list(inputs), tuple(inputs.values())
    wrapped = flat(randomised(module), names)
    with torch.no_grad():
        wrapped(*values)
        if exporter == "torchscript":
            torch.nn.functional.rms_norm = rms_norm  # in this process only
            torch.onnx.export(
                wrapped,
                values,
                str(target),
                input_names=names,
                dynamic_axes={name: dict(row.axes[name]) for name in names if name in row.axes},
                opset_version=OPSET[exporter],
                dynamo=False,
            )
        else:
            sizes = tuple(dict.fromkeys(row.axes.get(name, {}), torch.export.Dim.AUTO) for name in names)
            torch.onnx.export(
                wrapped,
                values,
                str(target),
                input_names=names,
                dynamic_shapes=(sizes,),
                opset_version=OPSET[exporter],
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    return {name: value.numpy() for name, value in inputs.items()}


def export(row: Row, exporter: str, folder: Path) -> None:
    """Export one row. Raises what the exporter raises."""
    target = folder / f"{row.id(exporter)}.onnx"
    if exporter in OPSET:
        feeds = with_torch(row, exporter, target)
    else:
        model, feeds = row.make(exporter)
        target.write_bytes(model)
    np.savez(target.with_suffix(".npz"), **feeds)


def warm_up(exporters: Iterable[str]) -> None:
    """Import in this process what each export would import again, and fill caches, by exporting a tiny module."""
    import torch

    torch.set_num_threads(1)  # a forked process must not wait for threads of its parent
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    with tempfile.TemporaryDirectory() as folder:
        for exporter in set(exporters).intersection(OPSET):
            row = Row("warm", "up", lambda _: (module, {"input": torch.zeros(1, 2)}))
            with contextlib.redirect_stdout(io.StringIO()):
                with_torch(row, exporter, Path(folder) / f"{exporter}.onnx")


def run(rows: Sequence[Row], exporters: Iterable[str], folder: Path, timeout: float, again: bool) -> None:
    """Export what has no answer yet, with one exporter after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    for exporter in exporters:
        for row in rows:
            if exporter not in row.exporters:
                continue
            answer = folder / f"{row.id(exporter)}.json"
            if answer.exists() and not (again and json.loads(answer.read_text())["problem"]):
                continue
            start = time.monotonic()
            problem = attempt(lambda: export(row, exporter, folder), answer.with_suffix(".log"), timeout)  # noqa: B023
            seconds = time.monotonic() - start
            entry = {"collection": row.collection, "architecture": row.name, "exporter": exporter}
            answer.write_text(json.dumps({**entry, "problem": problem, "seconds": round(seconds, 1)}) + "\n")
            print(f"{row.id(exporter):60} {seconds:6.1f} s {problem or 'ok'}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS)
    parser.add_argument("--exporters", nargs="+", help="only these, in this order")
    parser.add_argument("--only", default="", metavar="REGEX", help="only rows whose name matches")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one export (240)")
    parser.add_argument("--again", action="store_true", help="export again what failed")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for collection in arguments.collections:
        for name in getattr(import_module(f"tools.sweep.{collection}_rows"), "PRELOADED", ()):
            import_module(name)
    in_turn = itertools.zip_longest(*(rows_of(collection) for collection in arguments.collections))
    rows = [row for group in in_turn for row in group if row is not None and re.search(arguments.only, row.name)]
    exporters = arguments.exporters or dict.fromkeys(exporter for row in rows for exporter in row.exporters)
    warm_up(exporters)
    run(rows, exporters, arguments.state / "exports", arguments.timeout, arguments.again)


if __name__ == "__main__":
    main()
