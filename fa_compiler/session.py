"""`InferenceSession`: ONNX Runtime's session, with attention fused while it loads."""

from __future__ import annotations

import inspect
import io
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from fa_compiler import op_registry
from fa_compiler.errors import InputError, check_keywords
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.model_files.inline_weights import serialised
from fa_compiler.model_files.reading import (
    RUN_SHARDED,
    LoadedModel,
    ShardedModel,
    load,
    load_bytes,
    refuse_sharded,
)
from fa_compiler.model_files.temporary import new_folder
from fa_compiler.model_files.writing import relocate
from fa_compiler.passes import Options, Report
from fa_compiler.pipeline.fusing import run
from fa_compiler.pipeline.options import python_options
from fa_compiler.protos.tensors import all_tensors, is_external, location

FOLDER = "session.model_external_initializers_file_folder_path"
"""The session option for the folder of external data of a model given as bytes. ONNX Runtime 1.20
does not have it."""

_HAS_FOLDER = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 22)

_ARGUMENTS = frozenset(
    text
    for text in inspect.unwrap(ort.InferenceSession.__init__).__code__.co_consts
    if isinstance(text, str) and text.isidentifier() and text.islower()
)
"""Holds the names of all arguments that ONNX Runtime looks up in its **kwargs: they are constants
of its code."""

_OURS: weakref.WeakKeyDictionary[ort.SessionOptions, str] = weakref.WeakKeyDictionary()
"""The session options in which this module set `FOLDER`, and the value."""


