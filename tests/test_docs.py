"""The documentation: its commands are commands, and it tells of every option, assumption, exit code and route."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import lzma
import re
import shlex
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import fa_compiler
from fa_compiler import op_registry
from fa_compiler.atc.run import ROUTES
from fa_compiler.atc.sizes import parse_gears, parse_shapes
from fa_compiler.command_line.main import BAD_INPUT, DIFFERENT, INTERNAL, INTERRUPTED, OK, main, parser
from fa_compiler.comparison.verification import verify
from fa_compiler.lowering.ascend.onnx_route.expansions import EXPANSIONS
from fa_compiler.op_registry.around_kernels import around_matrix
from fa_compiler.op_registry.products import PRODUCTS
from fa_compiler.op_registry.runtimes import matrix
from fa_compiler.op_registry.soc import soc_version
from fa_compiler.passes import Code
from fa_compiler.passes.answer.option import Option, options_of
from fa_compiler.passes.answer.options import ASSUMPTIONS, EMPTY_BIAS, HALF_ATTENTION, Target
from fa_compiler.passes.parallel.methods import Machine
from fa_compiler.passes.parallel.options import ParallelOptions
from fa_compiler.pipeline.options import FileOptions
from tests.passes.linear.test_graphs import feeds_of, load
from tests.passes.running import assert_same
from tests.passes.test_layers import LAYERS as PASSES
from tests.systems import SOURCES
from tools.api_page import made
from tools.fuzz.kind import names as kinds

ROOT = Path(__file__).parent.parent
ASCEND, ASCEND_IN_CHINESE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ascend.md", "ascend.zh.md")
)
COMMAND_LINE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
README, README_IN_CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
RUNTIMES_PAGE = (ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOR_DEVELOPERS = {
    "CONTRIBUTING.md": CONTRIBUTING,
    **{name: PAGES[name] for name in ("architecture.md", "developing.md")},
}
FILE = re.compile(r"`([\w./*-]+(?:\.(?:py|cc|hpp|inc|tsv|txt|md|json|svg|xz)|/))`")
"""A file, a pattern of files, or a folder."""
NAMES = re.compile(r"`([\w./-]+)`: ((?:`\w+`(?:, )?)+)")
"""A file, and names in it."""
PROGRAM = ("op_registry", "passes", "lowering", "fa_compiler", "tools")
PLACEHOLDER, WRITTEN = "NAME", "build/"
"""What stands for a new file, and the folder of what commands write."""


def commands(*texts: str) -> list[str]:
    """The command lines of fa-compiler in the indented blocks of pages, without the program's name, and without what
    stands in front of it: a variable of the environment, or mpirun."""
    line = r"^ {4,}(?:[A-Z_]+=\S+ |mpirun -n \d+ )*fa-compiler (.+)$"
    return re.findall(line, "\n".join(texts).replace("\\\n", " "), re.MULTILINE)


def named_options(*texts: str) -> list[tuple[str, str]]:
    """The commands that sentences of pages name with an option, each with that option."""
    spans = re.findall(
        r"`(?:[A-Z_]+=\S+ |mpirun -n \d+ )*fa-compiler ([^`]+)`", re.sub(r"\n(?=\S)", " ", "\n".join(texts))
    )
    return [(span.split()[0], option) for span in spans for option in re.findall(r"--[a-z][a-z-]*", span)]


COMMANDS = commands(README, README_IN_CHINESE, *PAGES.values())


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str) -> None:
    words = shlex.split(line, comments=True)
    if "..." in words:
        return
    args = parser().parse_args(words)
    if args.command == "atc":
        assert soc_version(args.soc_version)
        assert parse_shapes(args.input_shape)
        assert args.dynamic_dims is None or parse_gears(args.dynamic_dims)


@pytest.mark.parametrize(("command", "option"), sorted(set(named_options(README, README_IN_CHINESE, *PAGES.values()))))
def test_options_in_sentences(command: str, option: str) -> None:
    known = parser().commands.get(command, parser() if command in ("COMMAND", option) else None)
    assert known is not None
    assert option in {*_options(known), "--help"}


def _options(of: argparse.ArgumentParser) -> Iterator[str]:
    for action in of._actions:
        yield from (option for option in action.option_strings if option not in ("-h", "--help"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def test_every_option_is_documented() -> None:
    for option in sorted(set(_options(parser()))):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", COMMAND_LINE + ASCEND), option


@pytest.mark.parametrize("section", re.split(r"^## ", COMMAND_LINE, flags=re.MULTILINE)[1:])
def test_every_option_of_a_command_is_in_its_section(section: str) -> None:
    heading, _, text = section.partition("\n")
    for command in heading.split(", "):
        for action in parser().commands[command]._actions if command in parser().commands else ():
            spellings = "|".join(action.option_strings)
            assert action.dest == "help" or not spellings or re.search(rf"(?<![\w-])({spellings})(?![\w-])", text), (
                f"docs/commands.md, {heading}: {command} {spellings}"
            )


def _cell(option: Option) -> str:
    """The first cell of the row of an option."""
    if isinstance(option.default, bool):
        return f"`{option.flag}`"
    if option.told.choices:
        first, *others = (option.default, *(choice for choice in option.told.choices if choice != option.default))
        return ", ".join((f"`{option.flag} {first}` (default)", *(f"`{choice}`" for choice in others)))
    return f"`{option.flag} {option.metavar}`"


def test_options_of_the_records_have_their_rows() -> None:
    """A new option needs a row in the table of the command line, and one in that of Python."""
    cells = "\n".join(re.findall(r"^\| ([^|]+) \|", COMMAND_LINE, re.MULTILINE))
    for option in options_of(FileOptions, ParallelOptions, Machine).values():
        assert not option.told.on_command_line or _cell(option) in cells, f"docs/commands.md: a row | {_cell(option)} |"
    for option in options_of(FileOptions).values():
        row = f"| `{option.name}` | `{option.default!r}` | {option.sentences} |"
        assert row in PAGES["api.md"], f"docs/api.md: the row {row}"


def test_the_page_on_python_is_what_the_docstrings_say() -> None:
    assert made(PAGES["api.md"]) == PAGES["api.md"], "write it anew: python -m tools.api_page"


def test_assumptions_and_exit_codes() -> None:
    for name, sentence in ASSUMPTIONS.items():
        assert f"| `{name}` | {sentence} |" in COMMAND_LINE
    assert re.findall(r"^\| (\d+) \|", COMMAND_LINE, re.MULTILINE) == [
        str(code) for code in (OK, DIFFERENT, BAD_INPUT, INTERNAL, INTERRUPTED)
    ]


@pytest.mark.parametrize("page", [ASCEND, ASCEND_IN_CHINESE], ids=["English", "Chinese"])
def test_ascend_tells_of_everything(page: str) -> None:
    assert {"atc", "registry", "air", "single-op"} <= {line.split()[0] for line in commands(page)}
    for route in ROUTES:
        assert f"`--route {route}`" in page
        assert f"**{route}.**" in page
    for word in (*(product.name for product in PRODUCTS), EMPTY_BIAS, HALF_ATTENTION):
        assert word in page, word


@pytest.mark.parametrize(
    "sentence",
    [r"one of 8.*?\. (.*?) are written out", r"opset 下不认识的 (.*?)\s*用其他算子展开"],
    ids=["English", "Chinese"],
)
def test_ascend_names_the_operators_that_are_written_out(sentence: str) -> None:
    page = ASCEND if sentence.isascii() else ASCEND_IN_CHINESE
    told = re.search(sentence, page, re.DOTALL)
    assert told and {*re.findall(r"[A-Z]\w+", told[1], re.ASCII)} == EXPANSIONS.keys()


def _names(text: str) -> set[str]:
    """What is the same in every language: figures, options, file names, names that are no plain words, and code."""
    words = re.findall(r"--[a-z][\w-]*|\w+(?:\.\w+)*", text, re.ASCII)
    code = " ".join(re.findall(r"`([^`\n]+)`", text)).split()
    return {*(word for word in words if re.search(r"^--|[\d_.]|\B[A-Z]", word)), *code}


def _figures(text: str) -> Counter[str]:
    """The figures of a text, each as often as it stands there."""
    return Counter(re.findall(r"\d+(?:\.\d+)*", text))


def _code(text: str) -> list[tuple[str, Counter[str]]]:
    """The lines of the indented blocks of a page: without their comments, and the figures in these."""
    lines = [line.partition(" # ") for line in re.findall(r"^    .+$", text.replace("\\\n", " "), re.MULTILINE)]
    return [(" ".join(line.split()), _figures(comment)) for line, _, comment in lines]


CODE_ROWS = re.compile(r"^\| (`[a-z_]+`.*?) \|(.+)\|\n", re.MULTILINE)
"""The rows of the table of codes, which only the Chinese page has."""


def test_the_chinese_page_of_ascend_says_what_the_english_one_says() -> None:
    """Section by section, commands, names and figures are the same."""
    assert _code(ASCEND_IN_CHINESE) == _code(ASCEND)
    in_digits = ASCEND.replace("August", "8")  # as Chinese writes months
    in_chinese = CODE_ROWS.sub("", ASCEND_IN_CHINESE).replace("ascend.md", "ascend.zh.md")
    for english, chinese in zip(in_digits.split("\n## "), in_chinese.split("\n## "), strict=True):
        where = f"docs/ascend.zh.md, {chinese.splitlines()[0]}"
        assert _names(chinese) == _names(english), where
        assert _figures(chinese) == _figures(english), where


def test_codes_in_chinese() -> None:
    """The rows have codes of the report, and name what the page of all codes names for them."""
    rows = CODE_ROWS.findall(ASCEND_IN_CHINESE)
    for cell, text in rows:
        codes = [Code(name) for name in re.findall(r"`(\w+)`", cell)]
        told = "\n".join(re.findall(rf"^\| `(?:{'|'.join(codes)})` .*$", PAGES["recognised.md"], re.MULTILINE))
        assert _names(text) <= _names(told) | {*told.split()}, cell
    assert len(rows) > 10


@pytest.mark.parametrize("page", [README, README_IN_CHINESE])
def test_the_number_of_operators_that_run_on_arrays(page: str) -> None:
    count = sum(map(op_registry.has_kernel, op_registry.names()))
    assert re.search(rf"(each of the|CPU kernel 的) {count} ", page)


def test_the_chinese_readme_says_what_the_english_pages_say() -> None:
    words = re.sub(r"```python\n.*?```", "", README_IN_CHINESE, flags=re.DOTALL)
    more = _names(words) - _names(README) - _names(ASCEND)
    assert not more, f"README.zh.md: {more}"
    known = dict((*_code(ASCEND), *_code(README)))
    for line, figures in _code(words):
        assert line in known, line
        assert figures == known[line], line


def test_python_of_the_chinese_readme_writes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README_IN_CHINESE, re.DOTALL)
    shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert capsys.readouterr().out.count("fused FlashAttentionScore") == 2
    assert (tmp_path / "out" / "atc.sh").is_file()


def test_the_commands_of_the_page_of_ascend_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with the model that the page names. What its section on the report says of this model is so."""
    assert "\n    cp examples/models/bert.onnx model.onnx\n" in ASCEND
    shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    masks: dict[str, str] = {}
    for line in commands(ASCEND):
        words = shlex.split(line, comments=True)
        if words[:2] == ["registry", "diff"]:  # of an installed CANN
            continue
        assert main(words) == OK, line
        if words[0] == "atc":
            folder = Path(words[words.index("-o") + 1])
            for block in json.loads((folder / "report.json").read_text(encoding="utf-8"))["fusion"]["blocks"]:
                assert block["status"] == "fused", line
                if "--sequence-parallel" in words:  # whose ranks have masks of their own
                    continue
                reasons = " ".join(missed["reason"] for missed in block["missed"])
                masks.update((size, block["mask"]) for size in re.findall(r"(\d+) bytes", reasons))
    report = ASCEND[ASCEND.index("## What it reports") :].split("\n## ")[0]
    assert masks == {size: mask for mask, size in re.findall(r"`(\w+)`,\s+and\s+(\d+) bytes", report)}


