"""Cases that end their process, hang, raise and find."""

from __future__ import annotations

import os
import sys
import time

from tools.fuzz.kind import Finding, Kind, Outcome


class Ends(Kind):
    """One case of each, most of them without a fault."""

    limit_s = 1.0

    def check(self, seed: int) -> Outcome:
        match seed & 0xFFFFFFFF:
            case 3:
                os.abort()
            case 5:
                time.sleep(60)
            case 7:
                raise ZeroDivisionError("seven")
            case 8 | 9:
                return Outcome("declined", Finding("two cases of one fault", "the detail", b"data", ".bin"))
            case 12:
                print("SUMMARY: AddressSanitizer: heap-buffer-overflow /csrc/kernel/tile.hpp:12 in f", file=sys.stderr)
                os.abort()
        return Outcome("fused")

    def reduce(self, seed: int, finding: Finding) -> Finding | None:
        return Finding(finding.title, "smaller", b"d", ".bin") if finding.title.startswith("two") else None
