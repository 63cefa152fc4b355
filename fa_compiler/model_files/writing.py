"""Writes files so that a failed run leaves nothing: they are temporary files until the end of the
run."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from fa_compiler.errors import InputError
from fa_compiler.model_files import positional, refusals
from fa_compiler.model_files.destination import is_same, is_special, open_for_writing, real_place
from fa_compiler.model_files.inline_weights import PROTO_LIMIT, FileWeights, extent, serialised
from fa_compiler.model_files.joined import file_chunks
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.passes.answer.report import Progress, Report, first_of
from fa_compiler.protos import tensors

ALIGNMENT = 1 << 16
"""The alignment of joined data files. It is a multiple of every page size, so that the files can be
mapped."""

INLINE_LIMIT = PROTO_LIMIT - (64 << 20)
"""A model with more bytes of inline tensors than this is written with external data. The 64 MiB up
to PROTO_LIMIT are for the graph."""

INLINE_TENSOR = 1 << 10
"""Tensors of up to this many bytes stay inline even then."""

_CHUNK = 1 << 24
_NO_KERNEL_COPY = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.ETXTBSY,
)
_STEP = 1 << 28
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a file system that takes no more bytes."""


@dataclass(frozen=True)
class _Move:
    """A written file, the place to which it is moved, and the name that the user gave this
    place."""

    written: Path
    place: Path
    target: Path