def test_the_page_of_runtimes_is_the_table() -> None:
    assert RUNTIMES_PAGE.endswith(f"{matrix()}\n\n{around_matrix()}\n")
    for target in get_args(Target):
        assert f"| `{target}` |" in RUNTIMES_PAGE


def test_links() -> None:
    """Each link leads to a page, and the README or the site's index leads to each page."""
    beside = [(ROOT, text) for text in (README, README_IN_CHINESE, CONTRIBUTING)]
    for folder, text in (*beside, *((ROOT / "docs", text) for text in PAGES.values())):
        for target in re.findall(r"\]\(([^)#:]+)[)#]", text):
            assert (folder / target).is_file(), target
    index = re.findall(r"^([\w.]+)$", PAGES["index.md"], re.MULTILINE)
    assert {f"{name}.md" for name in index} == PAGES.keys() - {"index.md"}
    linked = set(re.findall(r"\(docs/([\w.]+\.md)\)", README))
    assert PAGES.keys() - linked <= {"index.md", "api.md", "changelog.md"}


def test_what_the_pages_cite_is_there() -> None:
    graphs = json.loads((ROOT / "tests" / "graphs" / "index.json").read_text(encoding="utf-8"))
    for text in PAGES.values():
        assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", text))
        for names in re.findall(r"`tests/graphs/index\.json` \(([^)]*)\)", text):
            assert graphs.keys() >= set(re.findall(r"`(\w+)`", names))