class InferenceSession(OwnSession):
    """Drop-in for `onnxruntime.InferenceSession`: same arguments, same behaviour, faster attention.

    `fusion_report` tells what was fused. It is None for a model in ORT format, which is never
    changed (the library is registered if it may need it), and for a model that this package
    refuses. A warning then gives the reason, and ONNX Runtime loads the unchanged model or raises
    its own error.

    The custom ops are registered on `sess_options`, which several sessions may share.

    Besides the arguments of `onnxruntime.InferenceSession` it takes `assume`, assumptions that you
    vouch for, and `in_place_caches`, both as `fa_compiler.optimize` does.

    Raises:
        TypeError: an argument is neither ONNX Runtime's nor ours.
        InputError: an assumption is unknown, or the model is one of several ranks.
    """

    fusion_report: Report | None

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        assume: Iterable[str] = (),
        in_place_caches: bool = Options.in_place_caches,
        **kwargs: Any,
    ) -> None:
        if not kwargs.keys() <= _ARGUMENTS:
            named = inspect.signature(InferenceSession).parameters.keys() - {"kwargs"}
            check_keywords("InferenceSession", kwargs, named | _ARGUMENTS)
        self._fa_fusion = python_options(assume=assume, in_place_caches=in_place_caches)
        if not isinstance(sess_options, ort.SessionOptions | None):
            raise TypeError(
                f"`sess_options` is an onnxruntime.SessionOptions or None, not {sess_options!r}"
            )
        options = ort.SessionOptions() if sess_options is None else sess_options
        self.fusion_report = None
        self._fa_options = options
        self._fa_folder: Path | None = None
        self._fa_temporary: tempfile.TemporaryDirectory[str] | None = None
        refused: InputError | None = None
        model: str | bytes | os.PathLike[str] = path_or_bytes
        if isinstance(path_or_bytes, (str, bytes, os.PathLike)):
            if _is_ort_format(path_or_bytes, options):
                if _names_our_domains(path_or_bytes):
                    register_custom_ops(options)
            else:
                try:
                    model = self._fused(path_or_bytes)
                except ShardedModel:
                    raise
                except InputError as error:
                    refused = error
        try:
            with self._weights():
                super().__init__(model, options, providers, provider_options, **kwargs)
        except Exception as error:
            if refused is not None:
                error.add_note(f"fa_compiler could not use the model either: {refused}")
            raise
        if refused is not None:
            warnings.warn(f"loaded without fusing: {refused}", stacklevel=2)

    def __repr__(self) -> str:
        """The name of the model, and how much of its attention is fused."""
        return f"<InferenceSession {self.fusion_report.outcome if self.fusion_report else 'without fusion'}>"

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """As in ONNX Runtime. The fused model is loaded again."""
        with self._weights():
            super().set_providers(providers, provider_options)

    def _load(self, source: str | bytes | os.PathLike[str]) -> LoadedModel:
        if isinstance(source, bytes):
            return load_bytes(source, _folder_option(self._fa_options) or Path.cwd())
        return load(source)

    def _fused(self, source: str | bytes | os.PathLike[str]) -> str | bytes | os.PathLike[str]:
        """The model to load instead of `source`, as a path or bytes; `source` itself if there is
        nothing to change."""
        loaded = self._load(source)
        refuse_sharded(loaded.proto, loaded.name, RUN_SHARDED)
        proto, self.fusion_report = run(loaded, self._fa_fusion)
        if any(
            opset.domain in op_registry.DOMAINS for opset in (proto or loaded.proto).opset_import
        ):
            register_custom_ops(self._fa_options)
        if proto is None:
            return source
        external = {location(tensor) for tensor in all_tensors(proto) if is_external(tensor)}
        files = sorted(external - loaded.kept_in_file_location.keys())
        if not files:
            return _bytes(proto, loaded)
        if not _HAS_FOLDER:
            return self._linked(proto, files, loaded)
        named = _folder_option(self._fa_options)
        if isinstance(source, bytes) and named is not None:
            folder = named.resolve()
        else:
            folder = self._fa_folder = Path(
                os.path.commonpath([Path(file).parent for file in files])
            )
        relocate(
            proto,
            {file: os.path.relpath(file, folder) for file in files} | loaded.kept_in_file_location,
        )
        return _bytes(proto, loaded)

    def _linked(self, proto: onnx.ModelProto, files: list[str], loaded: LoadedModel) -> str:
        """The path of the model in a new folder with links to its weights. The folder lives as long
        as the session."""
        self._fa_temporary = new_folder()
        folder = Path(self._fa_temporary.name)
        places = {file: f"{number}.data" for number, file in enumerate(files)}
        try:
            for file, place in places.items():
                (folder / place).symlink_to(file)
        except OSError:  # on Windows this is a right of its own
            raise InputError(
                f"{loaded.name} has its weights in other files, which ONNX Runtime {ort.__version__} finds by links "
                "only, and this user may make none; take a newer release, or fuse the file with fa-compiler optimize"
            ) from None
        relocate(proto, places | loaded.kept_in_file_location)
        path = folder / (loaded.path.name if loaded.path else "model.onnx")
        path.write_bytes(_bytes(proto, loaded))
        return str(path)

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Set the weights' folder in the session options while a session is made.

        A folder that the user had set is restored afterwards. Otherwise our folder stays, because
        ONNX Runtime warns about every change. It is remembered as ours: the weights of the next
        model with the same options are not searched there.
        """
        options, users = self._fa_options, _folder_option(self._fa_options)
        wanted = str(self._fa_folder or users or "")
        if _config(options, FOLDER) != wanted:
            options.add_session_config_entry(FOLDER, wanted)
        if users is None:
            _OURS[options] = wanted
        try:
            yield
        finally:
            if users is not None and wanted != str(users):
                options.add_session_config_entry(FOLDER, str(users))


def _bytes(proto: onnx.ModelProto, loaded: LoadedModel) -> bytes:
    """The serialised model with the weights inside the loaded file. It is in memory only once."""
    content = io.BytesIO()
    for chunk in serialised(proto, loaded.weights, loaded.name):
        content.write(chunk)
    return content.getvalue()


def _config(options: ort.SessionOptions, key: str) -> str:
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:
        return ""


def _folder_option(options: ort.SessionOptions) -> Path | None:
    """The folder that the user set for the external data of models given as bytes."""
    folder = _config(options, FOLDER)
    return Path(folder) if folder and _OURS.get(options) != folder else None


def _is_ort_format(source: str | bytes | os.PathLike[str], options: ort.SessionOptions) -> bool:
    if _config(options, "session.load_model_format") == "ORT":
        return True
    if isinstance(source, bytes):
        return source[4:8] == b"ORTM"
    return os.fspath(source).lower().endswith(".ort")


def _names_our_domains(source: str | bytes | os.PathLike[str]) -> bool:
    """Whether a model in ORT format may hold operators of the library: it names one of their
    domains."""
    domains = [domain.encode() for domain in op_registry.DOMAINS]
    if isinstance(source, bytes):
        return any(domain in source for domain in domains)
    try:
        with (
            Path(source).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return any(content.find(domain) >= 0 for domain in domains)
    except (OSError, ValueError):  # ONNX Runtime says what is wrong with the file
        return False
