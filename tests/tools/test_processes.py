"""Processes that may crash or hang: what is seen of them, and that the next question has an answer again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.systems import TOOLS
from tools.processes import Child, HelperError, Server, module

pytestmark = TOOLS

ANSWERS = """
import os, sys, time
from tools.processes import serve

def answer(question):
    print("printed", question)  # must not be taken for an answer
    if question["do"] == "crash":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if question["do"] == "hang":
        time.sleep(60)
    return {"did": question["do"], "pid": os.getpid()}

serve(answer, {"greeting": 1})
"""


@pytest.fixture
def server() -> Iterator[Server]:
    command = module(sys.executable, "tools")[:2]
    with Server([*command, sys.executable, "-c", ANSWERS], timeout=5) as made:
        yield made


def test_answers(server: Server) -> None:
    """One process answers all questions."""
    answers = [server.ask({"do": word}) for word in "ab"]
    assert server.greeting == {"greeting": 1}
    assert [answer["did"] for answer in answers] == ["a", "b"]
    assert answers[0]["pid"] == answers[1]["pid"]


def test_a_crash(server: Server) -> None:
    first = server.ask({"do": "a"})
    with pytest.raises(HelperError, match=r"^crashed( \(exit 3\))?: last words$"):
        server.ask({"do": "crash"})
    assert server.ask({"do": "b"})["pid"] != first["pid"]


def test_a_hang(server: Server) -> None:
    server.ask({"do": "a"})
    server.timeout = 0.2
    with pytest.raises(HelperError, match=r"^no answer in 0\.2 s"):
        server.ask({"do": "hang"})
    server.timeout = 5
    assert server.ask({"do": "b"})["did"] == "b"


def test_a_module_that_is_not_there() -> None:
    with (
        Server(module(sys.executable, "tools.no_such_module"), timeout=5) as made,
        pytest.raises(HelperError, match="no_such_module"),
    ):
        made.ask({})


def test_long_lines() -> None:
    """Of a task and of what comes back, in more than one piece."""
    echo = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    with Child([sys.executable, "-c", echo]) as child:
        child.send({"text": "x" * 50_000})
        assert child.line(5) == {"text": "x" * 50_000}
        assert child.started and not child.ended()
    assert child.code == -9