@pytest.fixture(scope="module")
def places() -> list[str]:
    """All files and folders of the repository, from its root."""
    here = [path for path in ROOT.iterdir() if not path.name.startswith((".", "build")) or path.name == ".ci"]
    below = [
        path for folder in here if folder.is_dir() for path in folder.rglob("*") if "__pycache__" not in path.parts
    ]
    return [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in (*here, *below)]


@SOURCES
@pytest.mark.parametrize("page", FOR_DEVELOPERS)
def test_files_that_developers_are_sent_to_are_there(page: str, places: list[str]) -> None:
    """Each file is there, from the root or from a folder of the package that the text speaks of."""
    for name in FILE.findall(FOR_DEVELOPERS[page]):
        if name.startswith(WRITTEN):
            continue
        wanted = name.replace(PLACEHOLDER, "*")
        assert fnmatch.filter(places, f"*/{wanted}"), f"{page}: {name}"


@SOURCES
def test_names_that_developers_are_sent_to_are_in_their_files(places: list[str]) -> None:
    found = NAMES.findall(PAGES["developing.md"])
    assert len(found) > 20
    for file, names in found:
        texts = [(ROOT / place[1:]).read_text(encoding="utf-8") for place in fnmatch.filter(places, f"*/{file}")]
        for name in re.findall(r"`(\w+)`", names):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{file}: {name}"


