"""Plans: the execution provider in programs without Python, and the command that writes plans."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler import provider
from fa_compiler.command_line.main import main
from fa_compiler.lowering.ort import custom_ops_library
from fa_compiler.passes import Report
from fa_compiler.provider.matching import Replacement
from fa_compiler.provider.plan_file import MAGIC, plan_bytes, signed
from tests.built_library import choose_library
from tests.cpp_programs import built
from tests.systems import SOURCES as HAS_SOURCES

from .builders import HEADS, SIZE, attention, feeds, in_a_function, plain, saved
from .test_provider import RELEASE, TOLERANCE, WARNINGS, logged

pytestmark = pytest.mark.skipif(
    RELEASE < provider.FIRST_RELEASE, reason="ONNX Runtime has no plugin interface that we use"
)
choose_library()
SOURCES = Path(__file__).parents[2] / "lowering" / "ort" / "csrc" / "provider"
ALL, DISABLED = 99, 0
"""Levels of optimisation, as the C interface numbers them."""
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Told:
    """What the program said of one plan: the provider's lines in the log by severity, and the output."""

    infos: list[str]
    warnings: list[str]
    placed: str
    output: bytes

    @property
    def is_fused(self) -> bool:
        """Whether one node of the provider is the whole graph."""
        return f"All nodes placed on [{provider.PROVIDER}]. Number of nodes: 1" in self.placed


@HAS_SOURCES
@pytest.mark.parametrize("name", ["plan.cc", "plan.hpp"])
def test_the_first_line_is_that_of_the_library(name: str) -> None:
    """The code that reads it, and the grammar."""
    assert repr(MAGIC)[2:-1] in (SOURCES / name).read_text("utf-8"), f"{name} has another number than plan_file.py"


Host = Callable[..., list[Told]]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in C++, built against our declarations of ONNX Runtime's interface."""
    return compiled("plan_host", tmp_path_factory.mktemp("host"), f"-I{SOURCES}", "-ldl")


def compiled(name: str, folder: Path, *options: str) -> Path:
    """A program, or with the option -shared a library, of a C++ file beside this one."""
    if sys.platform != "linux":
        pytest.skip("ONNX Runtime's library has another name")
    return built(folder / name, [Path(__file__).with_name(f"{name}.cc")], "-std=c++20", *options)


