"""Puts the provider into all sessions of a process: `python -m fa_compiler.provider` and
`fa_compiler.everywhere`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from fa_compiler import provider
from fa_compiler.errors import one_line
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.op_registry import DOMAINS
from fa_compiler.passes import Report

_PLAIN = frozenset(("CPUExecutionProvider", "AzureExecutionProvider", provider.PROVIDER))
"""The providers of a session that runs on the processor. The one of Azure takes only operators of
its own. Ours is among those that newer releases of ONNX Runtime call available."""

STARTUP = "_fa_compiler_startup"
"""The name of `everywhere/startup.py` where Python imported it at its start. It then calls
`Sessions.make` itself."""

_DECLINED, _FAILED, _WITHOUT = "declined", "not fused", "without the provider"
_NOT_ASKED = "the matcher was not asked"
"""The headings of what was not fused, in their order in a line."""

_UNASKED = "a plan answered, or the provider leaves the graph alone"
_ALONE = "a plan says that nothing is fused, or the provider leaves the graph alone"

_RECORD = "session.record_ep_graph_assignment_info"
"""The option with which newer releases of ONNX Runtime tell which provider has taken which
nodes."""
_NOT_TOLD: tuple[type[Exception], ...] = (AttributeError, *ORT_ERRORS)

_LOGGER = logging.getLogger("fa_compiler")


@dataclass
class Made:
    """What became of one session: `without` says why it runs without the provider.

    Otherwise there is the report of the matcher, or the reason why the matcher or the library
    failed. There is neither if a plan answered, or if the provider leaves such a graph alone.
    `has_nodes` then says whether the provider has taken nodes, if ONNX Runtime told it.
    """

    name: str
    without: str | None = None
    report: Report | None = None
    failure: str | None = None
    has_nodes: bool | None = None

    @property
    def why(self) -> tuple[str, str] | None:
        """Why nothing was fused, under a heading; None where the matcher or a plan answered."""
        if self.without is not None:
            return _WITHOUT, self.without
        if self.failure is not None:
            return _FAILED, self.failure
        if self.report is not None or self.is_planned:
            return None
        return _NOT_ASKED, _UNASKED if self.has_nodes is None else _ALONE

    @property
    def is_planned(self) -> bool:
        """Did a plan fuse the attention?"""
        is_unasked = self.without is None and self.failure is None and self.report is None
        return is_unasked and self.has_nodes is True

    def __str__(self) -> str:
        """The line for the user."""
        if self.report is not None and all(
            block.status == "not_attention" for block in self.report.blocks
        ):
            return f"{self.name}: no attention found"
        fused = [] if self.report is None else [_fused([self.report])]
        return f"{self.name}: {'; '.join(fused + _others([self]))}"


@dataclass
class Sessions:
    """Adds the provider to the sessions of this process, and writes down what becomes of them."""

    made: list[Made] = field(default_factory=list)
    _extended: weakref.WeakSet[ort.SessionOptions] = field(default_factory=weakref.WeakSet)
    _alive: weakref.WeakKeyDictionary[ort.InferenceSession, tuple[Made, ort.SessionOptions]] = (
        field(default_factory=weakref.WeakKeyDictionary)
    )
    _reporting: bool = False
    _is_child: bool = False
    _has_own: bool = False
    """Were there sessions of this package, of which the report does not tell?"""

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
            self._has_own = True
            if session.why_unfused is not None:
                self._note(Made(_name(path_or_bytes), session.why_unfused))
            return
        if not isinstance(sess_options, ort.SessionOptions | None):
            # its own error
            make(session, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            return
        options = ort.SessionOptions() if sess_options is None else sess_options

        def call(providers: Sequence[Any] | None, provider_options: Sequence[Any] | None) -> None:
            make(session, path_or_bytes, options, providers, provider_options, **kwargs)

        made = Made(_name(path_or_bytes))
        self._make(
            made,
            session,
            options,
            self._other(options, providers, kwargs),
            call,
            providers,
            provider_options,
        )
        self._alive[session] = made, options
        self._note(made)

    def make_again(
        self,
        set_providers: Callable[..., None],
        session: ort.InferenceSession,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Any] | None = None,
    ) -> None:
        """The method `set_providers` of a session: the same choice as in `make`."""
        if session not in self._alive:
            set_providers(session, providers, provider_options)
            return
        made, options = self._alive[session]
        call = functools.partial(set_providers, session)
        self._make(
            made,
            session,
            options,
            self._other(options, providers, {}),
            call,
            providers,
            provider_options,
        )
        self._tell(str(made))

    def _make(
        self,
        made: Made,
        session: ort.InferenceSession,
        options: ort.SessionOptions,
        other: str | None,
        call: Callable[..., None],
        providers: Sequence[Any] | None,
        provider_options: Sequence[Any] | None,
    ) -> None:
        """Call a method that makes the session, and write down what became of it. The method gets
        the lists of providers if there is an `other` wish, and else none."""
        other = other or self._extend(options)
        if other is None:
            _warn_of_missing(providers)
        arguments = (None, None) if other is None else (providers, provider_options)
        with provider.overhear() as heard:
            try:
                call(*arguments)
            except ORT_ERRORS as error:
                if provider.release() >= provider.FIRST_WITH_OPERATORS or not _lacks_operators(
                    error
                ):
                    raise
                heard.reports.clear()
                register_custom_ops(options)
                call(*arguments)
        if heard.interrupted:
            raise KeyboardInterrupt
        has_provider = provider.PROVIDER in session.get_providers()
        made.without = None if has_provider else other or "ONNX Runtime made it again without it"
        made.report = heard.reports[-1] if has_provider and heard.reports else None
        made.failure = (
            heard.failures[-1] if has_provider and heard.failures and made.report is None else None
        )
        made.has_nodes = _has_nodes(session)

    def _other(
        self,
        options: ort.SessionOptions,
        providers: Sequence[Any] | None,
        arguments: Mapping[str, Any],
    ) -> str | None:
        """Why the session is left as it is; None if it gets the provider. The options of the CPU
        provider do not matter: ONNX Runtime ignores them."""
        if options.optimized_model_filepath:
            return "it writes its optimised model"
        if arguments.get("disabled_optimizers"):  # which the session inside would not be told
            return "it disables optimizers"
        if options not in self._extended and getattr(options, "has_providers", bool)():
            return "the options name a provider"
        others = [
            name
            for name in _names(providers)
            if name not in _PLAIN and name in ort.get_available_providers()
        ]
        # ONNX Runtime leaves out what it does not have
        return f"it names {others[0]}" if others else None

    def _extend(self, options: ort.SessionOptions) -> str | None:
        """Add the provider to the options. If this cannot be done: why not.

        The library is loaded here, and not before the first session: a program may set what ONNX
        Runtime reads before.
        """
        if options in self._extended:
            return None
        try:
            provider.add_device(options)
        except Exception as error:  # whatever it is, the session can be made without the provider
            reason = one_line(error)
            if all(made.without != reason for made in self.made):
                _LOGGER.warning("sessions run without fused attention: %s", reason)
            return reason
        if self._reporting:
            _record(options)
        self._extended.add(options)
        return None

    def report(self) -> None:
        """From now on, tell of each session on stderr when it is made, and of all of them when the
        process ends.

        A process that a signal ends, or a worker of a pool, never comes to its end.
        """
        if self._reporting:
            return
        self._reporting = True
        atexit.register(self._end)

    def fork(self) -> None:
        """The process is a child, which has made no sessions yet."""
        self.made.clear()
        self._has_own = False
        self._is_child = True

    def _end(self) -> None:
        if self.made or not self._is_child:
            self._tell(self.summary)

    def _note(self, made: Made) -> None:
        self.made.append(made)
        self._tell(str(made))

    def _tell(self, line: str) -> None:
        """Print a line on stderr, if somebody wants the report and stderr is open."""
        if self._reporting:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(f"fa_compiler: {line}\n")
                sys.stderr.flush()

    @property
    def with_provider(self) -> int:
        """The number of sessions that have the provider."""
        return sum(made.without is None for made in self.made)

    @property
    def summary(self) -> str:
        """The line for the user about all sessions."""
        if not self.made:
            besides = (
                " besides those of fa_compiler, which do without the provider"
                if self._has_own
                else ""
            )
            return f"no session of ONNX Runtime was made{besides}"
        reports = [made.report for made in self.made if made.report is not None]
        fused = [_fused(reports)] if reports else []
        return "; ".join(
            [", ".join([_count(self.with_provider, "session"), *fused]), *_others(self.made)]
        )


def _names(providers: Sequence[Any] | None) -> list[str]:
    """The names in a list of providers, of which each may have its options beside it."""
    return [each if isinstance(each, str) else each[0] for each in providers or ()]


def _record(options: ort.SessionOptions) -> None:
    """Let ONNX Runtime remember which provider takes which nodes."""
    try:
        options.get_session_config_entry(_RECORD)  # it warns where an entry is set once more
    except ORT_ERRORS:
        options.add_session_config_entry(_RECORD, "1")


def _has_nodes(session: ort.InferenceSession) -> bool | None:
    """Has the provider taken nodes of the session? None where ONNX Runtime does not tell, as nobody
    asked it to."""
    try:
        return any(
            part.ep_name == provider.PROVIDER
            for part in session.get_provider_graph_assignment_info()
        )
    except _NOT_TOLD:
        return None


def _warn_of_missing(providers: Sequence[Any] | None) -> None:
    """Warn of providers that are not there, as ONNX Runtime does where it is given the list."""
    available = ort.get_available_providers()
    for name in _names(providers):
        if name not in (*available, provider.PROVIDER):
            told = f"Specified provider '{name}' is not in available provider names. Available providers: "
            # the caller of InferenceSession
            warnings.warn(f"{told}'{', '.join(available)}'", stacklevel=5)


def _name(path_or_bytes: Any) -> str:
    """What a session is called in a line."""
    return (
        os.fsdecode(path_or_bytes)
        if isinstance(path_or_bytes, str | os.PathLike)
        else "a model in memory"
    )


def _fused(reports: Iterable[Report]) -> str:
    """How many attentions were fused, and how many were so already."""
    counts = Counter(
        block.status
        for report in reports
        for block in report.blocks
        if block.kind not in ("backward", "convolution")
    )
    already, total = counts["already_fused"], counts["fused"] + counts["declined"]
    words = (
        [f"{counts['fused']} of {_count(total, 'attention')} fused"] if total or not already else []
    )
    return ", ".join(words + ([f"{_count(already, 'attention')} fused already"] if already else []))


def _others(sessions: Iterable[Made]) -> list[str]:
    """What was not fused in these sessions, and why."""
    sessions = list(sessions)
    blocks = [block for made in sessions if made.report is not None for block in made.report.blocks]
    codes = [block.code for block in blocks if block.status == "declined"]
    reasons: dict[str, list[str]] = {
        what: [] for what in (_DECLINED, _FAILED, _WITHOUT, _NOT_ASKED)
    }
    reasons[_DECLINED] += [code.value for code in codes if code is not None]
    for what, reason in filter(None, (made.why for made in sessions)):
        reasons[what].append(reason)
    planned = _listed(Counter("fused by a plan" for made in sessions if made.is_planned))
    return planned + [
        f"{what}: {', '.join(_listed(Counter(why)))}" for what, why in reasons.items() if why
    ]


@functools.cache
def watch_all() -> Sessions:
    """From now on, every new session of this process has the provider. A second call changes
    nothing."""
    sessions = Sessions()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=sessions.fork)
    if not getattr(sys.modules.get(STARTUP), "watching", False):
        _watch(sessions)
    set_providers = ort.InferenceSession.set_providers

    @functools.wraps(set_providers)
    def set_providers_again(session: ort.InferenceSession, *arguments: Any, **kwargs: Any) -> None:
        sessions.make_again(set_providers, session, *arguments, **kwargs)

    ort.InferenceSession.set_providers = set_providers_again
    return sessions


def _watch(sessions: Sessions) -> None:
    make = ort.InferenceSession.__init__

    @functools.wraps(make)
    def make_with_provider(session: ort.InferenceSession, *arguments: Any, **kwargs: Any) -> None:
        sessions.make(make, session, *arguments, **kwargs)

    ort.InferenceSession.__init__ = make_with_provider


def _lacks_operators(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because it has operators of this package."""
    text = str(error)
    return "is not a registered function/op" in text and any(f"{d}:" in text for d in DOMAINS)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(counts: Counter[str]) -> list[str]:
    return [text if count == 1 else f"{text} ({count})" for text, count in sorted(counts.items())]
