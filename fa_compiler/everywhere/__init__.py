"""`import fa_compiler.everywhere` puts the execution provider into all sessions that this process makes from then on.

It does not matter whether onnxruntime was imported before. The environment variable FA_COMPILER_PROVIDER does the
same without an import (`startup.py`). docs/provider.md says which sessions are left as they are.
Where the provider cannot be had, sessions are made without it, and a warning of the logger "fa_compiler" says why.
"""

from __future__ import annotations

import os

from fa_compiler.provider.sessions import watch_all

VARIABLE, REPORT = "FA_COMPILER_PROVIDER", "report"
"""The environment variable, and the value with which a process also tells at its end what was fused."""

sessions = watch_all()
if os.environ.get(VARIABLE) == REPORT:
    sessions.report_at_end()
