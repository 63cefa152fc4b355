"""Damage to files: to any bytes, to protobuf messages and to JSON; and what a reader may do with a damaged file.

A damaged file is read, or it is refused by an error of the project's own. Everything else is a finding: another
exception, an internal error, a result that takes seconds or gigabytes. A crash and a hang are seen by the engine.

One case is a chain of `CHAIN` damaged files. Each is made of the original or of an earlier file of the chain that was
answered in a new way, so that later ones get deeper than the first check of a reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import struct
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa_compiler.command_line import main
from fa_compiler.errors import InputError, one_line
from fa_compiler.model_files.wire import varint_of
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.passes.answer.report import printable
from tools.fuzz.kind import Finding, Kind, Outcome

CHAIN = 20
"""Damaged files of one case."""
MOST_BYTES = 1 << 18
"""A damaged file that grows beyond this is cut."""
SLOW_S = 5.0
"""Seconds of the processor that one file may take."""
MOST_MEMORY = 2 << 20
"""Kilobytes by which one file may raise what the process had at most."""
ROOT = Path(__file__).parents[2]

Rng = random.Random

TEXTS = (
    b"", b" ", b"x", b"main", b"0", b"-1", b"x:0", b":0", b"x:4294967296", b"a\x00b", b"a\nb", b"\x1b[31m", b"\x7f",
    b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", "\u00e9\u4e2d\U0001f600".encode(), b"x" * 5000, b"%s%n{0}", b"ai.onnx",
    b"com.microsoft", b"Softmax", b"MatMul", b"Constant", b"If", b"Loop", b"Scan", b"Attention", b"location", b"offset",
    b"length", b"w.bin", b"../w.bin", b"/etc/passwd", b"./w.bin", b"w.bin\x00", b".", b"..", b"value", b"float", b"INT",
    b"99999999999999999999", b"1e400", b"nan", b"N*2", b"N//0", b"9**9**9", b"(" * 300,
)  # fmt: skip
NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 21, 23, 100, 127, 128, 255, 1000, 65536, 1 << 24, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, (1 << 33) + 1, 1 << 40, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    (1 << 64) - 2, (1 << 64) - 3, (1 << 64) - 100, (1 << 64) - (1 << 31),
)  # fmt: skip
"""As a varint holds them: the last are negative."""
FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 3.4e38, -3.4e38, 0.5, 1e9)


class Damaged(Kind):
    """Damaged files of one format."""

    limit_s = 120.0
    suffix: str
    unread: str
    """What answers say of a file whose format is lost: it is not damaged any further."""

    @abstractmethod
    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        """A file to damage, and one that parts are taken from."""

    @abstractmethod
    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        """The file with one more damage."""

    @abstractmethod
    def read(self, data: bytes, rng: Rng) -> str:
        """Do with the file what a user can; what came of it in a few words, equal for what went the same way.

        Raises:
            InputError, RegistryError: the file was refused, as it should be.
        """

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        original, donor = self.originals(rng)
        donor = original if rng.random() < 0.3 else donor
        pool, answers, taken, first = [original], set[str](), False, None
        for number in range(1, CHAIN + 1):
            data = pool[-1] if rng.random() < 0.5 else rng.choice(pool)
            for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
                data = self.damaged(data, donor, rng)[:MOST_BYTES]
            answer, refused, finding = self._tried(data, seed * CHAIN + number)
            first = first or finding
            taken |= not refused
            if answer not in answers and self.unread not in answer:
                answers.add(answer)
                pool.append(data)
        return Outcome(f"{CHAIN} tried, {'some' if taken else 'none'} taken", first)

    def reduce(self, seed: int, finding: Finding) -> Finding | None:
        """The file with parts taken out, as long as the same is found."""
        found = self.check(seed).finding
        if found is None or not found.data:
            return None
        data, size = found.data, max(1, len(found.data) // 2)
        end = time.monotonic() + 40.0
        while size and time.monotonic() < end:
            at = 0
            while at < len(data) and time.monotonic() < end:
                shorter = data[:at] + data[at + size :]
                again = self._tried(shorter, 0)[2]
                if again is not None and again.title == found.title:
                    data, found = shorter, again
                else:
                    at += size
            size //= 2
        return found

    def _tried(self, data: bytes, seed: int) -> tuple[str, bool, Finding | None]:
        """How one file was answered, whether it was refused, and what is wrong with that."""
        start, before = time.process_time(), _memory()
        refused, title, detail = False, "", ""
        try:
            answer = self.read(data, random.Random(seed))
        except (InputError, RegistryError) as error:
            refused, answer = True, _plain(one_line(error))
            printable(str(error)).encode()
        except Fault as fault:
            answer = title = fault.title
            detail = fault.detail
        except Exception as error:  # any at all: to find them is the purpose
            answer = title = _title(error)
            detail = traceback.format_exc()
        seconds, memory = time.process_time() - start, _memory() - before
        if not title and seconds > SLOW_S:
            title, detail = f"a file takes seconds: {answer}", f"{seconds:.1f} s"
        if not title and memory > MOST_MEMORY:
            title, detail = f"a file takes gigabytes: {answer}", f"{memory} KiB"
        return answer, refused, Finding(title, detail, data, self.suffix) if title else None


class Fault(Exception):
    """A reader did something that is a finding, without an exception of its own."""

    def __init__(self, title: str, detail: str = "") -> None:
        super().__init__(title)
        self.title, self.detail = title, detail


def command(*words: str) -> str:
    """Run one command line in this process, and say what came of it.

    Raises:
        Fault: an internal error, an error of several lines or none, no memory, or words on stderr beside an error.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main(words)
    text = err.getvalue()
    what = " ".join(word for word in words[:2] if not word.startswith("/"))
    if code == main.INTERNAL:
        raise Fault(f"{what}: {_plain(text)}", text)
    if code == main.BAD_INPUT and (text.count("\n") != 1 or "not enough memory" in text):
        raise Fault(f"{what}: {_plain(text)}", text)
    if code != main.BAD_INPUT and text:
        raise Fault(f"{what} speaks on stderr: {_plain(text)}", text)
    if code not in (main.OK, main.DIFFERENT, main.BAD_INPUT):
        raise Fault(f"{what} ends with {code}", text)
    out.getvalue().encode()
    return f"{what} {code} {_plain(text)}"


