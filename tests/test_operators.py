"""Every operator has all its parts. Each failure says what is missing, and where it belongs."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fa_compiler import reference
from fa_compiler.op_registry import EXTENSIONS, Operator, TensorInfo, dtypes, infer, ops
from fa_compiler.op_registry.constraints.core import Rules
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.ops.attention_update import OPERATOR as KNOWN
from fa_compiler.reference.call import OPERATORS as REFERENCES
from tests.corrupted import BASES
from tests.systems import SOURCES
from tools import descriptors

ROOT = Path(__file__).parent.parent
CSRC = descriptors.PATH.parent
MODULES = [module.name for module in pkgutil.iter_modules(ops.__path__)]


@SOURCES
@pytest.mark.parametrize("module", MODULES)
def test_every_operator_is_complete(module: str) -> None:
    record = getattr(importlib.import_module(f"{ops.__name__}.{module}"), "OPERATOR", None)
    if not isinstance(record, Operator):
        pytest.fail(
            f"op_registry/ops/{module}.py: define OPERATOR, an Operator; op_registry/operator.py shows the form"
        )
    found = list(missing(module, record))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_every_operator_infers_its_outputs(module: str) -> None:
    record = importlib.import_module(f"{ops.__name__}.{module}").OPERATOR
    inputs, attrs = BASES[record.name][0](np.random.default_rng(0))

    def info(array: np.ndarray) -> TensorInfo:
        return TensorInfo(dtypes.from_numpy(array.dtype) or "", array.shape)

    given = {name: [*map(info, each)] if isinstance(each, list) else info(each) for name, each in inputs.items()}
    found, computed = infer(record.name, given, attrs), reference.run(record.name, inputs, attrs)
    assert found.keys() == {output.name for output in record.variants[-1].outputs}
    assert {name: found[name].shape for name in found} == {name: each.shape for name, each in computed.items()}


def missing(module: str, record: Operator) -> Iterator[str]:
    """What the operator of op_registry/ops/<module>.py lacks, as sentences."""
    file, name = f"op_registry/ops/{module}.py", record.name
    newest = record.variants[-1]
    if descriptors.snake(name) != module:
        yield f"{file}: name the file {descriptors.snake(name)}.py, as the operator {name}"
    for variant in record.variants:
        if not all(variant.sources):
            yield f"{file}: say where the facts of the variant {variant.variant} come from (REG_OP's `source`)"
    if not record.rules.table:
        yield f"{file}: write the constraints, one rule for each number; op_registry/constraints/core.py says how"
    for tensor in record.rules.typed:
        if tensor not in (*newest.input_names, *newest.output_names):
            yield f"{file}: `typed` of the rules names {tensor}, which {name} does not have"
    if name not in REFERENCES:
        yield f'fa_compiler/reference/ops/{module}.py: write the reference, a function marked @operator("{name}")'
    if name not in BASES:
        yield f"tests/corrupted.py: add a function that draws a right call of {name} to BASES"
    if record.kernel is not None:
        yield from _missing_of_kernel(file, record, record.kernel)


def _missing_of_kernel(file: str, record: Operator, kernel: CpuKernel) -> Iterator[str]:
    space, newest = descriptors.snake(record.name), record.variants[-1]
    sources = [
        path
        for path in CSRC.rglob("*.cc")
        if re.search(rf"namespace (fa::)?{space} {{", path.read_text(encoding="utf-8"))
    ]
    sources = [path for path in sources if "> make_kernel(" in path.read_text(encoding="utf-8")]
    if not sources:
        yield (
            f"lowering/ort/csrc/{space}.cc: write the kernel, with make_kernel in the namespace fa::{space}; "
            f"or say kernel=None in {file} if there is none"
        )
    compiled = re.split(r"[\s()]+", (CSRC / "CMakeLists.txt").read_text(encoding="utf-8"))
    for path in sources:
        if str(path.relative_to(CSRC)) not in compiled:
            yield f"lowering/ort/csrc/CMakeLists.txt: add {path.relative_to(CSRC)} to the sources of the library"
    if f"namespace {space} {{" not in descriptors.PATH.read_text(encoding="utf-8"):
        yield "lowering/ort/csrc/descriptors.inc: run python -m tools.descriptors"
    if kernel.required_output not in (None, *newest.output_names):
        yield f"{file}: `required_output` of the kernel is {kernel.required_output}, which {record.name} does not have"
    if unknown := {*kernel.extensions} - {entry.id for entry in EXTENSIONS}:
        yield f"op_registry/extensions.py: add the extensions {', '.join(sorted(unknown))} to EXTENSIONS"
    if unknown := {*kernel.reordered} - {variant.variant for variant in record.variants}:
        yield f"{file}: `reordered` of the kernel names {', '.join(sorted(unknown))}, which is no variant"


@SOURCES
def test_what_a_new_operator_lacks_is_said() -> None:
    variant = replace(KNOWN.variants[-1], name="MyOp", sources=("",))
    kernel = CpuKernel(extensions=("EXT-MINE",), required_output="out", reordered=("older",))
    record = Operator(variants=(variant,), infer=KNOWN.infer, rules=Rules("MO", typed=("x",)), kernel=kernel)
    places = [sentence.partition(":")[0] for sentence in missing("other", record)]
    assert places == [
        *["op_registry/ops/other.py"] * 4,
        "fa_compiler/reference/ops/other.py",
        "tests/corrupted.py",
        "lowering/ort/csrc/my_op.cc",
        "lowering/ort/csrc/descriptors.inc",
        "op_registry/ops/other.py",
        "op_registry/extensions.py",
        "op_registry/ops/other.py",
    ]
    assert not any(sentence.startswith("lowering") for sentence in missing("my_op", replace(record, kernel=None)))
