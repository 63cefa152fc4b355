"""The page: what it says, what it draws, and that it needs nothing but itself."""

from __future__ import annotations

import html
import itertools
import json
import lzma
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.compare import Comparison, OutputComparison
from fa_compiler.lowering.drawing import SMALL_LETTERS, Arrow, Box, layers, sheet, shortened, svg
from fa_compiler.model_files.reading import load
from fa_compiler.page.drawn import Drawn
from fa_compiler.page.gain import gain_line, in_units
from fa_compiler.page.page import Run, page
from fa_compiler.page.provenance import Provenance, Written, gain_beside, page_beside
from fa_compiler.page.regions import shape_texts
from fa_compiler.page.wording import link_to, unbroken, worded
from tests.graphs import harness

from .builders import EXAMPLES, attention, plain, projected, saved, with_caches_of_fixed_length

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


def drawn(text: str) -> str:
    """The part of a page that is the same in every run."""
    return text[text.index("<section aria-labelledby='blocks'>") : text.index("<section aria-labelledby='made'>")]


def without_run(page: _Page) -> str:
    """The text of a page, a number and a word apart."""
    return re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=[a-z])", " ", page.text)


def written(model: onnx.ModelProto, folder: Path, *words: str) -> str:
    path = saved(model, folder / "model.onnx")
    assert main(["inspect", str(path), "--html", str(folder / "page.html"), *words]) == 0
    return (folder / "page.html").read_text(encoding="utf-8")


def test_equal_layers_are_one_kind(tmp_path: Path) -> None:
    text = written(layered(3), tmp_path)
    page = _Page(text)
    assert "All 3 attentions are fused." in page.text
    assert "nodes before 15 nodes after 3" in without_run(page)
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
    assert re.findall(r"(?:src|href)=[^ >]+", text) == ["href='gain.html'"]  # beside the page
    assert not re.search(r"url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", text)


def test_what_stands_in_the_way_is_marked(tmp_path: Path) -> None:
    page = _Page(written(declined(), tmp_path))
    assert "The one attention is not fused." in page.text
    assert "probabilities_are_output" in page.text
    assert "Try: leave out what reads the probabilities" in page.text
    (box,) = [each for each in page.of_class("culprit") if "box" in (each["class"] or "")]
    assert "value" in (box["class"] or "")  # the output of the model, not the softmax that gives it
    words = [word.strip() for word in page.words]
    assert any(pair == ("model output", "probs") for pair in itertools.pairwise(filter(None, words)))
    assert sum(tag == "script" for tag, _ in page.tags) == 1  # its own
    assert HOSTILE in page.text


@pytest.mark.parametrize("sharded", [False, True])
def test_what_was_fused_already(sharded: bool, tmp_path: Path) -> None:
    """The operator is drawn with its own operands. That of a sharded model is one, too."""
    if sharded:
        shard = fa_compiler.shard(layered(2), tmp_path / "out", 2)
        fused = onnx.load(shard.path)
    else:
        made = fa_compiler.optimize(layered(2)).model
        assert isinstance(made, onnx.ModelProto)
        fused = made
    page = _Page(written(fused, tmp_path))
    assert "in the model: 1 node" in page.text
    assert {"query", "key", "value"} <= {word.strip() for word in page.words}
    assert [each for each in page.of_class("fused") if "box" in str(each["class"])]
    words = [word.strip() for word in page.words]
    assert "head_num = 4" in words
    assert "keep_prob = 1" not in words
    assert "2 attentions were already fused." in page.text
    (kind,) = page.of_class("kind")
    assert kind["data-status"] == "already_fused"
    assert "not fused 0" in without_run(page)
    assert "not attention" not in page.text


def test_a_model_without_attention(tmp_path: Path) -> None:
    page = _Page(written(plain(), tmp_path))
    assert "There is no attention in this model." in page.text
    assert not page.of_class("kind")


