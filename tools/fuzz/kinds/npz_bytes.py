"""Damaged archives of NumPy: what reads inputs from them ends in arrays or in one error."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import warnings
import zipfile
from pathlib import Path

from fa_compiler.comparison.feeds import load_inputs
from tools.fuzz.damage import TEXTS, Damaged, Rng, any_bytes, command
from tools.fuzz.originals import archives, small_model

PIECES = (
    "<f4", ">f4", "|b1", "<i8", "<u2", "|V2", "<f8", "|O", "|S5", "<U3", "<M8[ns]", "<m8", "<c16", "[('a','<i4')]",
    "{'names':['a'],'formats':['O']}", "<f0", "|V0", "<f2", "|S0", "f4,f4", "(2,)f4", "x", "", "<U999999999",
)  # fmt: skip
SHAPES = ("()", "(0,)", "(3,)", "(-1,)", "(1,-3)", "(9999999999,)", "(1<<3,)", "(3.0,)", "('3',)", "3", "None", "(3,3)")
SHAPES += (f"({1 << 62},3)", f"({1 << 63},)", f"({1 << 62},4,0)", f"({'1,' * 70})", "(True,3)", "(" * 500 + ")" * 500)


class NpzBytes(Damaged):
    """`verify --inputs` with a damaged archive, mostly without running the models."""

    suffix = ".npz"
    unread = "is not an .npz file"

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-npz-"))
        self.model, self.path, self.file = small_model(), folder / "small.onnx", folder / "damaged.npz"
        self.path.write_bytes(self.model.SerializeToString())
        warnings.simplefilter("ignore")

    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        return rng.choice(archives()), rng.choice(archives())

    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        return _archive(data, donor, rng) if rng.random() < 0.7 else any_bytes(data, donor, rng)

    def read(self, data: bytes, rng: Rng) -> str:
        self.file.write_bytes(data)
        feeds = load_inputs(self.file, self.model)
        if rng.random() < 0.1:
            return command("verify", str(self.path), str(self.path), "--inputs", str(self.file))
        return " ".join(f"{array.dtype} {array.ndim}" for array in feeds.values())


def _archive(data: bytes, donor: bytes, rng: Rng) -> bytes:
    """The archive with one damage to an entry or to what says how it is stored; sums and lengths fit again."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [(info.filename, archive.read(info)) for info in archive.infolist() if info.file_size < 1 << 16]
        with zipfile.ZipFile(io.BytesIO(donor)) as archive:
            spare = [archive.read(name) for name in archive.namelist()]
    except Exception:  # of an archive that cannot be read: it is only bytes then
        return any_bytes(data, donor, rng)
    if not entries:
        return donor
    at = rng.randrange(len(entries))
    name, content = entries[at]
    match rng.randrange(10):
        case 0:
            del entries[at]
        case 1:
            entries.append((rng.choice((name, "x.npy", "x", "q.npy/", "../q.npy", "q.npy.npy")), content))
        case 2:
            entries[at] = (rng.choice(TEXTS).decode("utf-8", "replace") or "x", content)
        case 3:
            entries[at] = (name, any_bytes(content, rng.choice(spare or [b""]), rng))
        case 4:
            entries[at] = (name, rng.choice(spare or [b""]))
        case 5:
            entries[at] = (name, pickle.dumps(rng.choice(([1], print, {"a": (1, 2)}))))
        case _:
            entries[at] = (name, _array(content, rng))
    stream = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(stream, "w", method) as archive:
        for key, value in entries:
            archive.writestr(zipfile.ZipInfo(key) if rng.random() < 0.1 else key, value)
    return stream.getvalue()


def _array(content: bytes, rng: Rng) -> bytes:
    """A .npy file with another type, shape, order or version, or another length than its header says."""
    version = content[6] if len(content) > 8 else 1
    start = 10 if version == 1 else 12
    values = {"descr": repr(rng.choice(PIECES)), "fortran_order": rng.choice(("False", "True", "0", "None"))}
    values["shape"] = rng.choice(SHAPES)
    header = content[start : content.find(b"\n", start)].decode("latin-1") if b"\n" in content[start:] else ""
    body = content[content.find(b"\n", start) + 1 :]
    changed = rng.choice(("descr", "shape", "fortran_order", "version", "size", "key", "text"))
    if changed in values:
        parts = {"descr": "'<f4'", "fortran_order": "False", "shape": "(2, 3)"} | {changed: values[changed]}
        if changed == "descr" and rng.random() < 0.3:
            parts["descr"] = rng.choice(PIECES)
        header = "{" + ", ".join(f"'{key}': {value}" for key, value in parts.items()) + ", }"
    elif changed == "key":
        header = header.replace(rng.choice(("descr", "shape", "fortran_order")), rng.choice(("x", "descr", "\0")))
    elif changed == "text":
        more = header.replace("}", "'x': 1}")
        header = rng.choice((header + " " * 20000, "1", "{", "[" * 2000, "", more, "\xff" * 9))
    elif changed == "size":
        body = rng.choice((b"", body[:-1], body * 2, body + b"x"))
    else:
        version = rng.choice((0, 1, 2, 3, 4, 255))
    text = header.encode("latin-1") + b"\n"
    size = struct.pack("<H", len(text) & 0xFFFF) if version == 1 else struct.pack("<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + body
