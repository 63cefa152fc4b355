"""The reference as OpRun classes, with which onnx.reference runs models with nodes of the domain
`ascend`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from fa_compiler.errors import InputError
from fa_compiler.op_registry import DOMAIN, OpSpec, bind_inputs, bind_outputs, get, variants
from fa_compiler.op_registry.runtime_schemas import is_runtime_operator
from fa_compiler.reference.call import OPERATORS, Array, ReferenceInputError
from fa_compiler.reference.runner import run


class _AscendOp(OpRun):
    op_domain = DOMAIN
    op_schema = None  # attributes and their defaults come only from op_registry

    def run(self, *args: Any, **kwargs: Any) -> tuple[Array | None, ...]:
        """As OpRun.run, but an output with the name "" is None.

        The evaluator stores every output by its name and reads an absent input by the name "". Any
        other value would become the absent inputs of all later nodes.
        """
        results = super().run(*args, **kwargs)  # type: ignore[no-untyped-call]
        return tuple(
            value if name else None
            for name, value in zip(self.onnx_node.output, results, strict=True)
        )

    def _run(self, *args: Any, **attrs: Any) -> tuple[Array, ...]:
        spec = _variant(self.op_type, args)
        given = {name: value for name, value in attrs.items() if value is not None}
        bound = bind_outputs(spec, self.output)
        wanted = [name for name, value in bound.items() if value]
        try:
            results = run(
                self.op_type, bind_inputs(spec, args, given), given, wanted, cann=spec.variant
            )
        except ReferenceInputError as error:
            raise ReferenceInputError(
                error.op_type, error.name, error.problem, self.onnx_node.name
            ) from None
        not_wanted = np.zeros(0)
        return tuple(results.get(name, not_wanted) for name in list(bound)[: len(self.output)])


def _variant(op_type: str, args: tuple[Any, ...]) -> OpSpec:
    """The newest variant with integer inputs at the same positions as the node. Positions differ
    between variants."""
    integers = [None if array is None else np.asarray(array).dtype.kind == "i" for array in args]
    fitting = (
        spec
        for spec in reversed(variants(op_type))
        if all(
            found is None or found == entry.dtypes[0].startswith("DT_INT")
            for found, entry in zip(integers, spec.inputs, strict=False)
        )
    )
    return next(fitting, get(op_type))


def onnx_ops() -> list[type[OpRun]]:
    """One OpRun class for each operator with a reference, for
    `ReferenceEvaluator(model, new_ops=onnx_ops())`.

    ReferenceEvaluator does not pass new_ops on to model-local functions; `evaluator` does.
    """
    return [type(op_type, (_AscendOp,), {}) for op_type in sorted(OPERATORS)]


class GatherElements(OpRun):
    """onnx 1.23's own ends in an error for data of another size than the indices, which exporters
    of BERT write."""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        places = list(np.ogrid[tuple(map(slice, indices.shape))])
        places[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
        return (data[tuple(places)],)


class _Evaluator(ReferenceEvaluator):
    """Runs the reference operators in the graph, in its subgraphs and in model-local functions."""

    def __init__(
        self, proto: Any, *, new_ops: list[type[OpRun]] | None = None, **others: Any
    ) -> None:
        super().__init__(proto, new_ops=[*(new_ops or []), *onnx_ops(), GatherElements], **others)


def evaluator(model: onnx.ModelProto | str | os.PathLike[str] | bytes) -> ReferenceEvaluator:
    """A ReferenceEvaluator for a model (a proto, a path or bytes) with `ascend` nodes anywhere.

    It reads calls as ONNX Runtime does: a function of the model that is named like an operator
    which ONNX Runtime knows by itself is not called. Such a model cannot be evaluated if onnx has
    no reference of the operator. The functions of nodes that have a reference here are not called
    either.

    Raises:
        InputError: a file or bytes are no ONNX model.
    """
    proto = _loaded(model)
    versions = {_domain(opset.domain): opset.version for opset in proto.opset_import}
    called = [
        each
        for each in proto.functions
        if each.domain != DOMAIN and not _is_shadowed(each, versions)
    ]
    if len(called) < len(proto.functions):
        given, proto = proto, onnx.ModelProto()
        proto.CopyFrom(given)
        del proto.functions[:]
        proto.functions.extend(called)
    return _Evaluator(proto)


def _loaded(model: onnx.ModelProto | str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        return (
            onnx.load_model_from_string(model)
            if isinstance(model, bytes)
            else onnx.load(os.fspath(model))
        )
    except DecodeError:
        name = "the model" if isinstance(model, bytes) else os.fspath(model)
        raise InputError(f"{name} is no ONNX model") from None


def _is_shadowed(function: onnx.FunctionProto, versions: Mapping[str, int]) -> bool:
    domain = _domain(function.domain)
    return is_runtime_operator(domain, function.name, versions.get(domain, 1))


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