def _memory() -> int:
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _title(error: Exception) -> str:
    """The error with the innermost function of the project."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename]
    frame = (own or frames)[-1]
    text = f": {_plain(str(error))}" if "Internal" in type(error).__name__ else ""
    return f"{type(error).__name__} in {frame.name} ({Path(frame.filename).name}){text}"


def _plain(text: str) -> str:
    """A message without names and numbers."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|/\S+", "", " ".join(text[:400].split()))
    return re.sub(r"[^ -~]|\d+", "#", text)[:100]


# -- bytes ----------------------------------------------------------------------------------------


def any_bytes(data: bytes, donor: bytes, rng: Rng) -> bytes:
    """The bytes with one damage that knows nothing of what they mean."""
    place = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 16, 64, 256)), max(len(data) - place, 1))
    rest = data[place + length :]
    match rng.randrange(9):
        case 0:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        case 1 if place < len(data):
            return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        case 2:
            return data[:place] + rng.randbytes(length) + data[place:]
        case 3:
            return data[:place] + rest
        case 4:
            return data[:place]
        case 5:
            return data[:place] + data[place : place + length] * rng.choice((2, 3, 50)) + rest
        case 6:
            start = rng.randrange(len(donor) + 1)
            return data[:place] + donor[start : start + length] + (rest if rng.random() < 0.5 else data[place:])
        case 7:
            return data[:place] + rng.choice(TEXTS) + rest
        case _:
            return data[:place] + varint_of(rng.choice(NUMBERS)) + data[place + 1 :]


# -- protobuf -------------------------------------------------------------------------------------

