"""The cells of ort-cpu, measured: each on every path that may choose a kernel of the installed onnxruntime."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from fa_compiler.op_registry.runtimes import (
    ATTENTION,
    DOMAINS,
    GROUP_QUERY,
    KERNELS,
    MULTI_HEAD,
    RUNTIMES,
    Answer,
    Cell,
    Feature,
    Kernel,
    Runtime,
    answer,
)
from tests.pairs import pairwise
from tests.runtime_probe import LOWEST, Call, Path, fault, formula

CPU = RUNTIMES["ort-cpu"]
CALLS: dict[Feature, dict[str, Any]] = {
    Feature.FLOAT32: {},
    Feature.FLOAT16: {"dtype": "float16"},
    Feature.BFLOAT16: {"dtype": "bfloat16"},
    Feature.CAUSAL: {"causal": True},
    Feature.FULL: {},
    Feature.BOOLEAN_MASK: {"mask": "boolean"},
    Feature.FLOAT_MASK: {"mask": "float"},
    Feature.SHARED_MASK: {"mask": "shared"},
    Feature.CAUSAL_MASK: {"causal": True, "mask": "float"},
    Feature.KEY_PADDING: {"mask": "keys"},
    Feature.GROUPED: {},
    Feature.VALUE_SIZE: {"value_width": 16},
    Feature.ANY_HEAD_SIZE: {"width": 5, "value_width": 5},
    Feature.WIDE_HEADS: {"width": 776, "value_width": 776},
    Feature.PAST: {},
    Feature.CROSS: {"more_keys": 3},
    Feature.OPEN_SIZES: {"open": True},
    Feature.SOFTCAP: {"cap": 2.0},
    Feature.SOFTCAP_MASK: {"cap": 2.0, "mask": "float"},
    Feature.WINDOW: {"causal": True, "window": 2},
    Feature.SINK: {"sink": True},
    Feature.SINK_MASK: {"sink": True, "mask": "float"},
    Feature.ZERO_ROWS: {"mask": "boolean", "empty": -math.inf},
    Feature.NAN_ROWS: {"mask": "float", "empty": -math.inf},
    Feature.NAN_ROWS_HALF: {"mask": "float", "empty": -math.inf, "dtype": "float16"},
    Feature.NAN_ROWS_PADDING: {"mask": "keys", "empty": -math.inf},
    Feature.NAN_OR_ZERO_ROWS: {"mask": "float", "empty": -math.inf},
    Feature.MEAN_ROWS: {"mask": "float", "empty": LOWEST},
    Feature.LONE_RESULT: {},
}
"""The call that needs a feature. Without `causal` GroupQueryAttention is told so, or has one row behind a past."""
OF_ROWS = (Feature.NAN_ROWS, Feature.NAN_ROWS_HALF, Feature.NAN_OR_ZERO_ROWS, Feature.MEAN_ROWS)
"""These are asked of calls that are causal and of others: that decides about the kernel."""
TYPES = {Feature.FLOAT16: "tensor(float16)", Feature.BFLOAT16: "tensor(bfloat16)"}
CELLS = [(operator, feature) for operator, cells in CPU.items() for feature in cells]


@functools.cache
def paths(operator: str) -> list[Path]:
    """Paths in which any two choices meet, and for GroupQueryAttention every choice of rows and past with present keys
    as results."""
    grouped: tuple[bool, ...] = (False,) if operator == MULTI_HEAD else (False, True)
    pasts: tuple[int, ...] = (0,) if operator == MULTI_HEAD else (0, 3, 90)
    rows = pairwise((1, 4, 70), pasts, (False, True), (1, 2), (True, False), grouped)
    found = [Path(r, p, (presents or p > 0) and operator != MULTI_HEAD, *rest) for r, p, presents, *rest in rows]
    found += [Path(r, p, True) for r in (1, 4) for p in (0, 3)] if operator == GROUP_QUERY else []
    return list(dict.fromkeys(found))


def kernel_of(call: Call) -> Kernel:
    """The kernel that a call takes: what KERNELS says, but that of whole rows where flash is switched off, where there
    is one key, and where several rows are not causal."""
    path = call.path
    flash = call.operator == GROUP_QUERY and path.presents and path.flash and call.keys > 1
    plain = call.dtype == "float32" and not call.cap and not call.sink
    causal = call.causal or (path.past > 0 and path.rows == 1)
    return Kernel.FLASH if flash and plain and causal else Kernel.WHOLE


def wanted(call: Call, feature: Feature) -> np.ndarray[Any, Any]:
    result = formula(call)
    return np.nan_to_num(result) if feature is Feature.ZERO_ROWS else result


@pytest.mark.parametrize(("operator", "feature"), CELLS, ids=[f"{a}-{b.value}" for a, b in CELLS])
def test_a_cell_is_what_the_installed_runtime_does(operator: str, feature: Feature) -> None:
    cell = CPU[operator][feature]
    taken = [path for path in paths(operator) if _fits(feature, path)]
    assert taken
    for path, causal in itertools.product(taken, (False, True) if feature in OF_ROWS else (None,)):
        call = Call(operator, path, **(CALLS[feature] | ({} if causal is None else {"causal": causal})))
        claim = dict(cell.others).get(kernel_of(call), cell.answer)
        if claim is Answer.NO and feature in TYPES:
            assert not _has_kernel(operator, TYPES[feature])
            continue
        found = fault(call, wanted(call, feature))
        if feature is Feature.NAN_OR_ZERO_ROWS:
            found = found and fault(call, np.nan_to_num(wanted(call, feature)))
        assert bool(found) is (claim is not Answer.YES), (call, found)


def _fits(feature: Feature, path: Path) -> bool:
    """Does a path need the feature that it is asked for?"""
    if feature is Feature.CROSS:
        return path.past == 0
    if feature is Feature.PAST:
        return path.past > 0
    if feature is Feature.LONE_RESULT:
        return not path.presents
    return path.grouped if feature is Feature.GROUPED else True


def _has_kernel(operator: str, kind: str) -> bool:
    """Has the CPU provider a kernel of the operator for the type?"""
    kernels = [
        each
        for each in ort_state.get_all_opkernel_def()
        if (each.op_name, each.domain, each.provider) == (operator, DOMAINS[operator], "CPUExecutionProvider")
    ]
    assert kernels
    return any(kind in types for each in kernels for types in each.type_constraints.values())


def test_the_flash_kernel_is_there() -> None:
    """A path that tells the kernels apart: without it the measurements of both would be those of one."""
    behind = Call(GROUP_QUERY, Path(1, 3, True), mask="float", empty=-math.inf)
    assert fault(behind, formula(behind)) == "0 instead of nan"
    assert not fault(Call(GROUP_QUERY, Path(1, 3, True, flash=False), mask="float", empty=-math.inf), formula(behind))


def test_a_cell_names_the_kernels_it_is_not_measured_for() -> None:
    """A kernel that answers otherwise is one that KERNELS describes, and `answer` asks for it."""
    named = {
        (name, operator, kernel)
        for name, operators in RUNTIMES.items()
        for operator, cells in operators.items()
        for cell in cells.values()
        for kernel, _ in cell.others
    }
    assert named == {(*place, kernel) for place, kernels in KERNELS.items() for kernel in kernels}
    for runtime in (Runtime("ort-cpu"), None):
        assert answer(runtime, GROUP_QUERY, Feature.NAN_ROWS) is Answer.YES
        assert answer(runtime, GROUP_QUERY, Feature.NAN_ROWS, Kernel.FLASH) is Answer.NO
    assert Cell(Answer.YES, "", (1, 23)).at((1, 22), Kernel.FLASH) is Answer.NO
    assert answer(Runtime("ort-cpu"), ATTENTION, Feature.ZERO_ROWS, Kernel.FLASH) is Answer.YES