def test_headings_that_developers_are_sent_to_are_there() -> None:
    headings = {
        page: {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
        }
        for page, text in FOR_DEVELOPERS.items()
    }
    for page, text in FOR_DEVELOPERS.items():
        for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", text):
            assert anchor in headings[Path(target).name or page], f"{page}: {target}#{anchor}"


def test_docstrings_of_packages_name_what_they_have() -> None:
    """The names and files in the docstring of a package are in its files, or in those beside the package."""
    for folder in PROGRAM:
        for init in (ROOT / folder).rglob("__init__.py"):
            doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
            assert doc, f"{init}: say what the folder is for, and name the function that others call"
            files = [*init.parent.rglob("*.py"), *init.parents[1].glob("*.py")]
            texts = "\n".join(path.read_text(encoding="utf-8") for path in files).replace(doc, "")
            for name in re.findall(r"`(\w+)`", doc):
                assert re.search(rf"\b{name}\b", texts), f"{init}: {name}"
            named = set(re.findall(r"\b\w+\.py\b", doc))
            assert named <= {path.name for path in files}, init


def test_the_page_has_the_packages_of_passes_in_their_order() -> None:
    page = PAGES["developing.md"]
    table = page[: page.index("## The packages of fa_compiler/")]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    words = [word.removesuffix(".py").rstrip("/") for row in rows for word in re.findall(r"`([^`]+)`", row)]
    assert words == list(PASSES.order)


