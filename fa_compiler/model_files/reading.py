"""Reads a model, without its weights, from a path, from bytes or from an object, and checks and
repairs it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fa_compiler.checks import checker
from fa_compiler.errors import InputError, one_line, origin
from fa_compiler.lowering.onnx_file import to_graph_operators
from fa_compiler.model_files import inline_weights, refusals, repairs
from fa_compiler.model_files.expansion import excess
from fa_compiler.model_files.foreign_types import foreign_types, without_types
from fa_compiler.model_files.inline_weights import PROTO_LIMIT, FileWeights
from fa_compiler.model_files.repairs import OrderError, as_runtime_reads, distinct_weights, repaired
from fa_compiler.op_registry.collectives import METADATA_KEY
from fa_compiler.passes.emit.joined import OF_MODEL_FILE
from fa_compiler.protos.metadata import metadata_of
from fa_compiler.protos.subgraphs import Subgraphs
from fa_compiler.protos.tensors import (
    Folder,
    all_tensors,
    check_external,
    is_external,
    location,
    message_size,
)

ModelLike = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model
"""A path, the bytes of a file, or a model in memory. An `ONNXProgram`, which torch.onnx.export
returns, stands for its `ir.Model`; torch is no dependency, so the type cannot be named here."""
_PACKED = {
    b"\xfd7zXZ": "compressed by xz",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
}
"""How compressed files and archives begin. The files of torch and numpy.savez are zip archives."""
_WEIGHTS = (".safetensors", ".gguf", ".onnx_data", ".onnx.data")
"""How the names of files end that hold weights of other formats, or those of an ONNX file."""
_POINTER = b"version https://git-lfs"
"""How the file begins that a clone without Git LFS has in place of a large one."""
_SMALL = 1 << 10
"""Tensors of up to this many bytes are simply copied."""


@dataclass(frozen=True)
class LoadedModel:
    """A checked model.

    `proto` is the given model (for an `ir.Model` its serialised form), or a copy of it with the
    `repairs`. It is never changed. `files` maps each `location` of external data in the model to
    its real path. `name` is for messages and the report. `weights` is the model file, if weights
    were left in it or lie in other files. Those that were left in it are external tensors in
    `proto`.
    """

    name: str
    path: Path | None
    folder: Folder
    proto: onnx.ModelProto
    files: dict[str, Path]
    weights: FileWeights | None = None
    repairs: tuple[str, ...] = ()
    foreign: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """The types that onnx-ir cannot hold, by the name of their value."""

    @property
    def absolute(self) -> dict[str, str]:
        """The absolute path of each `location` in the model."""
        return {place: str(real) for place, real in self.files.items()} | self.kept_in_file_location

    @property
    def relative(self) -> dict[str, str]:
        """The `location` in the model for each absolute path."""
        return {str(real): place for place, real in self.files.items()} | self.kept_in_file_location

    @property
    def kept_in_file_location(self) -> dict[str, str]:
        """The location of the tensors that were left in the model's file, mapped to itself; empty
        if there are none."""
        return {} if self.weights is None else {self.weights.location: self.weights.location}

    def to_ir(self) -> ir.Model:
        """A new IR of the model. Its external tensors have absolute real paths and stay on disk.
        Values whose type onnx-ir cannot hold have no type. Fused nodes have the form of the graph
        (lowering/onnx_file)."""
        try:
            proto = to_graph_operators(self.proto)
            model = ir.from_proto(without_types(proto, self.foreign) if self.foreign else proto)
        except (ir.serde.SerdeError, ValueError, TypeError, NotImplementedError) as error:
            raise InputError(
                f"{self.name} holds what onnx-ir cannot represent: {one_line(origin(error))}"
            ) from error
        # no node uses this domain, but new nodes may
        if not {"", "ai.onnx"} & {*model.graph.opset_imports}:
            model.graph.opset_imports[""] = repairs.NEWEST[""]
        _detach(model, self.absolute)
        return model


def load(model: ModelLike) -> LoadedModel:
    """Read and check a model. The existence and the size of external data are checked, but the data
    are not read.

    The external data of a model without a path, also of one that is given as bytes, are relative to
    the current folder.

    Raises:
        InputError: the file cannot be read, is not ONNX, is invalid, or its external data are
            missing.
        TypeError: `model` has none of the accepted types.
    """
    if isinstance(model, (str, os.PathLike)):
        if not os.fspath(model):
            raise InputError("the path of the model is empty")
        path = Path(model)
        return _loaded(_read(path), str(path), path, Folder.of(path))
    if isinstance(model, bytes):
        return load_bytes(model, Path.cwd())
    if isinstance(model, onnx.ModelProto):
        return _loaded(_Read(model), "model", None, Folder.at(Path.cwd()))
    if isinstance(model, ir.Model):
        return _loaded_ir(model)
    exported = getattr(model, "model", None)
    if type(model).__name__ == "ONNXProgram" and isinstance(exported, ir.Model):
        return _loaded_ir(exported)
    kinds = "a path, bytes, an onnx.ModelProto, an onnx_ir.Model or an ONNXProgram of torch"
    inside = "; give its `model`" if isinstance(exported, (onnx.ModelProto, ir.Model)) else ""
    raise TypeError(f"a model is {kinds}, not {type(model).__name__}{inside}")


def load_bytes(content: bytes, folder: Path) -> LoadedModel:
    """Like `load`, for a serialised model. `folder` is the folder of its external data."""
    return _loaded(_Read(_parse(content, "model")), "model", None, Folder.at(folder))


def read_proto(path: Path) -> onnx.ModelProto:
    """Parse an ONNX file without its large weights, which may be in this file or in other files.

    Raises:
        InputError: the file cannot be read or is not an ONNX model, or its functions stand for too
            many nodes.
    """
    proto = _read(path).proto
    _check_expansion(proto, str(path))
    return proto


RUN_SHARDED = "fa_compiler.ShardedSession runs it, or give the model from which it was made"
"""The advice of `refuse_sharded` to a session of one process."""


class ShardedModel(InputError):
    """A model of several ranks, which `shard` made. ONNX Runtime does not know its nodes."""


def refuse_sharded(
    proto: onnx.ModelProto, name: str, advice: str = "give the model from which it was made"
) -> None:
    """Raise ShardedModel for a model of several ranks."""
    if metadata_of(proto, METADATA_KEY) is not None:
        raise ShardedModel(f"{name} is sharded already; {advice}")


def check_weights(path: Path) -> None:
    """Raise InputError if a file with weights of a model is missing, too short, or outside the
    model's folder."""
    read, folder = _read(path), Folder.of(path)
    # the initializers of the main graph come first
    for index, tensor in enumerate(all_tensors(read.proto)):
        if is_external(tensor) and index not in read.kept_in_file:
            check_external(tensor, folder, str(path))