def test_optimize_writes_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = written(layered(2), tmp_path)
    path = str(tmp_path / "model.onnx")
    page = tmp_path / "other.html"
    assert main(["optimize", path, "-o", str(tmp_path / "out.onnx"), "--html", str(page)]) == 0
    assert drawn(page.read_text(encoding="utf-8")) == drawn(shown)
    capsys.readouterr()
    before = Path(path).read_bytes()
    assert main(["inspect", path, "--html", path]) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert main(["optimize", path, "-o", str(tmp_path / "x"), "--html", str(tmp_path / "x")]) == 2
    assert "cannot be both the model and the page" in capsys.readouterr().err
    assert Path(path).read_bytes() == before
    assert not (tmp_path / "x").exists()


def test_a_page_tells_what_the_command_prints_below_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _Page(written(attention(), tmp_path, "--target", "onnx")).text
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no runtime was named")]
    assert f"What else to know {note}" in without_run(_Page(written(attention(), tmp_path, "--target", "onnx")))
    assert "What else to know" not in _Page(written(attention(), tmp_path)).text
    assert text.index("What else to know") < text.index("How to write the result")


def test_the_drawings_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One picture, in which each kind of block stands once, before and after."""
    written(layered(2), tmp_path)
    path, picture = str(tmp_path / "model.onnx"), tmp_path / "blocks.svg"
    words = {"inspect": [], "optimize": ["-o", str(tmp_path / "out.onnx")]}
    drawn = []
    for command, more in words.items():
        assert main([command, path, *more, "--graph", str(picture)]) == 0
        assert f"{picture}" in capsys.readouterr().out
        root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
        paper = root.find("{http://www.w3.org/2000/svg}rect")
        assert paper is not None and paper.get("fill") == "#fff"  # a dark page may show it
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
    text = svg([Box("a", "A < B", ("[2]",)), Box("b", "B")], [Arrow("a", "b")], "drawing")
    assert text.count("<path") == 2  # the arrow and its tip
    assert "A &lt; B" in text
    assert "[2]" in text


def test_a_very_long_arrow_is_drawn_straight() -> None:
    """It has no gaps in the rows between, and orders none of them."""
    keys = [f"box {number}" for number in range(40)]
    edges = [*itertools.pairwise(keys), (keys[0], keys[-1])]
    assert layers(keys, edges) == [[key] for key in keys]
    assert svg([Box(key, key) for key in keys], [Arrow(*edge) for edge in edges], "drawing").count("<path") == 41


def test_text_stands_inside_of_boxes() -> None:
    """Nothing is cut off at the right, and no arrow crosses a name or a shape. A row is as high as its highest box."""
    lines = tuple(f"line {number}" for number in range(6))
    boxes = [Box("a", "A", lines), Box("b", "B", lines[:1]), Box("c", "C" * 40, ("d" * 60,))]
    root = ElementTree.fromstring(svg(boxes, [Arrow("a", "c"), Arrow("b", "c")], "drawing", ""))
    space = "{http://www.w3.org/2000/svg}"
    rows = []
    for box in root.iter(f"{space}g"):
        frame = {key: float(value) for key, value in box.find(f"{space}rect").attrib.items()}  # type: ignore[union-attr]
        bottom = frame["y"] + frame["height"]
        assert frame["x"] > 0 and frame["x"] + frame["width"] < float(root.attrib["width"])
        for text in box.iter(f"{space}text"):
            assert frame["y"] < float(text.attrib["y"]) < bottom
            assert len(text.text or "") <= 32
        rows.append((frame["y"], bottom))
    assert rows[0][0] == rows[1][0]
    assert rows[2][0] > max(rows[0][1], rows[1][1])
    assert len(list(root.iter(f"{space}text"))) == 3 + 6 + 1 + 1


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("[batch, 12, sequence, sequence]", "[batch, 12, sequence, sequence]"),
        ("a" * 28, "a" * 28),
        ("a" * 29, f"{'a' * 9}…{'a' * 18}"),
        ("W" * 29, f"{'W' * 5}…{'W' * 11}"),
        ("\u6ce8" * 28, "\u6ce8" * 5 + "…" + "\u6ce8" * 10),
    ],
)
def test_a_name_is_cut_by_its_breadth(name: str, kept: str) -> None:
    """Capitals and Chinese signs are broader than other letters, and commas are narrower."""
    assert shortened(name, SMALL_LETTERS) == kept


def test_a_size_without_a_name_is_a_question_mark() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[n] x) => (int64[1, m] y) { y = NonZero(x) z = Neg(y) }'
    )
    assert shape_texts(ir.from_proto(model)) == {"x": "[n]", "y": "[1, ?]", "z": "[1, ?]"}


def test_a_picture_is_as_wide_as_its_boxes() -> None:
    """A long name above them does not go over its edge."""
    root = ElementTree.fromstring(sheet([(f"{'n' * 300}, before", [Box("a", "A")], [])]))
    name = root.find("{http://www.w3.org/2000/svg}text")
    assert name is not None and name.text is not None and name.text.endswith("n, before")
    assert 8 * len(name.text) < float(root.attrib["width"])


def test_what_a_fused_operator_is_told(tmp_path: Path) -> None:
    """The attributes that differ from their defaults, in the drawing itself."""
    text = drawn(written(layered(1), tmp_path))
    for line in ("head_num = 4", "scale_value = 0.25", "input_layout = BNSD"):
        assert f">{line}</text>" in text
    assert "keep_prob" not in re.sub("<title>.*?</title>", "", text, flags=re.DOTALL)
    text = drawn(written(layered(1), tmp_path, "--target", "contrib"))
    assert ">num_heads = 4</text>" in text


@pytest.mark.parametrize("target", ["ort", "ascend", "onnx", "contrib"])
def test_each_target_is_drawn_in_the_same_colours(target: str, tmp_path: Path) -> None:
    page = _Page(drawn(written(layered(1), tmp_path, "--target", target)))
    assert "after: " in page.text
    legend = [attrs["class"] for tag, attrs in page.tags if tag == "span" and "times" not in str(attrs["class"])]
    assert [each for each in legend if "role" in str(each)] == ["role-query", "role-key", "role-value"]


def test_a_training_graph(tmp_path: Path) -> None:
    """A packed projection is no query alone, the softmax of the loss has none, and its status is told once."""
    model = onnx.load_model_from_string(lzma.decompress((EXAMPLES / "gpt_training.onnx.xz").read_bytes()))
    text = drawn(written(model, tmp_path))
    forward, backward, loss = text.split("<details class='kind'")[1:]
    for part in (forward, backward):
        before, after = part.split("<figure>")[1:]
        assert "query, key, value</text>" in before
        assert {"role-query", "role-key", "role-value"} <= set(re.findall(r"role-[a-z]+", after))
        assert "role-query" not in before
    assert "role-query" not in loss
    assert "not_attention:" not in loss


def test_a_hybrid(tmp_path: Path) -> None:
    """Convolutions are counted for themselves, and each drawing has a node at which it opens."""
    text = written(harness.load("lfm2__tsn_eager_op17"), tmp_path)
    assert "The one attention is fused." in _Page(text).text
    assert "fused 1 not fused 0 convolutions fused 1 of 1 nodes" in without_run(_Page(text))
    figures = drawn(text).split("<figure>")[1:]
    assert len(figures) == 4
    assert [figure.count("focus") for figure in figures] == [1] * 4


def test_the_legend_of_what_is_not_fused(tmp_path: Path) -> None:
    """Query, key and value are those of the products around the softmax."""
    page = _Page(drawn(written(declined(), tmp_path)))
    for role in ("query", "key", "value"):
        assert [each for each in page.of_class(f"role-{role}") if "box value" in str(each["class"])]
    assert "bias" not in page.text
    assert "mask" not in page.text
    assert "what stands in the way" in page.text


def test_where_a_page_comes_from(tmp_path: Path) -> None:
    """Version, date, command, machine, sizes, how the result is run, and what the verification found."""
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    words = ["optimize", str(path), "-o", str(out), "--html", str(tmp_path / "bert.html"), "--quiet"]
    assert main(words) == 0
    unverified = _Page((tmp_path / "bert.html").read_text(encoding="utf-8"))
    assert "Not verified" in unverified.text
    assert main([*words, "--verify"]) == 0
    text = (tmp_path / "bert.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert "Verified in ONNX Runtime: the output agrees (tolerance 1e-05" in page.text
    assert "query [2, 4, " in page.text
    assert f"fa_compiler {fa_compiler.__version__}" in page.text
    assert re.search(r"date20\d\d-\d\d-\d\d \d\d:\d\d UTC", page.text)
    assert f"fa-compiler {' '.join(words)} --verify" in page.text
    for what, file in (("before", path), ("after", out)):
        assert f"file {what}{in_units(file.stat().st_size)}" in page.text
    assert "fa_compiler.register_custom_ops(options)" in page.text
    assert f"onnxruntime.InferenceSession({json.dumps(str(out))}, options)" in page.text
    assert f"fa-compiler bench {path} --html {tmp_path / 'bert.gain.html'}" in page.text
    assert "href='bert.gain.html'" in text
    assert main(["inspect", str(path), "--html", str(tmp_path / "bert.html")]) == 0
    shown = _Page((tmp_path / "bert.html").read_text(encoding="utf-8")).text
    assert "No model was written." in shown
    assert f"fa-compiler optimize {path} -o fused.onnx --verify" in shown


def test_a_page_tells_how_each_output_agrees() -> None:
    """Also where only a large fault would have been seen."""
    model = attention()
    result = fa_compiler.optimize(model)
    assert isinstance(result.model, onnx.ModelProto)
    output = OutputComparison("<out>", "float32", (2, 8), 0.02, None, noise=0.02)
    compared = Comparison((output,), 1e-5, sizes={"query": (2, 4)}, blunt=0.04)
    written = Written(Path("fused.onnx"), compared=compared)
    run = Run(Provenance("program", "date", "command", "machine"), Path("model.onnx"), Path("gain.html"), written)
    text = page(Drawn.of(result.report, load(model), result.model), run)
    assert "<p class='note'>This comparison is blunt: ONNX Runtime's own" in html.unescape(text)
    assert "smaller than 0.04 would not show" in text
    row = ("&lt;out&gt;", "float32[2, 8]", "0.02", "same (ONNX Runtime differs from itself by 0.02)")
    assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in text


def test_a_page_tells_of_the_options_again(tmp_path: Path) -> None:
    """In the commands that write the result and measure it. A decoder is measured as one."""
    model, words = harness.load("qwen3_past__tsn_eager_op14"), ["--in-place-caches", "--assume", "no-empty-rows"]
    text = _Page(written(model, tmp_path)).text
    assert "model.onnx -o fused.onnx --verify" in text
    assert "model.onnx --decode --html" in text
    text = _Page(written(model, tmp_path, *words)).text
    assert "model.onnx -o fused.onnx --assume no-empty-rows --in-place-caches --verify" in text
    assert "model.onnx --decode --assume no-empty-rows --in-place-caches --html" in text
    text = _Page(written(with_caches_of_fixed_length(model), tmp_path)).text
    assert "model.onnx --html" in text and "--decode" not in text, "no step follows another one"
    text = _Page(written(attention(), tmp_path, "--target", "ascend", "--soc-version", "A3")).text
    assert "model.onnx -o fused.onnx --target ascend --soc-version A3 --verify" in text
    assert "fa-compiler bench" not in text


def test_sizes_count_external_weights(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    out = tmp_path / "out.onnx"
    page = tmp_path / "page.html"
    assert main(["optimize", str(path), "-o", str(out), "--html", str(page), "--quiet"]) == 0
    data = 64 + weight.nbytes
    text = _Page(page.read_text(encoding="utf-8")).text
    assert f"file before{in_units(path.stat().st_size + data)}" in text
    assert f"file after{in_units(out.stat().st_size + data)}" in text


@pytest.mark.parametrize(
    ("page", "gain"), [("page.html", "gain.html"), ("my_page.html", "my_gain.html"), ("bert.html", "bert.gain.html")]
)
def test_a_page_and_its_measurement_know_each_other(page: str, gain: str) -> None:
    assert gain_beside(Path("folder", page)) == Path("folder", gain)
    assert page_beside(Path("folder", gain)) == Path("folder", page)


def test_a_declined_attention_holds_its_scores() -> None:
    """Beside what the fused attention saves: the memory of the model may be what it was."""
    model = onnx.load(EXAMPLES / "bert.onnx")
    probabilities = next(node.output[0] for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(probabilities, onnx.TensorProto.FLOAT, [None] * 4))
    result = fa_compiler.optimize(model)
    assert isinstance(result.model, onnx.ModelProto)
    line = gain_line(result.report, model, result.model)
    assert line is not None
    assert line.endswith("are not held any more; the declined attention holds its own as before")
    text = _Page(page(Drawn.of(result.report, load(model), result.model))).text
    assert "The declined attention holds its own as before, so the model may need no less memory than it did." in text


def test_a_mask_that_is_expanded_counts() -> None:
    """What it adds is taken from what the scores do not need any more."""
    model = onnx.load(EXAMPLES / "bert.onnx")
    result = fa_compiler.optimize(model, target="ascend")
    assert isinstance(result.model, onnx.ModelProto)
    line = gain_line(result.report, model, result.model)
    assert line is not None
    assert (
        "512 MiB of scores and probabilities are not held any more, and a mask takes 192 MiB more: 320 MiB less" in line
    )
    text = _Page(page(Drawn.of(result.report, load(model), result.model))).text
    assert "added by the maskin all" in text
    assert "2,048128 MiB48 MiB80 MiB less" in text
    assert "How this page was made" not in text  # nobody told


def in_browser(page: Path, size: str) -> str:
    """The page as a browser has it after its script, which must not fail."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    more = ["--enable-logging=stderr", "--dump-dom", "--virtual-time-budget=2000", f"--window-size={size}"]
    command = [BROWSER, *flags, *more, f"--user-data-dir={page.with_name('profile')}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    """The script opens each drawing in its frame."""
    written(layered(2), tmp_path)
    shown = in_browser(tmp_path / "page.html", "1400,1000")
    assert shown.count("transform: translate(") == 2
    assert shown.count('<small class="part" hidden="">') == 2  # all of it is seen


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_large_drawing_opens_at_the_softmax(tmp_path: Path) -> None:
    """On a small screen: the whole would be too small to be read."""
    written(onnx.load(EXAMPLES / "bert.onnx"), tmp_path)
    shown = in_browser(tmp_path / "page.html", "390,800")
    ((left, top),) = re.findall(r"transform: translate\(([-\d.]+)px, ([-\d.]+)px\) scale\(0.8\)", shown)[:1]
    assert float(left) < 0
    assert float(top) < -100
    assert '<small class="part">A part is shown.' in shown


def test_a_page_on_paper(tmp_path: Path) -> None:
    """It has light colours, and each drawing as high as it is, whatever the script has set on the screen."""
    style = re.findall(r"<style>(.*?)</style>", written(plain(), tmp_path), re.DOTALL)[0]
    screen, paper = style.split("@media print")
    assert re.findall(r"@media (\w+) and \(prefers-color-scheme: dark\)", style) == ["screen"]
    assert re.search(r"@media screen \{ :root\[data-theme=dark\]", screen)
    assert ".view { height: auto !important" in paper


def test_an_input_of_a_wide_row_stands_higher() -> None:
    """So a drawing of an operator with many inputs is two boxes wide; an input moves by two rows at most."""
    inputs = ["query", "key", "value", "mask"]
    assert [len(row) for row in layers([*inputs, "op"], [(name, "op") for name in inputs])] == [2, 4, 1]
    assert boxes_by_row(inputs) == [2, 2, 1]
    assert boxes_by_row([*inputs, *"abcde"]) == [3, 2, 4, 1]


def boxes_by_row(inputs: list[str]) -> list[int]:
    rows = layers([*inputs, "op"], [(name, "op") for name in inputs])
    return [sum(isinstance(place, str) for place in row) for row in rows]


def test_no_line_break_divides_an_option() -> None:
    assert unbroken("try --in-place-caches <x>") == "try <span class='option'>--in-place-caches</span> &lt;x&gt;"
    assert unbroken("a--b `c`") == "a--b `c`"
    assert link_to("a b.html") == "<a href='a%20b.html'>a b.html</a>"
    assert link_to("\udcc3\udcbc.html").startswith("<a href='%C3%BC.html'>")  # bytes that are no text in this locale
    assert worded("run `fa-compiler docs`") == "run <code>fa-compiler docs</code>"
