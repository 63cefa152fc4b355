"""Calls that are wrong in one or two ways: the kernel and the reference refuse them with an error of the project that
names what is wrong, and neither computes what the other refuses."""

from __future__ import annotations

import re
import warnings

from fa_compiler import ops, reference
from fa_compiler.op_registry import NodeError
from fa_compiler.reference import ReferenceInputError
from tests.corrupted import BASES, Case, corrupted
from tests.fuzz.kind import Finding, Kind, Outcome

REFUSALS = (ops.KernelError, NodeError, ReferenceInputError)


class WrongCalls(Kind):
    """One call, by the kernel and by the reference."""

    def check(self, seed: int) -> Outcome:
        (case,) = corrupted(seed, 1, (_operator(seed),))
        answers: dict[str, Exception | None] = {}
        for name, run in (("kernel", ops.run), ("reference", reference.run)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run(case.op_type, case.inputs, case.attrs)
                answers[name] = None
            except REFUSALS as error:
                answers[name] = error
                if not _names_something(str(error), case):
                    return _found(f"{case.op_type}: the {name} names nothing of the call", case, error)
            except Exception as error:  # any other is not meant for a user
                return _found(f"{case.op_type}: {type(error).__name__} in the {name}", case, error)
        kernel, plain = answers.values()
        if (kernel is None) != (plain is None) and "DT_DOUBLE" not in str(kernel):  # the reference takes float64
            who = "kernel" if kernel is None else "reference"
            return _found(f"{case.op_type}: only the {who} takes the call", case, kernel or plain)
        return Outcome("taken" if kernel is None else "refused")


def _operator(seed: int) -> str:
    return list(BASES)[seed % len(BASES)]


def _names_something(text: str, case: Case) -> bool:
    """Is an input, an attribute or the operator named, and none by a number of ONNX Runtime's?"""
    names = [*case.inputs, *case.attrs, case.op_type]
    return not re.search(r"\binput_\d", text) and any(name in text for name in names)


def _found(title: str, case: Case, error: Exception | None) -> Outcome:
    given = {name: getattr(value, "shape", value) for name, value in case.inputs.items()}
    return Outcome("wrong", Finding(title, f"{case.change}\n{given}\n{case.attrs}\n{error}", suffix=".txt"))