def _check_expansion(proto: onnx.ModelProto, name: str) -> None:
    if (problem := excess(proto)) is not None:
        raise InputError(f"{name} cannot be processed: {problem}")


@dataclass(frozen=True)
class _Read:
    """A parsed model. `kept_in_file` are the positions of the initializers of the main graph that
    were left in the file."""

    proto: onnx.ModelProto
    kept_in_file: frozenset[int] = frozenset()
    weights: FileWeights | None = None


def _read(path: Path) -> _Read:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the .onnx file in it")
        size = path.stat().st_size
        if size > PROTO_LIMIT:
            raise _too_large(path, f"{size} bytes")
        if (skeleton := inline_weights.read_skeleton(path)) is not None:
            return _Read(
                _parse(skeleton.content, str(path)), skeleton.kept_in_file, skeleton.weights
            )
        with path.open("rb") as file:
            # As many bytes as are asked for are reserved. A pipe or device does not tell its size.
            content = file.read(size + 1 if size else PROTO_LIMIT + 1)
        if len(content) > PROTO_LIMIT:
            raise _too_large(path, "more than 2 GiB")
    except FileNotFoundError:
        hint = "; download an address first" if re.match(r"https?:[/\\]", str(path)) else ""
        raise InputError(f"{path}: no such file{refusals.too_long(path)}{hint}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {refusals.reason(error, path)}") from None
    return _Read(_parse(content, str(path)))


def _too_large(path: Path, size: str) -> InputError:
    return InputError(
        f"{path} has {size}; an ONNX file over 2 GiB needs its weights in external data"
    )


def _parse(content: bytes, name: str) -> onnx.ModelProto:
    if not content:
        raise InputError(f"{name} is empty; an ONNX model was expected")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError:
        if content.startswith(_POINTER):
            raise InputError(
                f"{name} is a pointer of Git LFS, not the file; `git lfs pull` fetches it"
            ) from None
        for begin, kind in _PACKED.items():
            if content.startswith(begin):
                raise InputError(
                    f"{name} is {kind}, and not an ONNX model; unpack it, or export the model"
                ) from None
        if name.endswith(_WEIGHTS):
            raise InputError(
                f"{name} holds weights only; give the .onnx file, or export the model"
            ) from None
        if name.endswith(".air"):
            raise InputError(
                f"{name} is no ONNX model; air check and air show read .air files"
            ) from None
        raise InputError(
            f"{name} is not an ONNX model, or is truncated; fetch or export it again"
        ) from None
    if not proto.HasField("graph") or not proto.ir_version:
        raise InputError(f"{name} is not an ONNX model: it holds no graph")
    return proto