@dataclass
class Staging:
    """The files of one run.

    `commit` gives the files their final names. Only data files have their final, new names before;
    `discard` removes them again. `progress` is called while bytes are copied.
    """

    progress: Progress | None = None
    _moves: list[_Move] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)

    def reserve(self, target: Path) -> Path:
        """A new empty file beside the place of `target`, to which `commit` will move it.

        A pipe, a device or an open file of this process is returned itself (`destination`).

        Raises:
            InputError: the folder does not exist or cannot be written, or `target` is a folder or a
                circle of links.
        """
        if target.is_dir():
            raise InputError(f"{target} is a folder; give the name of the file to write")
        if is_special(target):
            return target
        place = real_place(target)
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
        self.create(temporary, place if target.is_symlink() else target)
        self._moves.append(_Move(temporary, place, target))
        return temporary

    def create(self, path: Path, target: Path) -> None:
        """Create the file `path`, which is removed on failure. Errors (InputError) name
        `target`."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError as error:
            if not target.parent.is_dir() and not refusals.too_long(target):
                raise InputError(
                    f"{target} cannot be written: there is no folder {target.parent}; make it first"
                ) from None
            raise cannot_write(target, error) from None
        self._made.append(path)

    def commit(self) -> None:
        """Move every file to its target. Raises InputError."""
        while self._moves:
            move = self._moves[0]
            try:
                if move.place.is_dir():
                    raise InputError(
                        f"{move.target} is a folder; give the name of the file to write"
                    )
                if move.place.exists():
                    move.written.chmod(stat.S_IMODE(move.place.stat().st_mode))
                positional.replace(move.written, move.place)
            except OSError as error:
                raise cannot_write(move.target, error) from None
            del self._moves[0]
            _sync_folder(move.place.parent)
        self._made.clear()

    def discard(self) -> None:
        """Remove the files that were created and not committed."""
        for path in self._made:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._made.clear()
        self._moves.clear()


@contextmanager
def staging(progress: Progress | None = None) -> Iterator[Staging]:
    """A `Staging` that is discarded if the block fails (Ctrl-C included) or ends without a
    commit."""
    stage = Staging(progress)
    try:
        yield stage
    finally:
        stage.discard()


def write(path: Path, chunks: Iterable[bytes | memoryview], target: Path) -> None:
    """Write and sync a reserved file. Errors (InputError) name `target`."""
    try:
        with open_for_writing(path) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if not is_special(path):
                os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(target, error) from None


def check_place(output: Path, loaded: LoadedModel, force: bool | None = None) -> None:
    """Refuse an output that would overwrite the input. `force` is None for a command that has no
    such option.

    Raises:
        InputError: `output` is the input, without `force`, or it is one of the input's data files.
    """
    if loaded.path is not None and is_same(output, loaded.path) and not force:
        other = "" if force is None else ", or --force to replace it"
        raise InputError(f"{output} is the input itself; choose another name{other}")
    for place, real in loaded.files.items():
        if is_same(output, real):
            raise InputError(
                f"{output} holds the weights of {loaded.name} ('{place}'); choose another name"
            )


def check_no_model(output: Path, what: str) -> None:
    """Refuse the name of a model for an output that is none.

    Raises:
        InputError: `output` ends with .onnx; the message says `what` cannot have this name.
    """
    if output.suffix.lower() == ".onnx":
        raise InputError(
            f"the {what} cannot be {output}, which is the name of a model; choose another name"
        )


def write_model(
    proto: onnx.ModelProto,
    loaded: LoadedModel,
    output: Path,
    stage: Staging,
    report: Report,
    keep: bool = False,
    unfused: str = "is a copy of the input",
) -> Path:
    """Stage `proto` for `output`, and return the staged file. Notes for the user go into the
    report; `unfused` is what they say of the output where nothing is fused.

    The `location` of each external tensor of `proto` must be an absolute real path. It is replaced
    by one that is relative to `output`. In the model's own folder the tensors refer to the same
    files. For another folder the files are copied; with `keep` the tensors refer to them from a
    folder above, too. Weights that were left in the model's file become inline.

    Raises:
        InputError: `output` or a file beside it cannot be written, or with `keep` a file is not
            below its folder.
    """
    staged = stage.reserve(output)
    _place_data(proto, loaded, output, stage, keep)
    report.notes.extend(_data_files(proto, loaded, output))
    if not report.is_changed:
        same = "is the input with the changes above" if report.changed_otherwise else unfused
        report.notes.append(f"{_why_unchanged(report)}: the output {same}")
    write(staged, serialised(proto, loaded.weights, str(output)), output)
    return staged


def _data_files(proto: onnx.ModelProto, loaded: LoadedModel, output: Path) -> list[str]:
    """The note that names the files of weights that a model file needs beside it; none if it holds
    its weights."""
    places = sorted(_external_places(proto, loaded))
    if not places:
        return []
    return [f"{output.name} needs its weights, {first_of(places)}, at the same place beside it"]


def _external_places(proto: onnx.ModelProto, loaded: LoadedModel) -> set[str]:
    """The locations of the external tensors of a model, without those that were left in the model's
    own file."""
    own = loaded.weights
    external = filter(tensors.is_external, tensors.all_tensors(proto))
    return {tensors.location(tensor) for tensor in external if own is None or not own.owns(tensor)}


def _why_unchanged(report: Report) -> str:
    """Why nothing was fused, in short."""
    already = report.count("already_fused") and not report.count("declined")
    return "the model is already fused" if already else "nothing was fused"


def file_sizes(
    loaded: LoadedModel, proto: onnx.ModelProto, staged: Path, output: Path
) -> tuple[int, int] | None:
    """The bytes of a model's files, external weights included, before and after `write_model`
    staged `proto`; None if one of them is not a regular file."""
    if loaded.path is None or is_special(loaded.path) or is_special(staged):
        return None
    data = {output.parent / place for place in _external_places(proto, loaded)}
    before, after = {loaded.path, *loaded.files.values()}, {staged, *data}
    return sum(path.stat().st_size for path in before), sum(path.stat().st_size for path in after)


def relocate(proto: onnx.ModelProto, places: Mapping[str, str]) -> None:
    """Replace each `location` of external data by its value in `places`."""
    _relocate(filter(tensors.is_external, tensors.all_tensors(proto)), places)


def _relocate(external: Iterable[onnx.TensorProto], places: Mapping[str, str]) -> None:
    for tensor in external:
        tensors.set_location(tensor, places[tensors.location(tensor)])


def _place_data(
    proto: onnx.ModelProto, loaded: LoadedModel, output: Path, stage: Staging, keep: bool
) -> None:
    weights = loaded.weights
    external, joined, inline = _by_place(proto, weights)
    folder = output.absolute().parent
    here = folder.resolve()
    used = list(dict.fromkeys(Path(tensors.location(tensor)) for tensor in external))
    beside = is_same(folder, loaded.folder.base) and all(real.is_relative_to(here) for real in used)
    moved_out = [*joined, *_to_move_out(inline)]
    if beside:
        _relocate(external, loaded.relative)
        used = []
    elif keep:
        _relocate(external, {str(real): _below(real, here, used, output) for real in used})
        used = []
    elif joined:  # the files hold weights that nothing reads any more
        moved_out, used = [*external, *moved_out], []
    if not used and not moved_out:
        return
    if is_special(output):
        raise InputError(
            f"{output} is not a regular file, and the model's weights need a file beside it"
        )
    _join(external if used else [], used, moved_out, weights, output, stage)


def _by_place(
    proto: onnx.ModelProto, weights: FileWeights | None
) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto], list[onnx.TensorProto]]:
    """The tensors that lie in other files, those that are joined of parts of other files, and all
    others."""
    external: list[onnx.TensorProto] = []
    joined: list[onnx.TensorProto] = []
    inline: list[onnx.TensorProto] = []
    for tensor in tensors.all_tensors(proto):
        own = weights is not None and weights.owns(tensor)
        is_joined = weights is not None and weights.is_of_other_files(tensor)
        other = external if tensors.is_external(tensor) and not own else inline
        (joined if is_joined else other).append(tensor)
    return external, joined, inline


def _below(path: Path, folder: Path, files: Iterable[Path], output: Path) -> str:
    """The location of a data file in a model in `folder`. Raises InputError for a file that is not
    below this folder.

    No other reference is valid: ONNX Runtime and onnx refuse locations outside the model's folder
    and symbolic links to such places, and onnx also refuses hard links.
    """
    if not path.is_relative_to(folder):
        above = os.path.commonpath([file.parent for file in files])
        raise InputError(
            f"{output} cannot refer to the weights in {path}, because a model's weights have to be in its folder or "
            f"below; write it to {above}, or let the weights be copied, as they are by default"
        )
    return path.relative_to(folder).as_posix()


def _join(
    external: list[onnx.TensorProto],
    files: list[Path],
    moved_out: list[onnx.TensorProto],
    weights: FileWeights | None,
    output: Path,
    stage: Staging,
) -> None:
    """Copy whole data files, and then the inline tensors that must become external, into a new file
    beside `output`."""
    shifts: dict[Path, int] = {}
    end = 0
    for path in files:
        shifts[path] = _aligned(end)
        end = shifts[path] + path.stat().st_size
    if (
        not output.name.isprintable()
        or output.name != output.name.encode(errors="replace").decode()
    ):
        raise InputError(
            f"{output} needs a file for weights beside it, whose name must be UTF-8; choose another name"
        )
    data, fresh = _data_file(output, list(shifts.items()) if not moved_out else [], end)
    if fresh:
        stage.create(data, data)
        try:
            with data.open("r+b") as file:
                for path, shift in shifts.items():
                    for done in _copy(path, file.fileno(), shift):
                        if stage.progress is not None:
                            stage.progress("copying weights (MiB)", done >> 20, end >> 20)
                for tensor in moved_out:
                    end = _externalise(tensor, weights, file.fileno(), _aligned(end), data.name)
                file.truncate(end)
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(data, error) from None
    for tensor in external:
        tensors.set_location(tensor, data.name, shifts[Path(tensors.location(tensor))])


def _data_file(output: Path, segments: list[tuple[Path, int]], size: int) -> tuple[Path, bool]:
    """The name of the data file, and whether it has to be written.

    An existing file with the same content is used again. Any other existing file is not touched,
    because another model may need it.
    """
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
    """Copy a file to the offset `shift` of an open file, in the kernel if possible. Holes stay
    holes.

    Yields the position up to which the target is written.
    """
    with path.open("rb") as file:
        source, size, position = file.fileno(), os.fstat(file.fileno()).st_size, 0
        while position < size:
            try:
                position, stop = _part_of(source, position, size)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                stop = size
            while position < stop:
                position += _copy_some(
                    source, target, position, shift + position, min(stop - position, _STEP)
                )
                yield shift + position


def _part_of(source: int, position: int, size: int) -> tuple[int, int]:
    """Where the next bytes that are no hole begin and end, as far as the system tells. Raises
    OSError."""
    if sys.platform == "win32":  # tells nothing of holes
        return position, size
    position = os.lseek(source, position, os.SEEK_DATA)
    return position, os.lseek(source, position, os.SEEK_HOLE)


def _copy_some(source: int, target: int, start: int, place: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):  # not on macOS
        try:
            done = os.copy_file_range(source, target, count, start, place)
            if done:
                return done
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
    chunk = positional.read_at(source, min(count, _CHUNK), start)
    if not chunk:
        raise OSError(None, "the weights became shorter while they were copied")
    return positional.write_at(target, chunk, place)


def _externalise(
    tensor: onnx.TensorProto, weights: FileWeights | None, target: int, place: int, name: str
) -> int:
    end = place
    for chunk in _content(tensor, weights):
        view, done = memoryview(chunk), 0
        while done < len(view):
            done += positional.write_at(target, view[done : done + _CHUNK], end + done)
        end += done
    tensors.make_external(tensor, name, place, end - place)
    return end


def _content(tensor: onnx.TensorProto, weights: FileWeights | None) -> Iterable[bytes]:
    """The bytes of a tensor, in pieces: its own, those that were left in the model's file, or those
    of another file."""
    if not tensors.is_external(tensor):
        return [tensor.raw_data]
    if weights is not None and weights.owns(tensor):
        return weights.chunks(*extent(tensor))
    return file_chunks(
        Path(tensors.location(tensor)), tensors.offset(tensor), tensors.nbytes(tensor)
    )


def _to_move_out(inline: list[onnx.TensorProto]) -> list[onnx.TensorProto]:
    """The tensors that have to become external, so that the model stays below `INLINE_LIMIT`."""
    if (
        sum(tensors.message_size(tensor) + _bytes_kept_in_file(tensor) for tensor in inline)
        <= INLINE_LIMIT
    ):
        return []
    return [
        tensor
        for tensor in inline
        if max(len(tensor.raw_data), _bytes_kept_in_file(tensor)) > INLINE_TENSOR
    ]


def _bytes_kept_in_file(tensor: onnx.TensorProto) -> int:
    """The number of bytes of a tensor that was left in the model's file, 0 for any other tensor."""
    return extent(tensor)[1] if tensors.is_external(tensor) else 0


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # Windows opens no folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cannot_write(target: Path, error: OSError) -> InputError:
    """The error for the user if the system refuses to write to `target`."""
    hint = (
        "free some space or choose another place" if error.errno in FULL else "choose another place"
    )
    return InputError(f"{target} cannot be written: {refusals.reason(error, target)}; {hint}")
