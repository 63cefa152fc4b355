"""`import fa_compiler.everywhere` puts the execution provider into all sessions that this process
makes from then on.

It does not matter whether onnxruntime was imported before. The environment variable
FA_COMPILER_PROVIDER does the same without an import (`startup.py`). docs/provider.md says which
sessions are left as they are. Where the provider cannot be had, sessions are made without it, and a
warning of the logger "fa_compiler" says why.
"""

from __future__ import annotations

import os
import sys

from fa_compiler.provider.sessions import watch_all

VARIABLE, REPORT = "FA_COMPILER_PROVIDER", "report"
"""The environment variable, and the value with which a process also tells what was fused, session
by session."""

KNOWN = ("", "0", "off", "no", "false", "1", "on", "yes", "true", REPORT)

sessions = watch_all()
_value = os.environ.get(VARIABLE, "").lower()
if _value == REPORT:
    sessions.report()
if _value not in KNOWN:
    print(
        f"fa_compiler: {VARIABLE} is {_value!r}, which is taken for 1; use 1 or {REPORT}",
        file=sys.stderr,
    )