def _loaded(read: _Read, name: str, path: Path | None, folder: Folder) -> LoadedModel:
    files: dict[str, Path] = {}
    below = Subgraphs.of(read.proto)
    if (problem := _not_carried(below)) is not None:
        raise InputError(f"{name} {problem}")
    _check_expansion(read.proto, name)
    distinct = distinct_weights(read.proto, read.weights)
    proto, notes = as_runtime_reads(below, distinct)
    if (problem := checker.fault(proto, full=False)) is not None:
        try:
            proto, more_notes = repaired(proto)
        except OrderError as error:
            raise InputError(f"{name} is not a valid ONNX model: {error}") from None
        notes += more_notes
        problem = checker.fault(proto, full=False) if more_notes else problem
    if problem is not None:
        raise InputError(f"{name} is not a valid ONNX model: {problem}")
    # The initializers of the main graph come first.
    positions = itertools.chain(distinct, itertools.count(len(read.proto.graph.initializer)))
    for index, tensor in zip(positions, all_tensors(proto), strict=False):
        if is_external(tensor) and index not in read.kept_in_file:
            files[location(tensor)] = check_external(tensor, folder, name)
    below = below if proto is read.proto else Subgraphs.of(proto)
    weights = FileWeights.beside(path) if files and read.weights is None else read.weights
    return LoadedModel(
        name, path, folder, proto, files, weights, tuple(notes), foreign_types(below)
    )


def _loaded_ir(model: ir.Model) -> LoadedModel:
    """A loaded IR model, by way of its proto. Each of its external tensors has its own base
    folder."""
    clone = model.clone()
    tensors = map(_tensor_of, _holders(clone))
    folders = {
        Path(tensor.base_dir).absolute()
        for tensor in tensors
        if isinstance(tensor, ir.ExternalTensor)
    }
    if len(folders) > 1:
        raise InputError(
            "model: its external data have several base folders; save it to one place first"
        )
    base = folders.pop() if folders else Path.cwd()
    return _loaded(_Read(ir.to_proto(clone)), "model", None, Folder.at(base))


def _not_carried(below: Subgraphs) -> str | None:
    """A part of the model that onnx-ir would silently drop, as a sentence; None if there is
    none."""
    if below.model.training_info:
        return "has training_info, which cannot be carried through; remove it"
    if any(graph.sparse_initializer for graph in (below.model.graph, *below.of_graph)):
        return "has sparse initializers, which cannot be carried through; make them dense"
    return None


def _detach(model: ir.Model, files: dict[str, str]) -> None:
    """Replace every tensor by a copy of its own, with the real path of its file if it is external.

    A pass that renames a tensor then does not change the given proto.
    """

    def own(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(tensor, ir.ExternalTensor):
            place = os.fspath(tensor.location)
            copy = ir.ExternalTensor(
                files[place],
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape),
                name=tensor.name,
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
            # the location of what was left in the model's file
            copy.meta[OF_MODEL_FILE] = files[place] == place
            return copy
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            if message_size(tensor.raw) <= _SMALL:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor.raw)
                return ir.serde.TensorProtoTensor(copy)
            return ir.LazyTensor(
                lambda: tensor,
                dtype=tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
        return tensor

    for holder in _holders(model):
        tensor = own(_tensor_of(holder))
        if isinstance(holder, tuple):
            node, attribute = holder
            node.attributes[attribute.name] = ir.AttrTensor(
                attribute.name, tensor, doc_string=attribute.doc_string
            )
        else:
            holder.const_value = tensor


_Holder = ir.Value | tuple[ir.Node, ir.Attr]
"""The holder of a tensor: an initializer, or a node and one of its attributes."""


def _tensor_of(holder: _Holder) -> ir.TensorProtocol:
    # `as_tensor` would check the tensor against a whole protocol, which takes longer than
    # everything else here.
    tensor = holder[1].value if isinstance(holder, tuple) else holder.const_value
    assert tensor is not None
    return tensor


def _holders(model: ir.Model) -> Iterator[_Holder]:
    """All holders of a tensor. The caller may change a holder as soon as it is yielded."""
    waiting: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    while waiting:
        body = waiting.pop()
        if isinstance(body, ir.Graph):
            yield from (
                value for value in body.initializers.values() if value.const_value is not None
            )
        for node in body:
            if not node.attributes:
                continue
            for attribute in list(node.attributes.values()):
                if attribute.is_ref() or attribute.value is None:
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    yield node, attribute
                elif attribute.type == ir.AttributeType.GRAPH:
                    waiting.append(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    waiting.extend(attribute.as_graphs())
