"""The page: what it says, what it draws, and that it needs nothing but itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest
from onnx import helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.lowering.drawing import Arrow, Box, layers, svg

from .builders import attention, plain, saved

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = ("meta", "input", "br")
HOSTILE = "<script>alert('x')</script>"


def layered(count: int) -> onnx.ModelProto:
    """Equal layers of attention, each of which reads the result of the one before it."""
    model = attention(batch=2, length=8)
    layer = list(model.graph.node)
    del model.graph.node[:]
    previous = "query"
    for number in range(count):
        renamed = {"query": previous, "out": "out" if number == count - 1 else f"out_{number}"}
        kept = {"key", "value", "scale"}
        for node in layer:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"layer.{number}/{node.name}"
            for names in (copy.input, copy.output):
                names[:] = [renamed.get(name, name if name in kept else f"{name}_{number}") for name in names]
            model.graph.node.append(copy)
        previous = renamed["out"]
    return model


def declined() -> onnx.ModelProto:
    """An attention whose probabilities are read, with names that are no HTML."""
    model = attention(batch=2, length=8)
    for node in model.graph.node:
        node.name = node.name and f"{HOSTILE} & {node.name}"
    model.graph.output.append(helper.make_tensor_value_info("probs", onnx.TensorProto.FLOAT, [None] * 4))
    return model


class _Page(HTMLParser):
    """The tags of a page, which have to be closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def of_class(self, word: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if word in (attrs.get("class") or "").split()]


def written(model: onnx.ModelProto, folder: Path, *words: str) -> str:
    path = saved(model, folder / "model.onnx")
    assert main(["inspect", str(path), "--html", str(folder / "page.html"), *words]) == 0
    return (folder / "page.html").read_text()


def test_equal_layers_are_one_kind(tmp_path: Path) -> None:
    text = written(layered(3), tmp_path)
    page = _Page(text)
    assert "All 3 attentions are fused." in page.text
    assert "nodes before 15 nodes after 3" in re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=[a-z])", " ", page.text)
    for row in ("FlashAttentionScore</td><td>0</td><td>3<", "MatMul</td><td>6</td><td>0<"):
        assert f"<tr><td>{row}/td></tr>" in text
    (kind,) = page.of_class("kind")
    assert kind["data-status"] == "fused"
    assert "3 × FlashAttentionScore, BNSD, 4 heads, no mask" in page.text
    assert "before: 5 nodes" in page.text
    assert "after: 1 node" in page.text
    for number in range(3):
        assert f"layer.{number}/attn/Softmax" in page.text
    assert len(page.of_class("role-query")) > 1
    assert "[2, 4, 8, 16]" in page.text
    assert not re.search(r"(?:src|href)=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)


def test_what_stands_in_the_way_is_marked(tmp_path: Path) -> None:
    page = _Page(written(declined(), tmp_path))
    assert "The one attention is not fused." in page.text
    assert "probabilities_are_output" in page.text
    assert "Try: leave out what reads the probabilities" in page.text
    assert len([each for each in page.of_class("culprit") if "box" in (each["class"] or "")]) == 1
    assert sum(tag == "script" for tag, _ in page.tags) == 1  # its own
    assert HOSTILE in page.text


def test_what_was_fused_already(tmp_path: Path) -> None:
    fused = fa_compiler.optimize(layered(2)).model
    assert isinstance(fused, onnx.ModelProto)
    page = _Page(written(fused, tmp_path))
    assert "2 attentions were fused already." in page.text
    (kind,) = page.of_class("kind")
    assert kind["data-status"] == "already_fused"
    assert "not fused 0" in re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=[a-z])", " ", page.text)


def test_a_model_without_attention(tmp_path: Path) -> None:
    page = _Page(written(plain(), tmp_path))
    assert "There is no attention in this model." in page.text
    assert not page.of_class("kind")


def test_optimize_writes_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = written(layered(2), tmp_path)
    path = str(tmp_path / "model.onnx")
    page = tmp_path / "other.html"
    assert main(["optimize", path, "-o", str(tmp_path / "out.onnx"), "--html", str(page)]) == 0
    assert page.read_text() == shown
    capsys.readouterr()
    before = Path(path).read_bytes()
    assert main(["inspect", path, "--html", path]) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert main(["optimize", path, "-o", str(tmp_path / "x"), "--html", str(tmp_path / "x")]) == 2
    assert "cannot be both the model and the page" in capsys.readouterr().err
    assert Path(path).read_bytes() == before
    assert not (tmp_path / "x").exists()


def test_the_drawings_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One picture, in which each kind of block stands once, before and after."""
    written(layered(2), tmp_path)
    path, picture = str(tmp_path / "model.onnx"), tmp_path / "blocks.svg"
    words = {"inspect": [], "optimize": ["-o", str(tmp_path / "out.onnx")]}
    drawn = []
    for command, more in words.items():
        assert main([command, path, *more, "--graph", str(picture)]) == 0
        assert f"{picture}" in capsys.readouterr().out
        root = ElementTree.fromstring(picture.read_text())
        drawn.append(
            [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if "title" in text.get("class", "")]
        )
    assert drawn[0] == drawn[1]
    names = [name for name in drawn[0] if name is not None]
    assert [name.rsplit(", ")[-1] for name in names if ", " in name] == ["before", "after"]
    assert {"Softmax", "FlashAttentionScore"} <= set(names)
    assert main(["inspect", path, "--graph", path]) == 2
    assert main(["inspect", path, "--html", str(picture), "--graph", str(picture)]) == 2
    assert "cannot be both the page and the graph" in capsys.readouterr().err


def test_arrows_pass_between_boxes() -> None:
    """An arrow over several rows has a gap in each row between; a loop is drawn, too."""
    edges = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")]
    rows = layers(["a", "b", "c", "d"], edges)
    assert rows[0] == ["a"]
    assert sorted(map(str, rows[1])) == sorted(["('a', 'c', 1)", "b", "d"])
    assert rows[2] == ["c"]
    assert layers(["a", "b"], [("a", "b"), ("b", "a")]) in ([["a"], ["b"]], [["b"], ["a"]])
    text = svg([Box("a", "A < B"), Box("b", "B")], [Arrow("a", "b", "[2]")], "drawing")
    assert text.count("<path") == 2  # the arrow and its tip
    assert "A &lt; B" in text
    assert "[2]" in text


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    """The script runs without an error and fits each drawing into its frame."""
    written(layered(2), tmp_path)
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    command = [
        BROWSER,
        *flags,
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        "--virtual-time-budget=2000",
    ]
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("transform: translate(") == 2