def test_every_kind_of_the_search_has_its_row() -> None:
    page = PAGES["developing.md"]
    table = page[page.index("| kind | cases |") :].split("\n\n")[0]
    told = [
        kind for cell in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for kind in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(told) == kinds(), "docs/developing.md: one row for each kind of tools/fuzz/kinds/"


def test_a_model_without_its_weights_is_enough_for_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of CONTRIBUTING.md, as they stand."""
    (block,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
    shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    without, whole = fa_compiler.inspect("without_weights.onnx"), fa_compiler.inspect("model.onnx")
    assert [each.what for each in without.blocks] == [each.what for each in whole.blocks]
    assert len(lzma.compress(Path("without_weights.onnx").read_bytes())) < 40_000


@pytest.mark.parametrize("page", PAGES)
def test_python_of_the_pages_is_python(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        compile(block, page, "exec")


def test_functions_are_written_in_place_of_their_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block for OpenVINO runs as it stands: what is left are operators of ONNX, which compute the same."""
    model = load("hand__scan_gated_delta_head_mulsum_axis2_s0False")
    assert fa_compiler.optimize(model, tmp_path / "fused.onnx").report.count("fused") == 1
    (block,) = re.findall(r"```python\n([^`]*?inliner[^`]*?)```", PAGES["linear_attention.md"])
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    inlined = onnx.load(tmp_path / "openvino.onnx")
    assert not inlined.functions
    assert {node.domain for node in inlined.graph.node} == {""}
    feeds = feeds_of(model, 9)
    (expected, got) = (ort.InferenceSession(each.SerializeToString()).run(None, feeds) for each in (model, inlined))
    for found, wanted in zip(got, expected, strict=True):
        assert_same(found, wanted, 1e-5)  # float32 sums of decaying terms, in another order


def test_the_tutorial_fuses_and_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks without torch run as they stand, with the model that it names for those without torch."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES["tutorial.md"], re.DOTALL)
    shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(blocks[1], names)
    assert "fused" in str(names["result"].report)
    exec(blocks[3].replace("8000", "0"), names)
    server = names["server"]
    answers = []
    for asked in ([1, 2, 3], {"no": "list"}, [], [10**9], [1] * 3000):
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("POST", "/", json.dumps(asked))
        answer = connection.getresponse()
        answers.append((answer.status, answer.read()))
        connection.close()
        thread.join()
    server.server_close()
    assert [status for status, _ in answers] == [200, 400, 400, 400, 400]
    assert len(json.loads(answers[0][1])) == 64


def test_the_programs_take_the_model_of_the_tutorial() -> None:
    """The tutorial sends its readers to programs of other pages, which name inputs and outputs."""
    names = re.findall(r"(?:input|output)_names=\[(.*?)\]", PAGES["tutorial.md"])[:2]
    wanted = [name.strip('" ') for name in ",".join(names).split(",")]
    assert wanted == ["input_ids", "attention_mask", "last_hidden_state"]
    for page, language in (("recipes.md", "cpp"), ("recipes.md", "js"), ("provider.md", "cpp")):
        (program,) = re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)
        assert [name for name in wanted if name not in program] == [], page


def test_the_recipe_of_quantising_keeps_the_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", PAGES["recipes.md"], re.DOTALL)
    shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert sum(node.op_type == "FlashAttention" for node in onnx.load("quantised.onnx").graph.node) == 2
    ids = np.ones((1, 8), np.int64)
    (hidden, *_) = names["session"].run(None, {"input_ids": ids, "attention_mask": ids})
    assert hidden.shape == (1, 8, 64)


def test_the_recipe_of_onnx_ir_fuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGES["recipes.md"]
    block, *_ = re.findall(r"```python\n(.*?)```", text[text.index("### onnx_ir") :], re.DOTALL)
    original = shutil.copy(ROOT / "examples" / "models" / "bert.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert "2 fused (of 2)" in capsys.readouterr().out
    assert sum(node.op_type == "FlashAttention" for node in onnx.load("fused.onnx").graph.node) == 2
    assert verify(original, "fused.onnx").same


@SOURCES
def test_every_environment_variable_is_documented() -> None:
    sources = [path for folder in ("fa_compiler", "lowering") for path in (ROOT / folder).rglob("*.*")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.suffix in (".py", ".cc"))
    named = set(re.findall(r'"(FA_COMPILER_[A-Z0-9_]+)"', text))
    assert named == set(re.findall(r"^\| `(FA_COMPILER_\w+)` \|", COMMAND_LINE, re.MULTILINE))
