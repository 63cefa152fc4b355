"""Damaged `.air` files: what checks, lists and draws them ends in findings or in one error."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fa_compiler.lowering.ascend.air import AirError, parse
from fa_compiler.lowering.ascend.air.check import REJECTED, check_message, verdict
from fa_compiler.lowering.ascend.air.draw import draw
from fa_compiler.lowering.ascend.air.files import parse_message
from fa_compiler.lowering.ascend.air.schema import ModelDef
from fa_compiler.lowering.ascend.air.show import lines, summary
from tools.fuzz.damage import Damaged, Fault, Rng, any_bytes, command, message
from tools.fuzz.originals import written


class AirBytes(Damaged):
    """`air check` and `air show` of a damaged file, mostly in memory."""

    suffix = ".air"
    unread = "is not an .air file"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-air-"))
        self.file = self.folder / "damaged.air"

    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        files = written()[0]
        return rng.choice(files), rng.choice(files)

    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        return message(data, ModelDef.DESCRIPTOR, donor, rng) if rng.random() < 0.9 else any_bytes(data, donor, rng)

    def read(self, data: bytes, rng: Rng) -> str:
        if rng.random() < 0.02:
            self.file.write_bytes(data)
            said = command("air", "check", str(self.file))
            return said + command("air", "show", str(self.file))
        try:
            proto = parse_message(data)
        except AirError as error:
            return str(error)
        findings = check_message(proto, self.folder)
        rules = " ".join(sorted({finding.rule for finding in findings}))
        if not all(str(finding) for finding in findings):
            raise Fault("a finding without a text", rules)
        try:
            model = parse(data, self.folder)
        except AirError as error:
            if "\n" in str(error):
                raise Fault("an error of several lines", str(error)) from None
            return rules
        if verdict(findings) == REJECTED:
            raise Fault("what the check rejects is read", rules)
        summary(model)
        for graph in model.graphs:
            list(lines(graph))
        if rng.random() < 0.1:
            draw(model, rng.choice((".svg", ".dot"))).encode()
        return f"{rules} read"