Descriptor = Any
"""A protobuf message's; the library has no types."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Part:
    """A field as it stands in a message."""

    number: int
    wire: int
    value: int | bytes


def parts_of(data: bytes) -> list[Part] | None:
    """The fields of a message in their order; None for bytes that are none."""
    parts, place = [], 0
    try:
        while place < len(data):
            key, place = _number(data, place)
            wire = key & 7
            if wire == VARINT:
                value: int | bytes
                value, place = _number(data, place)
            elif wire in (FIXED64, FIXED32, BYTES):
                size, place = _number(data, place) if wire == BYTES else (8 if wire == FIXED64 else 4, place)
                value, place = data[place : place + size], place + size
                if place > len(data):
                    return None
            else:
                return None
            parts.append(Part(key >> 3, wire, value))
    except IndexError:
        return None
    return parts


def _number(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
        shift += 7


def message_of(parts: Sequence[Part]) -> bytes:
    """The opposite of `parts_of`."""
    out = []
    for part in parts:
        out.append(varint_of(part.number << 3 | part.wire))
        if isinstance(part.value, int):
            out.append(varint_of(part.value))
        else:
            if part.wire == BYTES:
                out.append(varint_of(len(part.value)))
            out.append(part.value)
    return b"".join(out)


@lru_cache(maxsize=256)
def _stock(data: bytes, descriptor: Descriptor) -> dict[str, list[bytes]]:
    """Messages and texts of a file, by the type of the message and by "text"."""
    found: dict[str, list[bytes]] = {}
    waiting = [(data, descriptor)]
    while waiting:
        content, kind = waiting.pop()
        for part in parts_of(content) or ():
            field = kind.fields_by_number.get(part.number)
            if field is None or not isinstance(part.value, bytes):
                continue
            if field.message_type is not None:
                found.setdefault(field.message_type.full_name, []).append(part.value)
                waiting.append((part.value, field.message_type))
            elif field.type == field.TYPE_STRING or len(part.value) < 40:
                found.setdefault("text", []).append(part.value)
    return found


def message(data: bytes, descriptor: Descriptor, donor: bytes, rng: Rng) -> bytes:
    """A protobuf message with one damage to a message, a field or a value at any depth."""
    return _message(data, descriptor, _stock(donor, descriptor), rng)


def _message(data: bytes, kind: Descriptor, stock: dict[str, list[bytes]], rng: Rng) -> bytes:
    parts = parts_of(data)
    if parts is None:
        return any_bytes(data, b"", rng)
    if not parts:
        return message_of([_invented(kind, stock, rng)])
    if rng.random() < 0.5:  # by kind of field first: a model has more nodes than anything else
        number = rng.choice(sorted({part.number for part in parts}))
        at = rng.choice([at for at, part in enumerate(parts) if part.number == number])
    else:
        at = rng.randrange(len(parts))
    part = parts[at]
    field = kind.fields_by_number.get(part.number)
    inner = field.message_type if field is not None else None
    if inner is not None and isinstance(part.value, bytes) and rng.random() < 0.8:
        parts[at] = Part(part.number, part.wire, _message(part.value, inner, stock, rng))
        return message_of(parts)
    match rng.randrange(12):
        case 0 | 1:
            del parts[at]
        case 2:
            parts[at:at] = [part] * rng.choice((1, 1, 1, 2, 30))
        case 3:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        case 4:
            rng.shuffle(parts)
        case 5:
            parts.insert(at, _invented(kind, stock, rng))
        case 6:
            numbers = sorted(kind.fields_by_number)
            parts[at] = Part(rng.choice([*numbers, 99]), part.wire, part.value)
        case 7 if inner is not None:
            parts[at] = Part(part.number, part.wire, rng.choice(stock.get(inner.full_name, [b""])))
        case _:
            parts[at] = _revalued(part, field, stock, rng)
    return message_of(parts)


def _invented(kind: Descriptor, stock: dict[str, list[bytes]], rng: Rng) -> Part:
    """A field the message did not have."""
    field = kind.fields_by_number[rng.choice(sorted(kind.fields_by_number))]
    if field.message_type is not None:
        return Part(field.number, BYTES, rng.choice(stock.get(field.message_type.full_name, [b""])))
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return Part(field.number, BYTES, _text(stock, rng))
    if field.type == field.TYPE_FLOAT:
        return Part(field.number, FIXED32, struct.pack("<f", rng.choice(FLOATS)))
    if field.type == field.TYPE_DOUBLE:
        return Part(field.number, FIXED64, struct.pack("<d", rng.choice(FLOATS)))
    return Part(field.number, VARINT, rng.choice(NUMBERS))


def _revalued(part: Part, field: Any, stock: dict[str, list[bytes]], rng: Rng) -> Part:
    value = part.value
    if isinstance(value, int):
        near = (value + rng.choice((-1, 1))) % (1 << 64)
        return Part(part.number, VARINT, rng.choice((near, rng.randrange(30), rng.choice(NUMBERS))))
    if part.wire == FIXED32:
        return Part(part.number, FIXED32, struct.pack("<f", rng.choice(FLOATS)))
    if part.wire == FIXED64:
        return Part(part.number, FIXED64, struct.pack("<d", rng.choice(FLOATS)))
    if field is not None and field.type != field.TYPE_STRING and rng.random() < 0.7:
        if field.type == field.TYPE_BYTES:
            return Part(part.number, BYTES, any_bytes(value, b"", rng))
        packed = [rng.choice(NUMBERS) if rng.random() < 0.3 else rng.randrange(20) for _ in range(rng.randrange(8))]
        return Part(part.number, BYTES, b"".join(map(varint_of, packed)))
    return Part(part.number, BYTES, _text(stock, rng))


def _text(stock: dict[str, list[bytes]], rng: Rng) -> bytes:
    texts = stock.get("text", [])
    if texts and rng.random() < 0.5:
        return rng.choice(texts)
    return rng.choice(TEXTS)


# -- JSON -----------------------------------------------------------------------------------------

VALUES: Sequence[Callable[[Rng], Any]] = (
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.choice((0, 1, -1, -2, 7, 1 << 31, 1 << 63, -(1 << 63), 1 << 70, 10**400)),
    lambda rng: rng.choice((0.5, -0.0, 1e308, math.nan, math.inf, -math.inf)),
    lambda rng: rng.choice(TEXTS).decode("utf-8", "surrogateescape"),
    lambda rng: rng.choice(("ND", "float16", "RESERVED", "UNDEFINED", "list_int", "data_type", "DT_FLOAT", "\ud800")),
    lambda rng: [],
    lambda rng: {},
    lambda rng: [rng.choice((-1, -2, 0, 1, 1 << 40, True, None, "1", 0.5)) for _ in range(rng.randrange(6))],
    lambda rng: [[1, rng.choice((-1, 4))]] * rng.randrange(1, 4),
)


def document(data: bytes, donor: bytes, rng: Rng) -> bytes:
    """JSON with one damage to a value at any depth; bytes where it is none any more."""
    try:
        root = {"": json.loads(data)}
        spare = json.loads(donor)
    except (ValueError, RecursionError):
        return any_bytes(data, donor, rng)
    place: Any = root
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.85:
            place = place[key]
        else:
            break
    _replaced(place, key, spare, rng)
    text = json.dumps(root[""])
    if rng.random() < 0.01:
        depth = rng.choice((100, 900, 1100, 100_000))
        text = text.replace(rng.choice(("1", "[]", '"ND"')), "[" * depth + "]" * depth, 1)
    return text.encode("utf-8", "surrogatepass")


def _replaced(place: Any, key: Any, spare: Any, rng: Rng) -> None:
    match rng.randrange(7):
        case 0:
            del place[key]
            if not place and isinstance(place, dict) and key == "":
                place[""] = None
        case 1 if isinstance(place, list):
            place[key:key] = [place[key]] * rng.choice((1, 1, 30))
        case 1:
            place[rng.choice(("name", "type", "shape", "value", "is_const", "const_value", "shape_range", "x"))] = (
                rng.choice(VALUES)(rng)
            )
        case 2:
            place[key] = _taken(spare, rng)
        case 3 if isinstance(place[key], int) and not isinstance(place[key], bool):
            place[key] += rng.choice((-1, 1, 1 << 32))
        case 4 if isinstance(place[key], str):
            place[key] = rng.choice((place[key] * 2, place[key][:-1], place[key].upper(), place[key] + "\0"))
        case _:
            place[key] = rng.choice(VALUES)(rng)


def _taken(spare: Any, rng: Rng) -> Any:
    """Any value of another document."""
    while isinstance(spare, (dict, list)) and spare and rng.random() < 0.8:
        spare = rng.choice(list(spare.values()) if isinstance(spare, dict) else spare)
    return spare