@pytest.fixture
def host(program: Path, tmp_path: Path) -> Host:
    """Runs the program on a model, once for each plan."""
    (runtime,) = (Path(ort.__file__).parent / "capi").glob("libonnxruntime.so.*")
    floats = tmp_path / "floats"
    floats.write_bytes(b"".join(feeds()[name].tobytes() for name in ("query", "key", "value")))

    def run(
        model: Path, *plans: Path | str, level: int = ALL, variable: Path | str = "", preload: Path | str = ""
    ) -> list[Told]:
        words = map(str, (program, runtime, custom_ops_library(), model, level, floats, *plans))
        environment = {**os.environ, "FA_COMPILER_PLAN": str(variable)}
        if preload:
            environment["LD_PRELOAD"] = str(preload)
        done = subprocess.run([*words], capture_output=True, check=False, env=environment)
        log = done.stderr.decode(errors="replace")
        assert done.returncode == 0, log[-2000:]
        parts = re.split(r"^plan .*\n", log, flags=re.MULTILINE)[1:]
        size = len(done.stdout) // len(plans)
        return [
            Told(
                re.findall(r"\[I:.*GetCapability\] (.*)", part),
                re.findall(r"\[W:.*GetCapability\] (.*?)(?:\x1b\[m)?$", part, flags=re.MULTILINE),
                part,
                done.stdout[at * size : (at + 1) * size],
            )
            for at, part in enumerate(parts)
        ]

    return run


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and its plan."""
    model, plan = saved(attention(), tmp_path / "model.onnx"), tmp_path / "model.plan"
    fa_compiler.plan(model, plan)
    return model, plan


def agree(one: Told, other: Told) -> None:
    """The outputs are equal but for the order of the additions."""
    left, right = (np.frombuffer(each.output, np.float32) for each in (one, other))
    assert np.max(np.abs(left - right)) <= TOLERANCE * np.max(np.abs(right))


def test_a_program_without_python(host: Host, paths: tuple[Path, Path]) -> None:
    """The plan comes by an option or by the environment, as a file or as a folder, to one session after another."""
    model, plan = paths
    plain_session, nothing, file, folder = host(model, "without", "-", plan, plan.parent)
    (variable,) = host(model, "-", variable=plan)
    assert not plain_session.is_fused
    assert not nothing.is_fused
    assert nothing.infos == ["nothing is fused: there is no plan, and no matcher in this process"]
    assert nothing.output == plain_session.output
    for told in (file, folder, variable):
        assert told.is_fused
        assert told.warnings == []
        assert told.infos == ["attention: 1 fused (of 1)"]
        agree(told, plain_session)


def test_an_option_outweighs_the_variable(host: Host, paths: tuple[Path, Path], tmp_path: Path) -> None:
    model, plan = paths
    named, none = host(model, plan, "", variable=tmp_path / "missing")
    assert named.is_fused
    assert not none.is_fused
    assert none.warnings == []


def test_plans_that_do_not_fit(host: Host, paths: tuple[Path, Path], tmp_path: Path) -> None:
    """Each is refused in one line of the log, and the session runs without us."""
    model, plan = paths
    content = plan.read_bytes()
    other = saved(attention(length=8), tmp_path / "other.onnx")
    fa_compiler.plan(other, tmp_path / "other.plan", "basic")
    for name, package, runtime in (("runtime", "0.1.0", "1.2.3"), ("package", "9.9.9", ort.__version__)):
        (tmp_path / f"{name}.plan").write_bytes(plan_bytes([], package, runtime, "all", "model.onnx"))
    (tmp_path / "cut.plan").write_bytes(content[:-1])
    (tmp_path / "flipped.plan").write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    (tmp_path / "text.plan").write_text("a plan")
    (tmp_path / "empty").mkdir()
    start = len(MAGIC) + DIGEST_BYTES
    (tmp_path / "short.plan").write_bytes(signed(content[start:-1]))
    expected = {
        "other.plan": "for another graph: it was made of other.onnx with the optimisation level basic",
        "runtime.plan": f"it was made for ONNX Runtime 1.2.3, and this is {ort.__version__}",
        "package.plan": "it was made for fa_compiler 9.9.9, and this is 0.1.0",
        "cut.plan": "it is damaged",
        "flipped.plan": "it is damaged",
        "short.plan": "it ends too early",
        "text.plan": "it is not a plan",
        "missing.plan": "there is no such file",
        "empty": "no plan in the folder",
    }
    without, *refused = host(model, "without", *(tmp_path / name for name in expected))
    for told, (name, sentence) in zip(refused, expected.items(), strict=True):
        (line,) = told.warnings
        assert sentence in line
        assert str(tmp_path / name) in line
        assert not told.is_fused
        assert told.output == without.output


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the user may list every folder")
def test_a_folder_that_may_not_be_listed(host: Host, paths: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    without, refused = host(paths[0], "without", folder)
    (line,) = refused.warnings
    assert line.startswith(f"the folder {folder} with plans cannot be read: ")
    assert not refused.is_fused and refused.output == without.output


def test_another_level(host: Host, tmp_path: Path) -> None:
    """Without optimisations a session shows another graph: this one has a node less after them."""
    model = attention()
    model.graph.node.append(helper.make_node("Identity", ["query"], ["same"]))
    model.graph.node[1].input[0] = "same"
    model.graph.node.insert(0, model.graph.node.pop())
    path = saved(model, tmp_path / "model.onnx")
    fa_compiler.plan(path, tmp_path / "all.plan")
    fa_compiler.plan(path, tmp_path / "disabled.plan", "disabled")
    plans = (tmp_path / "all.plan", tmp_path / "disabled.plan", tmp_path)
    for level, used in ((ALL, "all"), (DISABLED, "disabled")):
        told = host(path, *plans, level=level)
        assert [each.is_fused for each in told] == [used == "all", used == "disabled", True]
        (line,) = told[used == "all"].warnings
        assert f"with the optimisation level {'disabled' if used == 'all' else 'all'}" in line


def test_damage_anywhere(host: Host, paths: tuple[Path, Path], tmp_path: Path) -> None:
    """A plan that is cut, or has one other bit, is never used."""
    model, plan = paths
    content = plan.read_bytes()
    places = np.random.default_rng(0).integers(0, len(content), 12)
    damaged = [content[:place] for place in places]
    damaged += [content[:at] + bytes([content[at] ^ (1 << int(at) % 8)]) + content[at + 1 :] for at in places]
    files = [tmp_path / f"{number}.plan" for number in range(len(damaged))]
    for file, data in zip(files, damaged, strict=True):
        file.write_bytes(data)
    without, *refused = host(model, "without", *files)
    assert [(len(told.warnings), told.is_fused) for told in refused] == [(1, False)] * len(files)
    assert {told.output for told in refused} == {without.output}
    (told,) = host(model, tmp_path)  # the folder holds the right one, too
    assert told.is_fused
    assert len(told.warnings) == len([name for name in sorted(file.name for file in files) if name < plan.name])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the failing malloc is one for glibc")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="the sanitizers have a malloc of their own")
def test_memory_that_runs_out(host: Host, paths: tuple[Path, Path], tmp_path: Path) -> None:
    """Whichever allocation of the library fails, the session runs without us, and the log says why."""
    model, plan = paths
    failing = compiled("failing_malloc", tmp_path, "-shared", "-fPIC")
    # The first session of a process has more of them: the tables of operators.
    without, _, counted = host(model, "without", plan, f"0@{plan}", preload=failing)
    assert counted.is_fused
    (count,) = map(int, re.findall(r"^allocations (\d+)$", counted.placed, flags=re.MULTILINE))
    assert count > 100
    numbers = sorted({*range(1, count, 12), *range(1, 6), *range(count - 5, count + 1)})
    _, *results = host(model, plan, *(f"{number}@{plan}" for number in numbers), preload=failing)
    for number, told in zip(numbers, results, strict=True):
        (line,) = told.warnings
        assert line.startswith("the graph runs without fused attention: "), number
        assert "bad_alloc" in line
        assert not told.is_fused
        assert told.output == without.output


# -- in this process -------------------------------------------------------------------------------


def masked(rows: int = 17, weight: float = 1.0) -> onnx.ModelProto:
    """Attention with a causal mask and a projection, both too large to be copied into the graph."""
    model = attention(length=rows)
    mask = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
    wide = np.full((HEADS, SIZE, SIZE), weight, np.float32) * np.eye(SIZE, dtype=np.float32)
    model.graph.initializer.extend((numpy_helper.from_array(mask, "mask"), numpy_helper.from_array(wide, "wide")))
    model.graph.node.insert(3, helper.make_node("Add", ["scaled", "mask"], ["masked"], "mask_scores"))
    model.graph.node[4].input[0] = "masked"
    model.graph.node.insert(0, helper.make_node("MatMul", ["query", "wide"], ["projected"], "project"))
    model.graph.node[2].input[0] = "projected"
    return model


def run_with(model: onnx.ModelProto, plan: Path) -> tuple[np.ndarray, bool]:
    """The output of a session with this plan, and whether the matcher was asked."""
    options = ort.SessionOptions()
    options.log_severity_level = WARNINGS
    options.add_provider_for_devices(fa_compiler.register_provider(), {"plan": str(plan)})
    with provider.overhear() as heard:
        session = ort.InferenceSession(model.SerializeToString(), options)
    return session.run(None, feeds(17))[0], bool(heard.reports)


def test_the_weights_of_a_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A plan holds for other values of a weight that the matcher has not read, and for no others of one that it has."""
    plan = tmp_path / "model.plan"
    report = fa_compiler.plan(saved(masked(), tmp_path / "model.onnx"), plan)
    assert report.count("fused") == 1
    assert report.model == str(tmp_path / "model.onnx")
    trained, changed = masked(weight=2.0), masked()
    flat = numpy_helper.to_array(changed.graph.initializer[1]).copy()
    flat[3, 9] = 0  # a key that the causal mask leaves out
    changed.graph.initializer[1].CopyFrom(numpy_helper.from_array(flat, "mask"))
    for model, asked in ((masked(), False), (trained, False), (changed, True)):
        expected = ort.InferenceSession(model.SerializeToString()).run(None, feeds(17))[0]
        result, was_asked = run_with(model, plan)
        assert was_asked == asked
        assert ("it was made for other values of the weight 'mask'" in logged(capfd)) == asked
        assert np.max(np.abs(result - expected)) <= TOLERANCE * np.max(np.abs(expected))


