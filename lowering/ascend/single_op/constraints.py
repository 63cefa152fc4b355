"""The numbered constraints of an attention operator for the operator of a single-op file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.air.check_prototypes import entry_of
from fa_compiler.lowering.ascend.graph import Op, Weight, known_sizes
from fa_compiler.op_registry import Diagnostic, NodeView, TensorInfo, get, names, verify
from fa_compiler.op_registry.diagnostic import GENERIC
from fa_compiler.op_registry.dtypes import to_numpy
from fa_compiler.op_registry.spec import Kind


def broken_constraints(
    op: Op, constants: Mapping[str, Weight], product: str | None = None, cann: str | None = None
) -> list[Diagnostic]:
    """The constraints that an operator breaks; none are known for an operator that the registry
    does not hold.

    Args:
        constants: the values of inputs by name.
        product: the product or SoC version; None reports the numbered constraints that Ascend
            checks on every product.
        cann: the version of the prototype; None is the newest.
    """
    if op.type not in names():
        return []
    outputs = {
        desc.name: TensorInfo(desc.dtype, known_sizes(desc.shape)) for desc in op.output_descs
    }
    attrs = {name: attr.value for name, attr in op.attrs.items()}
    view = NodeView(op.type, op.name, _inputs(op, constants, cann), outputs, attrs)
    if product is not None:
        return verify(view, product, cann)
    found = verify(view, cann=cann)
    return [
        broken for broken in found if broken.constraint != GENERIC and broken.stage != "document"
    ]


def _inputs(op: Op, constants: Mapping[str, Weight], cann: str | None) -> dict[str, Any]:
    spec = get(op.type, cann)
    infos: dict[str, Any] = {}
    for desc in op.input_descs:
        found = entry_of(spec.inputs, desc.name)
        if desc.is_absent or found is None:
            continue
        weight = constants.get(desc.name)
        value = (
            None
            if weight is None
            else np.frombuffer(weight.load(), to_numpy(weight.dtype)).reshape(weight.shape)
        )
        info = TensorInfo(desc.dtype, known_sizes(desc.shape), value)
        if found[0].kind is Kind.DYNAMIC:
            infos.setdefault(found[0].name, []).append(info)
        else:
            infos[desc.name] = info
    return infos
