"""Puts the provider into all sessions of a process: `python -m fa_compiler.provider` and `fa_compiler.everywhere`."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime as ort

from fa_compiler import provider
from fa_compiler.errors import one_line
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.op_registry import DOMAINS

_PLAIN = frozenset(("CPUExecutionProvider", "AzureExecutionProvider", provider.PROVIDER))
"""The providers of a session that runs on the processor. The one of Azure takes only operators of its own. Ours is
among those that newer releases of ONNX Runtime call available."""

STARTUP = "_fa_compiler_startup"
"""The name of `everywhere/startup.py` where Python imported it at its start. It then calls `Sessions.make` itself."""

_LOGGER = logging.getLogger("fa_compiler")


class Sessions:
    """Adds the provider to the sessions of this process, and counts them."""

    def __init__(self) -> None:
        self.with_provider = 0
        self.others: Counter[str] = Counter()
        """Why sessions were left as they are, and how many."""
        self._extended: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()
        self._reporting = False

    def make(
        self,
        make: Callable[..., None],
        session: ort.InferenceSession,
        path_or_bytes: Any,
        sess_options: ort.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make a session, with the provider if it would run on the processor alone.

        Args:
            make: the method `__init__` of ONNX Runtime's class; the others are its arguments.
        """
        if isinstance(session, OwnSession):
            make(session, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            return
        options = ort.SessionOptions() if sess_options is None else sess_options
        other = self._other(options, providers, kwargs) or self._extend(options)
        provider.start_session()
        if other is None:
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
        others = [name for name in names if name not in _PLAIN and name in ort.get_available_providers()]
        return f"it names {others[0]}" if others else None  # ONNX Runtime leaves out what it does not have

    def _extend(self, options: ort.SessionOptions) -> str | None:
        """Add the provider to the options. If this cannot be done: why not.

        The library is loaded here, and not before the first session: a program may set what ONNX Runtime reads before.
        """
        if options in self._extended:
            return None
        try:
            options.add_provider_for_devices(provider.register_provider(), {})
        except Exception as error:  # whatever it is, the session can be made without the provider
            reason = one_line(error)
            if reason not in self.others:
                _LOGGER.warning("sessions run without fused attention: %s", reason)
            return reason
        self._extended.add(options)
        return None

    def report_at_end(self) -> None:
        """When the process ends, print the summary on stderr."""
        if self._reporting:
            return
        self._reporting = True
        activity = provider.activity = provider.Activity()
        atexit.register(lambda: print(self.summary(activity), file=sys.stderr))

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


@functools.cache
def watch_all() -> Sessions:
    """From now on, every new session of this process has the provider. A second call changes nothing."""
    sessions = Sessions()
    if not getattr(sys.modules.get(STARTUP), "watching", False):
        _watch(sessions)
    return sessions


def _watch(sessions: Sessions) -> None:
    make = ort.InferenceSession.__init__

    @functools.wraps(make)
    def make_with_provider(session: ort.InferenceSession, *arguments: Any, **kwargs: Any) -> None:
        sessions.make(make, session, *arguments, **kwargs)

    ort.InferenceSession.__init__ = make_with_provider


def _lacks_operators(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because it has operators of this package."""
    return any(f"{domain}:" in str(error) for domain in DOMAINS) and "is not a registered function/op" in str(error)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(counts: Counter[str]) -> list[str]:
    return [text if count == 1 else f"{text} ({count})" for text, count in sorted(counts.items())]
