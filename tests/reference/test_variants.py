"""Every variant of a prototype that the registry knows can be computed: what it lacks has the newest one's defaults."""

from typing import Any

import numpy as np
import pytest

from fa_compiler import reference
from fa_compiler.op_registry import OpSpec, dtypes, get, names, variants
from tests.corrupted import BASES

VARIANTS = [
    (op_type, cann)
    for op_type in names()
    for spec in variants(op_type)
    for cann in dict.fromkeys((spec.variant, spec.cann))
    if cann is not None
]


def right_call(op_type: str, cann: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A right call that has no input and no attribute that the variant lacks."""
    spec = get(op_type, cann)
    for seed in range(100):
        inputs, attrs = BASES[op_type][0](np.random.default_rng(seed))
        if not {*inputs} <= {*spec.input_names} or not {*attrs} <= {*spec.attr_names}:
            continue
        if "atten_mask" not in inputs and not _is_newer(spec, inputs):
            needed = {entry.name for entry in spec.attrs if entry.required} - {*attrs}
            return inputs, attrs | ({"is_flash": True} if "is_flash" in needed else {})
    raise AssertionError(f"no call for {op_type} {cann}")


def _is_newer(spec: OpSpec, inputs: dict[str, Any]) -> bool:
    """Has the call a type, or the decay gk, that the variant does not take?"""
    types = {name: dtypes.from_numpy(each.dtype) for name, each in inputs.items() if name in ("state", "initial_state")}
    return "gk" in inputs or any(dtype not in spec.legal_types(name) for name, dtype in types.items())


@pytest.mark.parametrize(("op_type", "cann"), VARIANTS)
def test_a_variant_computes_what_the_newest_does(op_type: str, cann: str) -> None:
    inputs, attrs = right_call(op_type, cann)
    found = reference.run(op_type, inputs, attrs, cann=cann)
    assert set(found) == set(get(op_type, cann).output_names)
    newest = {name: value for name, value in attrs.items() if name in get(op_type).attr_names}
    for name, wanted in reference.run(op_type, inputs, newest).items():
        if name in found:
            np.testing.assert_array_equal(found[name], wanted, strict=True)
