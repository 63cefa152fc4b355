"""Calls that are wrong in one or two ways: the kernel and the reference refuse them with an error of the project that
names what is wrong, and neither computes what the other refuses. What both compute is about the same, and its numbers
are finite. What the registry refuses, the kernel does not compute in a model either, where nobody asks the registry.
Each error is one of the package's, and a process pool can return it. `single-op` writes no call that no product runs.

How close results have to be is the matter of the right calls (see tools/fuzz/calls.py): here they differ by one in
fifty of the largest number at most, and hold NaN at the same places, where the attributes are numbers of order 1.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_compiler import FaCompilerError, ops, reference
from fa_compiler.atc.single import by_hand
from fa_compiler.lowering.ascend.single_op import broken_constraints, from_json
from fa_compiler.lowering.ort.eager import compute
from fa_compiler.op_registry import AttrSpec, Diagnostic, NodeError, as_arrays, full_attrs, get, refusal
from fa_compiler.op_registry.diagnostic import GENERIC
from fa_compiler.op_registry.products import PRODUCTS
from fa_compiler.reference import ReferenceInputError
from tests.corrupted import WITH_KERNEL, Case, asks_the_kernel, corrupted
from tools.fuzz.kind import Finding, Kind, Outcome

TOLERANCE = 0.02
RUNTIME = ("DT_DOUBLE", "ONNX Runtime cannot infer")
"""Refusals of what only the reference takes: float64, and a list whose result is int8."""
WRITTEN = 4
"""One call of so many is written as a file of one operator, too."""
REFUSALS = (ops.KernelError, NodeError, ReferenceInputError)


class WrongCalls(Kind):
    """One call, by the kernel and by the reference."""

    def check(self, seed: int) -> Outcome:
        (case,) = corrupted(seed, 1, (_operator(seed),))
        answers: dict[str, Exception | None] = {}
        results: list[Mapping[str, Any]] = []
        for name, run in (("kernel", ops.run), ("reference", reference.run)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    results.append(run(case.op_type, case.inputs, case.attrs, cann=case.cann))
                answers[name] = None
            except REFUSALS as error:
                answers[name] = error
                if not isinstance(error, FaCompilerError) or str(pickle.loads(pickle.dumps(error))) != str(error):
                    return _found(
                        f"{type(error).__name__} is no error of the package, or is another behind pickle", case, error
                    )
                if not _names_something(str(error), case):
                    return _found(f"{case.op_type}: the {name} names nothing of the call", case, error)
            except Exception as error:  # any other is not meant for a user
                return _found(f"{case.op_type}: {type(error).__name__} in the {name}", case, error)
        if (refused := _computed_alone(case)) is not None:
            return _found(f"{case.op_type}: the kernel alone computes what {refused.constraint} refuses", case, None)
        if seed % WRITTEN == 0 and (rule := _runs_nowhere(case)) is not None:
            return _found(f"single-op writes what breaks {rule} on every product", case, None)
        kernel, plain = answers.values()
        if (kernel is None) != (plain is None) and not any(words in str(kernel) for words in RUNTIME):
            who = "kernel" if kernel is None else "reference"
            return _found(f"{case.op_type}: only the {who} takes the call", case, kernel or plain)
        if kernel is not None:
            return Outcome("refused")
        if not all(np.isfinite(np.float32(case.attrs.get(entry.name, 0))) for entry in _floats(case)):
            return _found(f"{case.op_type}: takes an attribute that is no finite number", case, None)
        sums = np.asarray(case.inputs.get("softmax_sum", 1.0), np.float32)
        # Gradients by probabilities whose sum is negative are no gradients.
        if not any(abs(case.attrs.get(entry.name, 0)) > 1 for entry in _floats(case)) and (sums > 0).all():
            for name, wanted in results[1].items():
                if not _about(results[0][name], wanted):
                    return _found(f"{case.op_type}: another {name} than the reference's", case, None)
        return Outcome("taken")


def _operator(seed: int) -> str:
    return WITH_KERNEL[seed % len(WITH_KERNEL)]


def _computed_alone(case: Case) -> Diagnostic | None:
    """The rule that the kernel does not keep without the registry."""
    spec = get(case.op_type)
    try:
        arrays, attrs = as_arrays(spec, case.inputs), full_attrs(spec, case.attrs)
        refused = refusal(spec, arrays, attrs)
        if refused is None or not asks_the_kernel(case, arrays):
            return None
        compute(spec, arrays, attrs)
    except REFUSALS:
        return None
    return refused


def _runs_nowhere(case: Case) -> str | None:
    """A constraint that Ascend checks on every product, and that a file of the call breaks; None where there is none,
    or no file."""
    arrays = {name: value for name, value in case.inputs.items() if isinstance(value, np.ndarray)}
    inputs = [f"{name}={','.join(map(str, array.shape))}:{array.dtype}" for name, array in arrays.items()]
    attrs = [f"{name}={_typed(value)}" for name, value in case.attrs.items() if not name.startswith("cpu_")]
    try:
        text = by_hand(case.op_type, inputs, [], attrs, [], None, case.cann)
    except FaCompilerError:
        return None
    op, constants = from_json(json.loads(text)[0])
    broken = [broken_constraints(op, constants, product.name, case.cann) for product in PRODUCTS]
    checked = [{each.constraint for each in found if each.stage != "document"} - {GENERIC} for found in broken]
    return min(set.intersection(*checked), default=None)


def _typed(value: Any) -> str:
    """The value of an attribute as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _floats(case: Case) -> list[AttrSpec]:
    return [entry for entry in get(case.op_type, case.cann).attrs if entry.type == "Float"]


def _about(found: Any, wanted: Any) -> bool:
    """Two results of about the same numbers. Where numbers are integers, they were rounded or are places of keys, of
    which equal ones may change places."""
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind in "iub":
        return True
    found, wanted = (array.astype(np.float64) for array in (found, wanted))
    finite = np.isfinite(wanted)
    bound = TOLERANCE * np.abs(wanted[finite]).max(initial=1e-3)
    return np.array_equal(np.isnan(found), np.isnan(wanted)) and bool(
        (np.abs(found[finite] - wanted[finite]) <= bound).all()
    )


def _names_something(text: str, case: Case) -> bool:
    """Is an input, an attribute or the operator named, and none by a number of ONNX Runtime's?"""
    names = [*case.inputs, *case.attrs, case.op_type]
    return not re.search(r"\binput_\d", text) and any(name in text for name in names)


def _found(title: str, case: Case, error: Exception | None) -> Outcome:
    given = {name: getattr(value, "shape", value) for name, value in case.inputs.items()}
    return Outcome("wrong", Finding(title, f"{case.change}\n{given}\n{case.attrs}\n{error}", suffix=".txt"))
