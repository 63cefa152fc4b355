"""Damaged files of single operators: `single-op --check` ends in findings."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fa_compiler.lowering.ascend.single_op import check_text
from tools.fuzz.damage import Damaged, Fault, Rng, any_bytes, command, document
from tools.fuzz.originals import written


class JsonBytes(Damaged):
    """`single-op --check` of a damaged file, mostly in memory."""

    suffix = ".json"
    unread = "not-json"

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp(prefix="fuzz-json-")) / "damaged.json"

    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        files = written()[1]
        return rng.choice(files), rng.choice(files)

    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        return document(data, donor, rng) if rng.random() < 0.9 else any_bytes(data, donor, rng)

    def read(self, data: bytes, rng: Rng) -> str:
        if rng.random() < 0.02:
            self.file.write_bytes(data)
            return command("single-op", "--check", str(self.file))
        findings = check_text(data)
        if not all(str(finding) for finding in findings):
            raise Fault("a finding without a text")
        return " ".join(sorted({finding.rule for finding in findings}))
