"""`python -m fa_compiler.provider script.py ...` runs a script with the provider in all its sessions.

    python -m fa_compiler.provider [-m MODULE | SCRIPT] [arguments of the script ...]

The script is not changed and need not know of this package. At its end one line on stderr tells how many attentions
were fused, and what was declined.
"""

from __future__ import annotations

import functools
import runpy
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from fa_compiler import provider
from fa_compiler.errors import FaCompilerError
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS
from fa_compiler.op_registry import DOMAINS

USAGE = "usage: python -m fa_compiler.provider [-m MODULE | SCRIPT] [ARGUMENT ...]"

_PLAIN = frozenset(("CPUExecutionProvider", "AzureExecutionProvider", provider.PROVIDER))
"""The providers of a session that runs on the processor. The one of Azure takes only operators of its own. Ours is
among those that newer releases of ONNX Runtime call available."""

_USAGE_ERROR = 2


class Sessions:
    """Adds the provider to the sessions of this process, and counts them."""

    def __init__(self) -> None:
        self.with_provider = 0
        self.others: Counter[str] = Counter()
        """Why sessions were left as they are, and how many."""
        self._devices = provider.register_provider()
        self._extended: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()

    def watch(self) -> None:
        """From now on, every new session has the provider if it would run on the processor alone."""
        make = ort.InferenceSession.__init__

        @functools.wraps(make)
        def make_with_provider(
            session: ort.InferenceSession,
            path_or_bytes: Any,
            sess_options: ort.SessionOptions | None = None,
            providers: Sequence[Any] | None = None,
            provider_options: Sequence[Any] | None = None,
            **kwargs: Any,
        ) -> None:
            options = ort.SessionOptions() if sess_options is None else sess_options
            other = self._other(options, providers, kwargs)
            provider.start_session()
            if other is None:
                if options not in self._extended:
                    options.add_provider_for_devices(self._devices, {})
                    self._extended.add(options)
                providers = provider_options = None
                self.with_provider += 1
            else:
                self.others[other] += 1
            arguments = (session, path_or_bytes, options, providers, provider_options)
            try:
                make(*arguments, **kwargs)
            except ORT_ERRORS as error:
                provider.forget_last()
                if provider.release() >= provider.FIRST_WITH_OPERATORS or not _lacks_operators(error):
                    raise
                register_custom_ops(options)
                make(*arguments, **kwargs)

        ort.InferenceSession.__init__ = make_with_provider

    def _other(
        self, options: ort.SessionOptions, providers: Sequence[Any] | None, arguments: Mapping[str, Any]
    ) -> str | None:
        """Why the session is left as it is; None if it gets the provider. The options of the CPU provider do not
        matter: ONNX Runtime ignores them."""
        if options.optimized_model_filepath:
            return "it writes its optimised model"
        if arguments.get("disabled_optimizers"):  # which the session inside would not be told
            return "it disables optimizers"
        if not providers:
            chosen = getattr(options, "has_providers", bool)()
            return "the options name a provider" if chosen and options not in self._extended else None
        names = (each if isinstance(each, str) else each[0] for each in providers)
        return next((f"it names {name}" for name in names if name not in _PLAIN), None)

    def summary(self, activity: provider.Activity) -> str:
        """The line for the user."""
        fused = sum(report.count("fused") for report in activity.reports)
        total = fused + sum(report.count("declined") for report in activity.reports)
        parts = [f"{_count(self.with_provider, 'session')}, {fused} of {_count(total, 'attention')} fused"]
        reasons = Counter(
            block.code.value
            for report in activity.reports
            for block in report.blocks
            if block.status == "declined" and block.code is not None
        )
        if reasons:
            parts.append(f"declined: {', '.join(_listed(reasons))}")
        if activity.failures:
            parts.append(f"not fused: {', '.join(_listed(Counter(activity.failures)))}")
        if self.others:
            parts.append(f"without the provider: {', '.join(_listed(self.others))}")
        return f"fa_compiler: {'; '.join(parts)}"


def _lacks_operators(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because it has operators of this package."""
    return any(f"{domain}:" in str(error) for domain in DOMAINS) and "is not a registered function/op" in str(error)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(counts: Counter[str]) -> list[str]:
    return [text if count == 1 else f"{text} ({count})" for text, count in sorted(counts.items())]


def _run(arguments: Sequence[str]) -> None:
    """Run a script or module as Python itself does."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """The command line. The exit code of the script becomes that of the program."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if list(arguments) in ([], ["-m"]):
        print(USAGE, file=sys.stderr)
        return _USAGE_ERROR
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        print(f"error: {arguments[0]}: no such file", file=sys.stderr)
        return _USAGE_ERROR
    try:
        sessions = Sessions()
    except FaCompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    activity = provider.activity = provider.Activity()
    sessions.watch()
    try:
        _run(arguments)
    finally:
        print(sessions.summary(activity), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
