"""The command line as a user meets it."""

from __future__ import annotations

import io
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import onnx
import pytest
from onnx import helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.model_files import writing
from fa_compiler.op_registry.documentation import constraints
from fa_compiler.passes.answer.options import ASSUMPTIONS
from fa_compiler.passes.answer.report import MissedCode
from tests.graphs import harness
from tests.systems import DEVICES, LINKS, LISTENS_TO_INTERRUPTS, MODES, NAMED_PIPES, SCRIPTS, SIGNALS, TERMINALS, said

from .builders import EXAMPLES, attention, ops, plain, projected, saved

GRAPHS = Path(__file__).parents[1] / "graphs"
COMMAND = [sys.executable, "-m", "fa_compiler"]


def test_as_a_process(tmp_path: Path) -> None:
    """Output, exit codes and streams of the real command."""
    path = saved(attention(), tmp_path / "model.onnx")
    done = subprocess.run(
        [*COMMAND, "optimize", "model.onnx", "-o", "out.onnx", "--html", "page.html", "--report", "report.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert "1 fused (of 1)" in done.stdout
    assert "wrote out.onnx, page.html, report.json" in done.stdout
    saved_by_it = "at 4,096 tokens 512 MiB of scores and probabilities are not held any more"
    assert f" 5 nodes before, 1 after; {saved_by_it} wrote" in " ".join(done.stdout.split())  # COLUMNS may be set
    assert ops(tmp_path / "out.onnx") == ["FlashAttention"]
    done = subprocess.run([*COMMAND, "inspect", str(path) + "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fa-compiler: error: {path}x: no such file\n"


def test_inspect_tells_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The code, the sentence and the node in the table; once below it, for all blocks alike, what to change."""
    model = attention()
    probabilities = next(node.output[0] for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(probabilities, onnx.TensorProto.FLOAT, [None] * 4))
    assert main(["inspect", str(saved(model, tmp_path / "model.onnx"))]) == 0
    shown = capsys.readouterr().out
    assert "probabilities_are_output: the probabilities" in shown
    assert shown.count("block 0, try: leave out what reads the probabilities") == 1


def test_inspect_tells_what_a_fused_attention_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kind of loss in the table; once below it, for both layers, why and what to do. With --explain for each."""
    mask = "keep = LessOrEqual(j, i) small = Constant<value=float {-1e4}>() f = Where(keep, zero, small) "
    layer = "s{0} = MatMul({1}, kt) x{0} = Add(s{0}, f) p{0} = Softmax<axis=-1>(x{0}) {2} = MatMul(p{0}, v) "
    body = (
        "zero = Constant<value=float {0.0}>() o = Constant<value=int64 {0}>() e = Constant<value=int64 {1}>() "
        "a = Constant<value=int64[1] {1}>() z = Constant<value=int64[1] {0}>() n = Shape<start=2, end=3>(q) "
        "m = Squeeze(n) r = Range(o, m, e) i = Unsqueeze(r, a) j = Unsqueeze(r, z) " + mask
    )
    body += "kt = Transpose<perm=[0,1,3,2]>(k) " + layer.format(1, "q", "h") + layer.format(2, "h", "y")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        f"g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[B,4,S,8] y) {{ {body} }}"
    )
    path = str(saved(model, tmp_path / "model.onnx"))
    assert main(["inspect", path]) == 0
    shown = capsys.readouterr().out
    assert shown.count("missed: dense mask") == 2
    assert shown.count("blocks 0-1, missed dense mask: it is not proven that a mask constant") == 1
    assert shown.count("[x1] and 1 more; try: --assume masks-dominate") == 1
    assert main(["inspect", path, "--explain"]) == 0
    explained = capsys.readouterr().out
    assert explained.count(f"missed dense mask: {MissedCode.DENSE_MASK.meaning}") == 2
    assert explained.count("try: --assume masks-dominate if that holds") == 2
    assert main(["inspect", path, "--json"]) == 0
    (missed,) = json.loads(capsys.readouterr().out)["blocks"][1]["missed"]
    assert (missed["code"], missed["culprit"]) == ("dense_mask", "x2")
    assert "it is not proven" in missed["reason"] and "masks-dominate" in missed["hint"]
    page = tmp_path / "page.html"
    assert main(["inspect", path, "--html", str(page), "--quiet"]) == 0
    assert "What was fused and could be better" in page.read_text(encoding="utf-8")


def test_strict_tells_what_is_not_fused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is written; the exit code says that an attention is left, or that there is none."""
    read = attention()
    probabilities = next(node.output[0] for node in read.graph.node if node.op_type == "Softmax")
    read.graph.output.append(helper.make_tensor_value_info(probabilities, onnx.TensorProto.FLOAT, [None] * 4))
    fused = fa_compiler.optimize(attention()).model
    assert isinstance(fused, onnx.ModelProto)
    beside = attention()
    beside.graph.node.append(helper.make_node("Conv", ["z", "w"], ["c"], group=2, pads=[2, 0], dilations=[2]))
    for name, shape, values in (
        ("z", [1, 2, 5], beside.graph.input),
        ("w", [2, 1, 2], beside.graph.input),
        ("c", [1, 2, 5], beside.graph.output),
    ):
        values.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    expected = {
        "fused": (attention(), 0, ""),
        "a convolution is left": (beside, 0, ""),
        "declined": (read, 1, "fa-compiler: error: --strict: block 0 (probabilities_are_output) declined\n"),
        "already fused": (fused, 0, ""),
        "none": (plain(), 1, "fa-compiler: error: --strict: no attention was fused\n"),
    }
    for name, (model, code, error) in expected.items():
        path, out = saved(model, tmp_path / f"{name}.onnx"), tmp_path / f"{name}-out.onnx"
        assert main(["optimize", str(path), "-o", str(out), "--strict"]) == code
        assert capsys.readouterr().err == error
        assert out.exists()


def test_a_command_line_without_words_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "\nexit codes:\n" in shown.err


def test_the_meaning_of_each_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "--assume", "help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown and sentence.split(":")[0] in shown for name, sentence in ASSUMPTIONS.items())
    assert main(["optimize", "--help"]) == 0
    words = {word.strip(",;") for word in capsys.readouterr().out.split()}
    assert words >= ASSUMPTIONS.keys()  # none is divided at a hyphen


@pytest.mark.parametrize("columns", [52, 60, 120])
def test_tables_are_as_wide_as_columns_says(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["inspect", path.name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    row = next(line for line in lines if line.startswith(" 0 "))
    assert row.endswith("FlashAttentionScore, BNSD, 4 heads, no mask") == (columns == 120)


def test_where_a_table_had_to_break_a_word_each_cell_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = attention()
    for node in model.graph.node:
        node.name = f"/model/encoder/layer.0/{node.name}"
    path = saved(model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["inspect", path.name]) == 0
    assert capsys.readouterr().out.splitlines()[:6] == [
        "",
        "block: 0",
        "  status: fused",
        "  anchor: /model/encoder/layer.0/attn/Softmax",
        "  what: FlashAttentionScore, BNSD, 4 heads, no",
        "    mask",
    ]


def test_lines_of_a_program_are_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sentences are, those on how the result is run included."""
    path = saved(attention(), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["optimize", path.name, "-o", "fused.onnx"]) == 0
    before, _, how = capsys.readouterr().out.partition("  Python:\n")
    assert "nodes before" in before and "How to run it:" in before
    assert max(map(len, before.splitlines())) <= 60
    assert '    session = onnxruntime.InferenceSession("fused.onnx", options)\n' in how


def test_a_table_has_room_for_letters_that_the_output_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = attention()
    for node in model.graph.node:
        node.name = f"\u6ce8\u610f\u529b/{node.name}"
    path, seen = str(saved(model, tmp_path / "model.onnx")), io.BytesIO()
    monkeypatch.setenv("COLUMNS", "60")
    with monkeypatch.context() as changed, io.TextIOWrapper(seen, encoding="ascii", errors="backslashreplace") as out:
        changed.setattr(sys, "stdout", out)
        assert main(["inspect", path]) == 0
        out.flush()
        lines = seen.getvalue().decode().splitlines()
    assert max(map(len, lines[:5])) <= 60
    assert "\\u6ce8" in "".join(lines)


def test_a_sentence_is_broken_between_words_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(saved(attention(), tmp_path / "model.onnx"))
    words = ["inspect", path, "--target", "contrib"]
    (note,) = fa_compiler.inspect(path, target="contrib").notes
    assert len(note) > 200
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(words) == 0
    assert note in capsys.readouterr().out.splitlines()
    monkeypatch.setenv("COLUMNS", "50")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("no runtime"))
    assert " ".join(lines[first:]).startswith(note)


@TERMINALS
def test_a_terminal_that_can_do_nothing_has_its_width(tmp_path: Path) -> None:
    """Rich takes 80 columns for each terminal of the kind "dumb"."""
    import pty
    import termios

    path = saved(attention(), tmp_path / "model.onnx")
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 50))
    command = [*COMMAND, "inspect", path.name]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"TERM": "dumb"}, stdout=terminal, check=True)
    os.close(terminal)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert "1 fused (of 1)" in shown
    assert max(map(len, shown.splitlines())) <= 50


