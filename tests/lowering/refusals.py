"""A call that has to be refused, put to everybody who checks calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler import ops, reference
from fa_compiler.lowering.ort.eager import compute
from fa_compiler.op_registry import as_arrays, full_attrs, get


def refused(
    op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], cann: str | None = None
) -> tuple[str, str]:
    """What the registry says, by the eager call, and what the kernel says alone, as in a model. The reference refuses
    the call, too, in the registry's words."""
    with pytest.raises(ops.KernelError, match=rf"^{op_type}: ") as asked:
        ops.run(op_type, inputs, attrs, cann=cann)
    with pytest.raises(reference.ReferenceInputError, match=rf"^{op_type}: ") as computed:
        reference.run(op_type, inputs, attrs, cann=cann)
    assert str(asked.value).endswith(computed.value.problem)
    spec = get(op_type, cann)
    with pytest.raises(ops.KernelError) as error:
        compute(spec, as_arrays(spec, inputs), full_attrs(spec, attrs), cann=cann)
    return str(asked.value), str(error.value)