def test_functions_of_the_model(tmp_path: Path) -> None:
    """ONNX Runtime shows the graph before it writes them out, and afterwards: the plan has both."""
    model = in_a_function()
    plan = tmp_path / "model.plan"
    assert fa_compiler.plan(saved(model, tmp_path / "model.onnx"), plan).count("fused") == 1
    assert not run_with(model, plan)[1]


def test_one_graph_has_one_key(tmp_path: Path) -> None:
    """Also beside sessions that brought other domains, and with its initialisers and attributes in another order."""
    model = masked()
    first, second = tmp_path / "first.plan", tmp_path / "second.plan"
    fa_compiler.plan(saved(model, tmp_path / "model.onnx"), first)
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    fused = fa_compiler.optimize(attention(), bodies=False).model
    assert isinstance(fused, onnx.ModelProto)
    ort.InferenceSession(fused.SerializeToString(), options)
    initializers = list(model.graph.initializer)[::-1]
    del model.graph.initializer[:]
    model.graph.initializer.extend(initializers)
    fa_compiler.plan(saved(model, tmp_path / "model.onnx"), second)
    assert first.read_bytes() == second.read_bytes()


def test_what_the_user_vouches_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A softmax without its maximum is one between bounds only. The plan holds for sessions in Python, too."""
    model = attention()
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    model.graph.node.insert(3, helper.make_node("Exp", ["scaled"], ["exponentials"], "exponentials"))
    model.graph.node.insert(4, helper.make_node("ReduceSum", ["exponentials", "last"], ["sums"], "sums"))
    model.graph.node[5].CopyFrom(helper.make_node("Div", ["exponentials", "sums"], ["probs"], "divide"))
    path, plan = saved(model, tmp_path / "model.onnx"), tmp_path / "model.plan"
    assert fa_compiler.plan(path, plan).count("declined") == 1
    assert b"; assumed" not in plan.read_bytes()
    assert main(["plan", str(path), "-o", str(plan), "--assume", "bounded-scores", "--strict", "--quiet"]) == 0
    assert b"attention: 1 fused (of 1); assumed: bounded-scores" in plan.read_bytes()
    expected = ort.InferenceSession(str(path)).run(None, feeds(17))[0]
    result, was_asked = run_with(model, plan)
    assert not was_asked
    assert np.max(np.abs(result - expected)) <= TOLERANCE * np.max(np.abs(expected))
    with pytest.raises(fa_compiler.InputError, match="no plan can be made with 'shared-caches'"):
        fa_compiler.plan(path, plan, assume=["shared-caches"])
    assert b"assumed: bounded-scores" in plan.read_bytes()


# -- the command -----------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = saved(attention(), tmp_path / "model.onnx"), tmp_path / "model.plan"
    assert main(["plan", str(model), "-o", str(plan), "--strict"]) == 0
    assert f"wrote {plan}\nnext: start the program with FA_COMPILER_PLAN={plan}\n" in capsys.readouterr().out
    assert plan.read_bytes().startswith(MAGIC)


def test_a_model_without_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says that nothing is fused, so a session with it warns of nothing."""
    model, plan = saved(plain(), tmp_path / "model.onnx"), tmp_path / "model.plan"
    assert main(["plan", str(model), "-o", str(plan), "--strict"]) == 1
    seen = capsys.readouterr()
    told = "The plan says that nothing is fused: sessions that use it run the model as it is.\n"
    assert seen.out.endswith(f"wrote {plan}\n{told}")
    assert seen.err == "fa-compiler: error: --strict: no attention was fused\n"
    options = ort.SessionOptions()
    options.add_provider_for_devices(fa_compiler.register_provider(), {"plan": str(plan)})
    with provider.overhear() as heard:
        ort.InferenceSession(str(model), options)
    assert heard.reports == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["missing.onnx", "-o", "x.plan"], "missing.onnx"),
        (["model.onnx", "-o", "model.onnx"], "model.onnx is the input itself; choose another name\n"),
        (["model.onnx", "-o", "folder"], "folder is a folder"),
        (["model.onnx", "-o", "none/x.plan"], "there is no folder none"),
        (["model.onnx", "-o", "x.plan", "--level", "most"], "unknown level 'most'"),
        (["model.onnx", "-o", "x.plan", "--level", "extend"], "unknown level 'extend', did you mean 'extended'?"),
        (["model.onnx", "-o", "x.plan", "--assume", "bounded-score"], "did you mean 'bounded-scores'"),
        (["text.onnx", "-o", "x.plan"], "text.onnx"),
    ],
)
def test_wrong_words(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    saved(attention(), Path("model.onnx"))
    Path("text.onnx").write_text("no model")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_an_older_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(attention(), tmp_path / "model.onnx")
    monkeypatch.setattr(ort, "__version__", "1.22.1")
    monkeypatch.setattr(ort, "SessionOptions", SimpleNamespace)  # without the methods that newer releases have
    assert main(["plan", str(model), "-o", str(tmp_path / "x.plan")]) == 2
    assert "the provider needs ONNX Runtime 1.23 or newer; this is 1.22.1" in capsys.readouterr().err


def test_a_model_without_a_file_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`model` is its path, not ModelProto"):
        fa_compiler.plan(attention(), tmp_path / "x.plan")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_a_fused_graph_that_the_runtime_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Replacement:
        return Replacement(Report(()), b"no model", (0, -1))

    monkeypatch.setattr(provider, "replacement", broken)
    with pytest.raises(fa_compiler.InputError, match="no plan for .*protobuf parsing failed"):
        fa_compiler.plan(saved(attention(), tmp_path / "model.onnx"), tmp_path / "model.plan")
    assert not (tmp_path / "model.plan").exists()


def test_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime cannot pass it on, so the command does."""

    def interrupted(*args: object, **kwargs: object) -> Replacement:
        raise KeyboardInterrupt

    monkeypatch.setattr(provider, "replacement", interrupted)
    model, plan = saved(attention(), tmp_path / "model.onnx"), tmp_path / "model.plan"
    assert main(["plan", str(model), "-o", str(plan)]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not plan.exists()


def test_a_graph_that_is_shown_again(tmp_path: Path) -> None:
    """ONNX Runtime writes out CastLike when the other nodes have their provider already. That is no failure of ours."""
    x, like = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "like"))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    nodes = [helper.make_node("Relu", ["x"], ["h"], "relu"), helper.make_node("CastLike", ["h", "like"], ["y"], "cast")]
    graph = helper.make_graph(nodes, "plain", [x, like], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    report = fa_compiler.plan(saved(model, tmp_path / "model.onnx"), tmp_path / "model.plan")
    assert not report.blocks