def test_without_a_runtime_a_standard_operator_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(saved(attention(), tmp_path / "model.onnx"))
    for words, warned in (([], True), (["--runtime", "ort-cpu"], False)):
        assert main(["inspect", path, "--target", "contrib", *words]) == 0
        assert ("no runtime was named: the file may use everything" in capsys.readouterr().out) == warned


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["optimise"], "unknown command 'optimise': did you mean 'optimize'? See 'fa-compiler --help'"),
        (
            ["explain"],
            "unknown command 'explain': --explain is an option of optimize, inspect, plan, atc;"
            " see 'fa-compiler --help'",
        ),
        (["compare", "a", "b"], "unknown command 'compare': did you mean 'verify'? See 'fa-compiler --help'"),
        (["air", "shov"], "unknown command 'shov': did you mean 'show'? See 'fa-compiler air --help'"),
        (
            ["registry", "x"],
            "unknown command 'x': known are list, show, runtimes, diff; see 'fa-compiler registry --help'",
        ),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == f"fa-compiler: error: {message}\n"


def test_a_file_may_be_called_as_an_option_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(attention(), Path("h"))
    assert main(["optimize", "h", "-o", "o"]) == 0
    assert "wrote o\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["inspect", ""], ["atc", "m.onnx", "-o", "", "--soc-version", "Ascend910B2"]])
