"""Writes files so that a failed run leaves nothing: beside the final place first, moved there at the end."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from fa_compiler.errors import InputError
from fa_compiler.model_files import tensors
from fa_compiler.model_files.inline_weights import PROTO_LIMIT, FileWeights, extent, serialised
from fa_compiler.model_files.reading import Loaded
from fa_compiler.passes.report import Report

ALIGNMENT = 1 << 16
"""Offset granularity of joined data files: a multiple of every page size, so that they can be mapped."""

INLINE_LIMIT = PROTO_LIMIT - (64 << 20)
"""A model whose inline tensors exceed this is written with external data; the rest is left for the graph."""

INLINE_TENSOR = 1 << 10
"""Tensors up to this many bytes stay inline even then."""

_CHUNK = 1 << 24
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)
_STEP = 1 << 28
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""How the system says that a place takes no more bytes."""


Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


@dataclass
class Staging:
    """The files of one run. Nothing appears under its final name before `commit`, data files excepted:
    those get a new name of their own and are removed again by `discard`. `progress` hears of bytes copied."""

    progress: Progress | None = None
    _moves: list[tuple[Path, Path]] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)

    def reserve(self, target: Path) -> Path:
        """A new empty file beside `target` that `commit` will move there; for a device, the device itself.

        Raises:
            InputError: there is no such folder, or it cannot be written.
        """
        if target.is_dir():
            raise InputError(f"{target} is a folder; give the name of the file to write")
        if is_special(target):
            return target
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        self.create(temporary, target)
        self._moves.append((temporary, target))
        return temporary

    def create(self, path: Path, target: Path) -> None:
        """Make the new file `path`, to be removed on failure; errors name `target`."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            if not target.parent.is_dir():
                raise InputError(
                    f"{target} cannot be written: there is no folder {target.parent}; make it first"
                ) from None
            raise cannot_write(target, error) from None
        self._made.append(path)

    def commit(self) -> None:
        """Move every file to its place."""
        while self._moves:
            temporary, target = self._moves[0]
            try:
                if target.is_dir():
                    raise InputError(f"{target} is a folder; give the name of the file to write")
                if target.exists() and not target.is_symlink():
                    temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                temporary.replace(target)
            except OSError as error:
                raise cannot_write(target, error) from None
            del self._moves[0]
            _sync_folder(target.parent)
        self._made.clear()

    def discard(self) -> None:
        """Remove what was made and not committed."""
        for path in self._made:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._made.clear()
        self._moves.clear()


@contextmanager
def staging(progress: Progress | None = None) -> Iterator[Staging]:
    """A `Staging` that is discarded when the block fails or ends without a commit, Ctrl-C included."""
    stage = Staging(progress)
    try:
        yield stage
    finally:
        stage.discard()


def write(path: Path, chunks: Iterable[bytes | memoryview], target: Path) -> None:
    """Write and sync a reserved file; errors name `target`."""
    try:
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if not is_special(path):
                os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(target, error) from None


def check_place(output: Path, loaded: Loaded, force: bool) -> None:
    """Refuse an output that would overwrite the input.

    Raises:
        InputError: `output` is the input and not `force`, or it is one of the input's data files.
    """
    if loaded.path is not None and _same(output, loaded.path) and not force:
        raise InputError(f"{output} is the input itself; choose another name, or --force to replace it")
    for place, real in loaded.files.items():
        if _same(output, real):
            raise InputError(f"{output} holds the weights of {loaded.name} ('{place}'); choose another name")


def write_model(proto: onnx.ModelProto, loaded: Loaded, output: Path, stage: Staging, report: Report) -> Path:
    """Stage `proto` for `output`, note in the report what to know about it, and return the staged file.

    External tensors of `proto` must hold absolute real paths as `location`; they are rewritten to what is
    right beside `output`. In the model's own folder they refer to the same files, elsewhere the files are
    copied. Weights that were left in the model's file are inline in the output.
    """
    staged = stage.reserve(output)
    report.notes.extend(_place_data(proto, loaded, output, stage))
    if not report.count("fused"):
        same = "is the input with the changes above" if report.mended else "is a copy of the input"
        report.notes.append(f"nothing was fused: the output {same}")
    write(staged, serialised(proto, loaded.weights, str(output)), output)
    return staged


def relocate(proto: onnx.ModelProto, places: Mapping[str, str]) -> None:
    """Replace each `location` of external data by the one `places` gives for it."""
    _relocate(filter(tensors.is_external, tensors.all_tensors(proto)), places)


def _relocate(external: Iterable[onnx.TensorProto], places: Mapping[str, str]) -> None:
    for tensor in external:
        tensors.set_location(tensor, places[tensors.location(tensor)])


def _place_data(proto: onnx.ModelProto, loaded: Loaded, output: Path, stage: Staging) -> list[str]:
    external: list[onnx.TensorProto] = []
    inside: list[onnx.TensorProto] = []
    weights = loaded.weights
    for tensor in tensors.all_tensors(proto):
        own = weights is not None and weights.own(tensor)
        (external if tensors.is_external(tensor) and not own else inside).append(tensor)
    folder = output.absolute().parent
    here = folder.resolve()
    used = list(dict.fromkeys(Path(tensors.location(tensor)) for tensor in external))
    beside = _same(folder, loaded.folder.base) and all(real.is_relative_to(here) for real in used)
    inline = _too_large(inside)
    if beside:
        _relocate(external, loaded.relative)
        used = []
    if not used and not inline:
        return []
    if is_special(output):
        raise InputError(f"{output} is no regular file, and the model's weights need a file beside it")
    return _join(external if used else [], used, inline, weights, output, stage)


def _join(
    external: list[onnx.TensorProto],
    files: list[Path],
    inline: list[onnx.TensorProto],
    weights: FileWeights | None,
    output: Path,
    stage: Staging,
) -> list[str]:
    """Put whole data files one after the other, then inline tensors, into one new file beside `output`."""
    shifts: dict[Path, int] = {}
    end = 0
    for path in files:
        shifts[path] = _aligned(end)
        end = shifts[path] + path.stat().st_size
    if not output.name.isprintable() or output.name != output.name.encode(errors="replace").decode():
        raise InputError(f"{output} needs a file for weights beside it, whose name must be UTF-8; choose another name")
    data, fresh = _data_file(output, list(shifts.items()) if not inline else [], end)
    notes = [f"weights are in {data.name}"]
    if fresh:
        stage.create(data, data)
        try:
            with data.open("r+b") as file:
                for path, shift in shifts.items():
                    for done in _copy(path, file.fileno(), shift):
                        if stage.progress is not None:
                            stage.progress("copying weights (MiB)", done >> 20, end >> 20)
                for tensor in inline:
                    end = _externalise(tensor, weights, file.fileno(), _aligned(end), data.name)
                file.truncate(end)
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(data, error) from None
    for tensor in external:
        tensors.set_location(tensor, data.name, shifts[Path(tensors.location(tensor))])
    return notes


def _data_file(output: Path, segments: list[tuple[Path, int]], size: int) -> tuple[Path, bool]:
    """A name for the data file and whether it is to be written: an equal file of an earlier run is used
    again, any other existing file is left alone, for another model may need it."""
    number = 0
    while True:
        data = output.with_name(f"{output.name}.{number}.data" if number else f"{output.name}.data")
        if not os.path.lexists(data):
            return data, True
        plain = data.is_file() and not data.is_symlink() and data.stat().st_size == size
        if plain and segments and all(_equal(path, data, shift) for path, shift in segments):
            return data, False
        number += 1


def _equal(path: Path, data: Path, shift: int) -> bool:
    with path.open("rb") as left, data.open("rb") as right:
        right.seek(shift)
        while chunk := left.read(_CHUNK):
            if chunk != right.read(len(chunk)):
                return False
    return True


def _copy(path: Path, target: int, shift: int) -> Iterator[int]:
    """Copy a file to an offset of an open one inside the kernel where possible, leaving holes as holes; yields how
    far the target is written."""
    with path.open("rb") as file:
        source, size, position = file.fileno(), os.fstat(file.fileno()).st_size, 0
        while position < size:
            try:
                position = os.lseek(source, position, os.SEEK_DATA)
                stop = os.lseek(source, position, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                stop = size
            while position < stop:
                position += _copy_some(source, target, position, shift + position, min(stop - position, _STEP))
                yield shift + position


def _copy_some(source: int, target: int, start: int, place: int, count: int) -> int:
    try:
        done = os.copy_file_range(source, target, count, start, place)
        if done:
            return done
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    chunk = os.pread(source, min(count, _CHUNK), start)
    if not chunk:
        raise OSError(None, "the weights became shorter while they were copied")
    return os.pwrite(target, chunk, place)


def _externalise(tensor: onnx.TensorProto, weights: FileWeights | None, target: int, place: int, name: str) -> int:
    own = weights is not None and tensors.is_external(tensor)
    content = weights.chunks(*extent(tensor)) if weights is not None and own else [tensor.raw_data]
    end = place
    for chunk in content:
        view, done = memoryview(chunk), 0
        while done < len(view):
            done += os.pwrite(target, view[done : done + _CHUNK], end + done)
        end += done
    tensors.make_external(tensor, name, place, end - place)
    return end


def _too_large(inside: list[onnx.TensorProto]) -> list[onnx.TensorProto]:
    """The tensors that have to leave the file, none if it stays below the limit."""
    if sum(tensor.ByteSize() + _left(tensor) for tensor in inside) <= INLINE_LIMIT:
        return []
    return [tensor for tensor in inside if max(len(tensor.raw_data), _left(tensor)) > INLINE_TENSOR]


def _left(tensor: onnx.TensorProto) -> int:
    """Bytes of a tensor that was left in the model's file."""
    return extent(tensor)[1] if tensors.is_external(tensor) else 0


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _same(left: Path, right: Path) -> bool:
    try:
        return left.samefile(right)
    except OSError:
        return left.resolve() == right.resolve()


def is_special(path: Path) -> bool:
    """An existing pipe or device, to be written as it is: replacing /dev/null would be a disaster."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cannot_write(target: Path, error: OSError) -> InputError:
    """What to tell the user when the system refuses to write to `target`."""
    reason = error.strerror or str(error)
    hint = "free some space or choose another place" if error.errno in FULL else "choose another place"
    return InputError(f"{target} cannot be written: {reason}; {hint}")