def test_an_empty_path_is_no_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a variable of the shell that is not set; `Path("")` is the folder where the user is."""
    assert main(words) == 2
    assert "the path is empty; see 'fa-compiler " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("optimize", "An output that exists is replaced; a link is written through."),
        ("atc", "A folder that an earlier run wrote is replaced, unless it holds other files."),
        ("library", ""),
    ],
)
def test_the_help_says_what_becomes_of_an_output(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert ("A failed run leaves no output" in shown) == bool(told)


def test_library(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["library"]) == 0
    assert Path(capfd.readouterr().out.rstrip("\n")) == Path(fa_compiler.custom_ops_library())


def test_a_soft_cap_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(lzma.decompress((GRAPHS / "onnx_attention_3d_softcap__onnx119.onnx.xz").read_bytes()))
    assert main(["inspect", str(path)]) == 0
    assert "3 heads, soft cap, no mask" in " ".join(capsys.readouterr().out.split())


def test_reader_that_goes_away(tmp_path: Path) -> None:
    """`fa-compiler ... | head` ends quietly."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "registry", "list"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, said(done.stderr)) == (141, "")


@DEVICES
def test_full_output_stream(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "registry", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert "standard output cannot be written: No space left" in done.stderr
    assert done.stderr.count("\n") == 1


@SCRIPTS
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    """The files of a run do not get the places of these streams, and the lines are lost."""
    model = saved(attention(), tmp_path / "model.onnx")
    line = f'"$@" {closed}'
    words = [*COMMAND, "optimize", str(model), "-o", str(tmp_path / "out.onnx"), "--report", str(tmp_path / "r.json")]
    done = subprocess.run(["sh", "-c", line, "sh", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert [block["status"] for block in json.loads((tmp_path / "r.json").read_text())["blocks"]] == ["fused"]
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"))


_SLOW = """
import signal, sys, time
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup
import fa_compiler.pipeline.fusing as pipeline
from fa_compiler.command_line.main import main

def fuse(*args):
    print("ready", flush=True)
    time.sleep(60)

pipeline.fuse = fuse
sys.exit(main())
"""


@SIGNALS
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals(name: str, tmp_path: Path) -> None:
    saved(attention(), tmp_path / "model.onnx")
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, "optimize", "model.onnx", "-o", "out.onnx"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **LISTENS_TO_INTERRUPTS,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    _, error = process.communicate()
    assert (process.returncode, error) == (130, "fa-compiler: error: interrupted; nothing was written\n")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


_CONVERTING = """
import signal, sys
import fa_compiler.pipeline.fusing as pipeline
from fa_compiler.command_line.main import main

def fuse(*args):
    try:
        signal.raise_signal(NUMBER)
    except KeyboardInterrupt:
        raise ERROR("initialization failed") from None

pipeline.fuse = fuse
sys.exit(main())
"""


@pytest.mark.parametrize(("number", "error"), [("SIGINT", "ImportError"), ("SIGTERM", "OSError")])
def test_an_interrupt_that_comes_out_as_another_error(number: str, error: str, tmp_path: Path) -> None:
    """As native code makes one of it while it imports a module."""
    saved(attention(), tmp_path / "model.onnx")
    program = _CONVERTING.replace("NUMBER", f"signal.{number}").replace("ERROR", error)
    command = [sys.executable, "-c", program, "optimize", "model.onnx", "-o", "out.onnx"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        **LISTENS_TO_INTERRUPTS,
    )
    assert (done.returncode, said(done.stderr)) == (130, "fa-compiler: error: interrupted; nothing was written\n")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


_HASTY = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *others):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[0] = "/usr/bin/fa-compiler"
from fa_compiler.__main__ import main
sys.exit(main())
"""


def _interrupted(program: str, module: str) -> subprocess.CompletedProcess[str]:
    """The program, with an interrupt while it imports a module; it is not ignored, as by a job in the background."""
    return subprocess.run(
        [sys.executable, "-c", program, module],
        capture_output=True,
        text=True,
        check=False,
        **LISTENS_TO_INTERRUPTS,
    )


@pytest.mark.parametrize("module", ["onnx", "fa_compiler.errors"])
def test_an_interrupt_while_the_command_is_imported(module: str) -> None:
    process = _interrupted(_HASTY, module)
    error = "fa-compiler: error: interrupted; nothing was written\n"
    assert (process.returncode, process.stdout, said(process.stderr)) == (130, "", error)


def test_an_interrupt_while_another_program_imports_the_package() -> None:
    program = _HASTY.replace("/usr/bin/fa-compiler", "/usr/bin/server")
    process = _interrupted(program, "onnx")
    assert process.returncode != 130 or "interrupted" not in process.stderr
    assert "KeyboardInterrupt" in process.stderr


COMPLETIONS = {
    "fa-compiler op": "optimize ",
    "fa-compiler optimize model.onnx --target on": "onnx ",
    "fa-compiler inspect model.onnx --runtime tens": "tensorrt ",
    "fa-compiler optimize model.onnx --assume binary": "binary-masks ",
    "fa-compiler docs run": "runtimes ",
    "fa-compiler completion z": "zsh ",
}


@pytest.mark.parametrize("line", COMPLETIONS)
def test_completion(line: str, tmp_path: Path) -> None:
    """As a shell asks for it: the line in variables of the environment, the answer in a file."""
    answer = tmp_path / "answer"
    given = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    environment = {**os.environ, **given, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-m", "fa_compiler"], env=environment, check=False, capture_output=True)
    assert COMPLETIONS[line] in answer.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_needs_for_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def test_a_shell_without_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err == "fa-compiler: error: unknown shell 'csh': known are bash, zsh, fish\n"


def _on_a_terminal(arguments: list[str], folder: Path) -> str:
    """What a command prints to a terminal on standard error."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:
        pass  # how Linux tells that the other side of a terminal is closed
    os.close(ours)
    assert process.wait() == 0
    return seen.decode()


@TERMINALS
def test_progress_is_for_terminals(tmp_path: Path) -> None:
    saved(attention(), tmp_path / "model.onnx")
    arguments = ["optimize", "model.onnx", "-o", "out.onnx"]
    assert "attention" in _on_a_terminal(arguments, tmp_path)
    assert _on_a_terminal([*arguments, "--quiet"], tmp_path) == ""


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"fa-compiler {fa_compiler.__version__}\n"
    for command in ([], ["optimize"], ["inspect"], ["verify"], ["registry"], ["registry", "diff"]):
        assert main([*command, "--help"]) == 0
        assert "exit codes:" in capfd.readouterr().out


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == fa_compiler.__version__


def test_report_is_the_json_of_the_schema(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, report = saved(attention(), tmp_path / "model.onnx"), tmp_path / "report.json"
    out = str(tmp_path / "out.onnx")
    assert main(["optimize", str(path), "-o", out, "--report", str(report), "--quiet"]) == 0
    assert capfd.readouterr().out == ""
    written = json.loads(report.read_text(encoding="utf-8"))
    assert {"schema", "model", "target", "blocks", "summary", "seconds"} <= written.keys()
    assert (written["schema"], written["model"], written["target"]) == (1, str(path), "ort")
    assert written["summary"] == {
        "softmaxes": 1,
        "fused": 1,
        "already_fused": 0,
        "declined": 0,
        "not_attention": 0,
        "linear_attention": 0,
    }
    keys = "id kind pair anchor status op node layout mask heads extensions assumed code reason culprit hint missed"
    assert list(written["blocks"][0]) == keys.split()
    assert written["blocks"][0]["anchor"] == "attn/Softmax"
    assert main(["inspect", str(path), "--json"]) == 0
    inspected = json.loads(capfd.readouterr().out)
    assert inspected["blocks"] == written["blocks"]


def test_explain(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A fused block and a declined one, in sentences."""
    model = attention()
    model.graph.output.append(helper.make_tensor_value_info("probs", 1, ["batch", 4, "seq", "seq"]))
    path = saved(model, tmp_path / "model.onnx")
    assert main(["inspect", str(path), "--explain"]) == 0
    text = capfd.readouterr().out
    assert "probabilities_are_output" in text
    assert fa_compiler.passes.Code.PROBABILITIES_ARE_OUTPUT.meaning in text
    assert "1 declined" in text
    assert main(["inspect", str(saved(attention(), path)), "--explain"]) == 0
    assert "as FlashAttentionScore, BNSD, 4 heads, no mask, node " in capfd.readouterr().out
    masked = attention()
    masked.graph.node[3].input[0] = "masked"
    masked.graph.node.insert(3, helper.make_node("Add", ["scaled", "padding"], ["masked"]))
    masked.graph.input.append(helper.make_tensor_value_info("padding", 1, ["batch", 1, 1, "seq"]))
    assert main(["inspect", str(saved(masked, path)), "--explain"]) == 0
    text = capfd.readouterr().out
    assert "the bias stays as small as the model has it" in text and "EXT-" not in text


def test_a_band_without_padding_is_not_explained_by_padding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The operator gets a mask of one element beside its band, which excludes nothing."""
    path = tmp_path / "training.onnx"
    path.write_bytes(lzma.decompress((EXAMPLES / "gpt_training.onnx.xz").read_bytes()))
    assert main(["inspect", str(path), "--explain"]) == 0
    text = capfd.readouterr().out
    assert "mask: causal, node " in text
    assert "  the band is computed from the sizes, " in text and "where there is padding, it stands beside" in text


def test_selected_keys_are_explained_without_attributes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The registry's sentences list what the operator's attributes may be: the report says what the block does."""
    path = saved(harness.load("glm_moe_dsa__dynamo_sdpa_op18"), tmp_path / "model.onnx")
    assert main(["inspect", str(path), "--explain"]) == 0
    text = capfd.readouterr().out
    assert "SparseFlashAttention" in text and "may " not in text and "cpu_empty_rows" not in text
    assert "  a query row for which no key is selected gives what it gives in the model\n" in text


def test_no_attention_is_a_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(plain(), tmp_path / "model.onnx")
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), "--verify"]) == 0
    text = capfd.readouterr().out
    assert "no attention found" in text
    assert "copy of the input" in text
    assert (tmp_path / "out.onnx").read_bytes() == path.read_bytes()


def test_force_replaces_the_input(tmp_path: Path) -> None:
    path, _ = projected(tmp_path)
    weights = (tmp_path / "weights.bin").read_bytes()
    assert main(["optimize", str(path), "-o", str(path), "--force", "--quiet", "--verify"]) == 0
    assert "FlashAttention" in ops(path)
    assert (tmp_path / "weights.bin").read_bytes() == weights
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "weights.bin"]


@MODES
def test_existing_output_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    out.write_bytes(b"old")
    out.chmod(0o640)
    assert main(["optimize", str(path), "-o", str(out), "--quiet"]) == 0
    assert ops(out) == ["FlashAttention"]
    assert out.stat().st_mode & 0o777 == 0o640


@MODES
def test_new_output_obeys_the_umask(tmp_path: Path) -> None:
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    before = os.umask(0o027)
    try:
        assert main(["optimize", str(path), "-o", str(out), "--quiet"]) == 0
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o777 == 0o640


@LINKS
@pytest.mark.parametrize("exists", [True, False])
def test_link_at_the_output_is_written_through(exists: bool, tmp_path: Path) -> None:
    path, out, place = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx", tmp_path / "other" / "m.onnx"
    place.parent.mkdir()
    if exists:
        place.write_bytes(b"old")
        place.chmod(0o640)
    out.symlink_to("other/m.onnx")
    (tmp_path / "report.json").symlink_to("other/r.json")
    assert main(["optimize", str(path), "-o", str(out), "--report", str(tmp_path / "report.json"), "--quiet"]) == 0
    assert out.is_symlink()
    assert ops(place) == ["FlashAttention"]
    assert json.loads((place.parent / "r.json").read_text(encoding="utf-8"))["model"] == str(path)
    assert not exists or place.stat().st_mode & 0o777 == 0o640
    assert {file.name for file in place.parent.iterdir()} == {"m.onnx", "r.json"}


@LINKS
def test_failed_run_leaves_what_a_link_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out, place = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx", tmp_path / "m.onnx"
    place.write_bytes(b"old")
    out.symlink_to(place)
    monkeypatch.setattr("fa_compiler.command_line.models._compared", lambda *arguments: None)
    assert main(["optimize", str(path), "-o", str(out), "--verify", "--quiet"]) == 1
    assert place.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "out.onnx", "m.onnx"}


@LINKS
def test_link_that_leads_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    out.symlink_to("out.onnx")
    assert main(["optimize", str(path), "-o", str(out)]) == 2
    assert "is a link that leads back to itself" in capfd.readouterr().err
    out.unlink()
    out.symlink_to("missing/m.onnx")
    assert main(["optimize", str(path), "-o", str(out)]) == 2
    assert f"there is no folder {tmp_path / 'missing'}; make it first" in capfd.readouterr().err


@DEVICES
def test_output_to_a_pipe(tmp_path: Path) -> None:
    """What exists and is no regular file is written to, not replaced."""
    path = saved(attention(), tmp_path / "model.onnx")
    done = subprocess.run(
        [*COMMAND, "optimize", str(path), "-o", "/dev/stdout", "--quiet"], capture_output=True, check=True
    )
    model = onnx.load_model_from_string(done.stdout)
    assert [node.op_type for node in model.graph.node] == ["FlashAttention"]
    assert main(["optimize", str(path), "-o", "/dev/null", "--quiet"]) == 0
    assert main(["optimize", str(path), "-o", "/dev/null", "--quiet", "--verify"]) == 2
    assert Path("/dev/null").is_char_device()


@DEVICES
def test_what_is_done_next_names_no_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    for words, told in (
        (["plan", str(path)], "next: start the program with FA_COMPILER_PLAN=model.plan\n"),
        (["single-op", "Relu", "--input", "x=4:float"], "compile it with: atc --singleop=Relu.json --output=Relu "),
    ):
        assert main([*words, "-o", "/dev/null"]) == 0
        assert told in capsys.readouterr().out


@DEVICES
@pytest.mark.parametrize(("mode", "name"), [("pipe", "/dev/stdout"), ("wb", "/proc/self/fd/1"), ("ab", "/dev/fd/1")])
def test_output_to_standard_output(mode: str, name: str, tmp_path: Path) -> None:
    """The file alone is there, the text is on standard error, and a file that is appended to keeps what it held."""
    path, file = saved(attention(), tmp_path / "model.onnx"), tmp_path / "file"
    file.write_bytes(b"before")
    command = [*COMMAND, "optimize", str(path), "-o", name]
    if mode == "pipe":
        done = subprocess.run(command, capture_output=True, check=True)
        content = done.stdout
    else:
        with file.open(mode) as stream:
            done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, check=True)
        content = file.read_bytes()
        assert content.startswith(b"before") == (mode == "ab")
        content = content.removeprefix(b"before")
    assert [node.op_type for node in onnx.load_model_from_string(content).graph.node] == ["FlashAttention"]
    assert f"wrote {name}" in done.stderr.decode()
    assert os.path.lexists(name)


@DEVICES
def test_report_to_standard_output(tmp_path: Path) -> None:
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    command = [*COMMAND, "optimize", str(path), "-o", str(out), "--report", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout)["model"] == str(path)
    assert f"wrote {out}, /dev/stdout" in done.stderr.decode()


@NAMED_PIPES
def test_a_stream_is_not_named_as_a_model_to_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pipe = saved(attention(), tmp_path / "model.onnx"), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=pipe.read_bytes)
    reader.start()
    assert main(["optimize", str(path), "-o", str(pipe)]) == 0
    reader.join()
    shown = capsys.readouterr().out
    assert f"wrote {pipe}" in shown and 'onnxruntime.InferenceSession("fused.onnx", options)' in shown


def test_dash_is_a_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(attention(), tmp_path / "model.onnx").rename(tmp_path / "-")
    assert main(["optimize", "-", "-o", "out.onnx", "--quiet"]) == 0
    assert main(["optimize", "out.onnx", "-o", "-", "--quiet", "--force"]) == 0
    assert ops(tmp_path / "-") == ["FlashAttention"]


def test_weird_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Symbols, nodes and files may be called anything."""
    model = attention(batch="größe der Menge", length="длина [seq] 長さ + 1?")
    model.graph.node[3].name = "[bold]Soft max[/bold] ☃"
    path = saved(model, tmp_path / "ein Modell ☃ [x].onnx")
    out = tmp_path / "[red] aus.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--explain", "--verify"]) == 0
    text = capfd.readouterr().out
    assert "[bold]Soft max[/bold] ☃" in text
    assert "wrote" in text
    shape = onnx.load(out).graph.output[0].type.tensor_type.shape
    assert [dim.dim_param or dim.dim_value for dim in shape.dim] == [
        "größe der Menge",
        4,
        "длина [seq] 長さ + 1?",
        16,
    ]


@pytest.mark.parametrize(
    "product", [[], ["--soc-version", "Ascend910B2"], ["--soc-version", "950", "--cann", "9.0"], ["--cann", "8.0"]]
)
def test_ascend_target(product: list[str], tmp_path: Path) -> None:
    path, out = saved(attention(10), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--target", "ascend", "--quiet", "--verify", *product]) == 0
    node = onnx.load(out).graph.node[0]
    assert (node.op_type, node.domain) == ("FlashAttentionScore", "ascend")
    assert all(node.output), "an unnamed output"
    assert not [a.name for a in node.attribute if a.name.startswith("cpu_")]


def test_assumptions_may_be_repeated_or_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(plain(), tmp_path / "model.onnx")
    seen = []
    honest = fa_compiler.pipeline.fusing.fuse

    def watched(model: object, options: object, *args: object) -> object:
        seen.append(options.assume)  # type: ignore[attr-defined]
        return honest(model, options, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", watched)
    both = {"no-empty-rows", "masks-dominate"}
    assert main(["inspect", str(path), "--assume", "no-empty-rows, masks-dominate,"]) == 0
    assert main(["inspect", str(path), "--assume", "no-empty-rows", "--assume", "masks-dominate"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert seen == [both, both, set()]


def test_temporary_files_are_hidden_beside_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The move into place is atomic because it stays within one folder."""
    path = saved(attention(), tmp_path / "model.onnx")
    moves: list[tuple[Path, Path]] = []
    honest = writing.Path.replace

    def watched(source: Path, target: Path) -> Path:
        moves.append((source, target))
        return honest(source, target)

    monkeypatch.setattr(writing.Path, "replace", watched)
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), "--quiet"]) == 0
    ((source, target),) = moves
    assert source.parent == target.parent == tmp_path
    assert source.name.startswith(".out.onnx.")


HEADER = """
REG_OP(FlashAttentionScore)
    .INPUT(query, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .OUTPUT(attention_out, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .REQUIRED_ATTR(head_num, Int)
    .OP_END_FACTORY_REG(FlashAttentionScore)
"""


def test_registry(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # no name is broken there
    assert main(["registry", "list"]) == 0
    text = capfd.readouterr().out
    for name in fa_compiler.op_registry.names():
        assert name in text
    assert main(["registry", "show", "FlashAttentionScore"]) == 0
    text = capfd.readouterr().out
    assert "REG_OP(FlashAttentionScore)" in text
    assert ".OPTIONAL_INPUT(sink" in text
    assert "\n// FA.3: head_num is positive and equals the head count of query.\n" in text
    assert "the extension EXT-VALUE-WIDER also allows" in text
    told = [sentence for name in fa_compiler.op_registry.names() for _, sentence in constraints(name)]
    assert all(told) and "`" not in " ".join(told)  # no name of a parameter of ours is left
    assert main(["registry", "show", "FlashAttentionScore", "--cann", "8.0"]) == 0
    assert ".OPTIONAL_INPUT(sink" not in capfd.readouterr().out


def test_registry_diff(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    header = tmp_path / "ops.h"
    assert main(["registry", "show", "FlashAttentionScore"]) == 0
    header.write_text(capfd.readouterr().out)
    assert main(["registry", "diff", str(header)]) == 0
    note, conclusion = capfd.readouterr().out.splitlines()
    assert note.startswith("note: not compared, because no header that was given declares them: AddLayerNorm, ")
    assert ", FlashAttentionScoreGrad, " in note
    assert conclusion == "the headers accept the nodes that are written"
    assert main(["registry", "diff", str(tmp_path)]) == 1
    text = capfd.readouterr().out
    assert "FlashAttentionScoreGrad: no header declares it" in text
    assert f"{header}:" not in text
    assert text.endswith(" that are written for it; name its version by --cann, here and to atc\n")
    for name in fa_compiler.op_registry.names():
        assert main(["registry", "show", name]) == 0
    header.write_text(capfd.readouterr().out)
    assert main(["registry", "diff", str(tmp_path)]) == 0
    assert capfd.readouterr().out == "the headers accept the nodes that are written\n"
    header.write_text(HEADER.replace("FlashAttentionScore", "Other"))
    assert main(["registry", "diff", str(header)]) == 2
    assert f"no prototype of an operator of the registry in {header}; " in capfd.readouterr().err
    header.write_text(HEADER)
    assert main(["registry", "diff", str(header)]) == 1
    assert "input key is missing in the header" in capfd.readouterr().out
