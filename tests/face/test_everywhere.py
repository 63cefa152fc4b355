"""The provider in all sessions of a process: by one import, and by the environment variable FA_COMPILER_PROVIDER."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from tests.startup import as_installed, beside_the_package
from tests.systems import FORK, said

from .builders import attention, saved
from .test_in_place import decoder

MAKE = """
session = ort.InferenceSession("attention.onnx")
print(session.get_providers()[0])
"""
FUSED, PLAIN = "FaCompilerExecutionProvider", "CPUExecutionProvider"
ONE = "fa_compiler: attention.onnx: 1 of 1 attention fused\n"
"""What a session reports when it is made."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(attention(), tmp_path / "attention.onnx")
    return tmp_path


def run(program: str, folder: Path, **variables: str) -> tuple[list[str], str]:
    """The lines that a program prints, and what it writes to stderr. It starts as if the package were installed."""
    path = folder / "program.py"
    path.write_text(program)
    environment = as_installed(folder, **variables)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), said(done.stderr)


@pytest.mark.parametrize(
    ("imports", "value"),
    [
        ("import onnxruntime as ort; import fa_compiler.everywhere", ""),
        ("import fa_compiler.everywhere; import onnxruntime as ort", ""),
        ("import fa_compiler.everywhere; import onnxruntime as ort", "1"),
    ],
)
def test_one_import(imports: str, value: str, folder: Path) -> None:
    """With the variable, too, a session has the provider once."""
    counted = "print(fa_compiler.everywhere.sessions.with_provider)"
    assert run(imports + MAKE + counted, folder, FA_COMPILER_PROVIDER=value) == ([FUSED, "1"], "")


@pytest.mark.parametrize(("value", "provider"), [("report", FUSED), ("0", PLAIN)])
def test_the_variable(value: str, provider: str, folder: Path) -> None:
    """Programs may ask first whether onnxruntime is there, and import this package before it."""
    first = "import importlib.util\nassert importlib.util.find_spec('onnxruntime')\nimport fa_compiler.ops"
    told = ONE + "fa_compiler: 1 session, 1 of 1 attention fused\n" if value == "report" else ""
    assert run(f"{first}\nimport onnxruntime as ort{MAKE}", folder, FA_COMPILER_PROVIDER=value) == ([provider], told)


@pytest.mark.parametrize(
    ("value", "provider", "told"),
    [
        ("off", PLAIN, ""),
        ("False", PLAIN, ""),
        ("on", FUSED, ""),
        ("repotr", FUSED, "fa_compiler: FA_COMPILER_PROVIDER is 'repotr', which is taken for 1; use 1 or report\n"),
    ],
)
def test_values_of_the_variable(value: str, provider: str, told: str, folder: Path) -> None:
    assert run(f"import onnxruntime as ort{MAKE}", folder, FA_COMPILER_PROVIDER=value) == ([provider], told)


def test_a_list_with_a_provider_that_is_not_there(folder: Path) -> None:
    """Libraries pass such lists; ONNX Runtime leaves out what it does not have, and warns of it. So do we."""
    named = 'ort.InferenceSession("attention.onnx", providers=["CUDAExecutionProvider", "CPUExecutionProvider"])'
    program = f"import onnxruntime as ort\nprint({named}.get_providers()[0])"
    lines, told = run(program, folder, FA_COMPILER_PROVIDER="1")
    assert lines == [FUSED]
    assert "Specified provider 'CUDAExecutionProvider' is not in available provider names" in told


def test_providers_in_the_place_of_the_options(folder: Path) -> None:
    """The error is that of ONNX Runtime."""
    program = """import onnxruntime as ort
try:
    ort.InferenceSession("attention.onnx", ["CPUExecutionProvider"])
except TypeError as error:
    print(str(error).splitlines()[0])"""
    plain, _ = run(program, folder)
    assert run(program, folder, FA_COMPILER_PROVIDER="1")[0] == plain
    assert "incompatible constructor arguments" in plain[0]


def test_without_the_variable_nothing_is_imported(folder: Path) -> None:
    """With it, one module and a flag of its syntax, until the program imports onnxruntime. Other packages, such as an
    editable one, have files that Python reads when it starts, too, so only those of this package are read here."""
    site = folder / "site"
    site.mkdir()
    beside_the_package(site)
    program = f"import site, sys; site.addsitedir({str(site)!r}); print(len(sys.meta_path), *sorted(sys.modules))"

    def started(**variables: str) -> tuple[int, set[str]]:
        command = [sys.executable, "-S", "-c", program]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        finders, *modules = done.stdout.split()
        return int(finders), {*modules}

    finders, modules = started()
    assert "fa_compiler" not in modules
    assert started(FA_COMPILER_PROVIDER="0") == (finders, modules)
    assert started(FA_COMPILER_PROVIDER="1") == (finders + 1, modules | {"_fa_compiler_startup", "__future__"})


def test_child_processes_have_the_variable(folder: Path) -> None:
    program = """
import multiprocessing
def first(_):
    import onnxruntime as ort
    return ort.InferenceSession("attention.onnx").get_providers()[0]
if __name__ == "__main__":
    for method in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(first, [0]))
"""
    methods = multiprocessing.get_all_start_methods()
    assert run(program, folder, FA_COMPILER_PROVIDER="1") == ([FUSED] * len(methods), "")


def test_sessions_of_this_package_are_left_alone(folder: Path) -> None:
    """What verify compares is the model itself."""
    program = """
import fa_compiler
import fa_compiler.everywhere
fa_compiler.optimize("attention.onnx", "fused.onnx")
print(fa_compiler.verify("attention.onnx", "fused.onnx").same)
fa_compiler.InferenceSession("attention.onnx", enable_fallback=False)
print(fa_compiler.everywhere.sessions.made)
"""
    assert run(program, folder, FA_COMPILER_PROVIDER="1") == (["True", "[]"], "")
    told = (
        "fa_compiler: no session of ONNX Runtime was made besides those of fa_compiler, which do without the provider\n"
    )
    assert run(program, folder, FA_COMPILER_PROVIDER="report") == (["True", "[]"], told)


def test_a_session_that_names_another_provider(folder: Path) -> None:
    program = """
import onnxruntime as ort
import fa_compiler.everywhere
options = ort.SessionOptions()
options.optimized_model_filepath = "written.onnx"
print(ort.InferenceSession("attention.onnx", options).get_providers()[0])
"""
    lines, told = run(program, folder, FA_COMPILER_PROVIDER="report")
    assert lines == [PLAIN]
    assert told.splitlines()[-2:] == [
        "fa_compiler: attention.onnx: without the provider: it writes its optimised model",
        "fa_compiler: 0 sessions; without the provider: it writes its optimised model",
    ]


ENDS = {
    "os._exit": "serve(None); sys.stdout.flush(); os._exit(0)",
    "a signal": """
if (child := os.fork()) == 0:
    serve(None)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
os._exit(0)
""",
    "a worker that is forked": """
with multiprocessing.get_context("fork").Pool(1) as pool:
    pool.map(serve, [None])
os._exit(0)
""",
}


@pytest.mark.parametrize("end", [pytest.param(end, marks=() if end == "os._exit" else FORK) for end in ENDS])
def test_a_process_that_does_not_end_normally_reports(end: str, folder: Path) -> None:
    """Each session is told when it is made."""
    program = f"""
import multiprocessing, os, signal, sys
import onnxruntime as ort
def serve(_):
    print(ort.InferenceSession("attention.onnx").get_providers()[0])
    sys.stdout.flush()
{ENDS[end]}
"""
    assert run(program, folder, FA_COMPILER_PROVIDER="report") == ([FUSED], ONE)


@FORK
def test_a_child_reports_its_own_sessions(folder: Path) -> None:
    """One child has made a session, the other none. They end as a normal process does, but for the destructors of ONNX
    Runtime, which wait for threads that a child does not have."""
    program = f"""
import atexit, os, sys
import onnxruntime as ort
{MAKE}
for sessions in (1, 0):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        for _ in range(sessions):
            ort.InferenceSession("attention.onnx")
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
"""
    summary = "fa_compiler: 1 session, 1 of 1 attention fused\n"
    assert run(program, folder, FA_COMPILER_PROVIDER="report") == ([FUSED], ONE + ONE + summary + summary)


TELLING = "get_provider_graph_assignment_info"
"""The method by which newer releases of ONNX Runtime tell which provider has taken which nodes."""
UNASKED = "the matcher was not asked: a plan answered, or the provider leaves the graph alone"
PLANNED = "fused by a plan" if hasattr(ort.InferenceSession, TELLING) else UNASKED
ALONE = "the matcher was not asked: a plan says that nothing is fused, or the provider leaves the graph alone"
LEFT_ALONE = ALONE if hasattr(ort.InferenceSession, TELLING) else UNASKED
COUNTED = {
    "the script adds the device": (
        "options.add_provider_for_devices(fa_compiler.register_provider(), {}); make()",
        ["attention.onnx: 1 of 1 attention fused", "1 session, 1 of 1 attention fused"],
    ),
    "the script adds it and names others": (
        "options.add_provider_for_devices(fa_compiler.register_provider(), {})\n"
        "make(providers=['CPUExecutionProvider'])",
        [
            "attention.onnx: without the provider: the options name a provider",
            "0 sessions; without the provider: the options name a provider",
        ],
    ),
    "a model that does not load": (
        "try: ort.InferenceSession('none.onnx')\nexcept Exception: make()",
        ["attention.onnx: 1 of 1 attention fused", "1 session, 1 of 1 attention fused"],
    ),
    "other providers afterwards": (
        "session = make(); session.set_providers(['CPUExecutionProvider']); print(session.get_providers()[0])",
        ["attention.onnx: 1 of 1 attention fused"] * 2 + ["1 session, 1 of 1 attention fused"],
    ),
    "a fused file in memory": (
        "fa_compiler.optimize('attention.onnx', 'fused.onnx'); make(open('fused.onnx', 'rb').read())",
        ["a model in memory: 1 attention fused already", "1 session, 1 attention fused already"],
    ),
    "options with the operators": (
        "fa_compiler.optimize('attention.onnx', 'fused.onnx'); options.log_severity_level = 2\n"
        "fa_compiler.register_custom_ops(options); make('fused.onnx'); make()\n"
        "other = ort.SessionOptions(); fa_compiler.register_custom_ops(other)\n"
        "ort.InferenceSession('fused.onnx', other)",
        [
            "fused.onnx: 1 attention fused already",
            "attention.onnx: 1 of 1 attention fused",
            "fused.onnx: 1 attention fused already",
            "3 sessions, 1 of 1 attention fused, 2 attentions fused already",
        ],
    ),
    "a softmax that is no attention": (
        "import onnx.parser\n"
        "text = '<ir_version: 9, opset_import: [\"\" : 17]> g (float[2] x) => (float[2] y) { y = Softmax(x) }'\n"
        "onnx.save(onnx.parser.parse_model(text), 'softmax.onnx'); make('softmax.onnx')",
        ["softmax.onnx: no attention found", "1 session, 0 of 0 attentions fused"],
    ),
    "a plan": (
        "fa_compiler.plan('attention.onnx', 'attention.plan')\n"
        "options.add_session_config_entry('ep.facompilerexecutionprovider.plan', 'attention.plan'); make()",
        [f"attention.onnx: {PLANNED}", f"1 session; {PLANNED}"],
    ),
    "a plan without attention": (
        "import onnx.parser\n"
        "text = '<ir_version: 9, opset_import: [\"\" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'\n"
        "onnx.save(onnx.parser.parse_model(text), 'relu.onnx'); fa_compiler.plan('relu.onnx', 'relu.plan')\n"
        "options.add_session_config_entry('ep.facompilerexecutionprovider.plan', 'relu.plan'); make('relu.onnx')",
        [f"relu.onnx: {LEFT_ALONE}", f"1 session; {LEFT_ALONE}"],
    ),
    "a plan in a release that does not tell who has taken nodes": (
        "fa_compiler.plan('attention.onnx', 'attention.plan')\n"
        "from onnxruntime.capi.onnxruntime_inference_collection import Session\n"
        f"if hasattr(Session, {TELLING!r}): delattr(Session, {TELLING!r})\n"
        "options.add_session_config_entry('ep.facompilerexecutionprovider.plan', 'attention.plan'); make()",
        [f"attention.onnx: {UNASKED}", f"1 session; {UNASKED}"],
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_is_counted(case: str, folder: Path) -> None:
    program, told = COUNTED[case]
    before = """
import sys
import onnxruntime as ort
import fa_compiler
options = ort.SessionOptions()
options.log_severity_level = 3
def make(path="attention.onnx", **words):
    return ort.InferenceSession(path, options, **words)
"""
    lines, errors = run(before + program, folder, FA_COMPILER_PROVIDER="report")
    if case == "a model that does not load" or case == "the script adds it and names others":
        errors = "".join(line for line in errors.splitlines(keepends=True) if line.startswith("fa_compiler: "))
    assert errors.splitlines() == [f"fa_compiler: {line}" for line in told]
    assert lines in ([], [FUSED])


def test_a_decoding_session_says_that_its_file_is_not_fused(folder: Path) -> None:
    """The file is run as it is: the provider does not know which of its caches are one buffer."""
    saved(decoder(), folder / "decoder.onnx")
    program = """
import fa_compiler, fa_compiler.everywhere
fa_compiler.DecodingSession("decoder.onnx")
fa_compiler.optimize("decoder.onnx", "fused.onnx")
fa_compiler.DecodingSession("fused.onnx")
"""
    why = "without the provider: a DecodingSession runs the file as it is (fuse it with fa-compiler optimize)"
    lines = [f"fa_compiler: decoder.onnx: {why}", f"fa_compiler: 0 sessions; {why}"]
    assert run(program, folder, FA_COMPILER_PROVIDER="report")[1].splitlines() == lines


@pytest.mark.parametrize("stderr", ["None", "open(os.devnull)"])
def test_a_program_whose_stderr_cannot_be_written(stderr: str, folder: Path) -> None:
    program = f"import os, sys\nsys.stderr = {stderr}\nimport onnxruntime as ort{MAKE}"
    assert run(program, folder, FA_COMPILER_PROVIDER="report") == ([FUSED], "")


def test_an_interrupt_in_the_matcher_ends_the_program(folder: Path) -> None:
    program = """
import signal
import onnxruntime as ort
import fa_compiler.everywhere, fa_compiler.provider as provider
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
provider.replacement = lambda *arguments, **words: signal.raise_signal(signal.SIGINT)
try:
    ort.InferenceSession("attention.onnx")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(program, folder)[0] == ["interrupted"]


@pytest.mark.parametrize(
    ("value", "spoilt", "reason"),
    [
        ("", "ort.__version__ = '1.22.0'", "the provider needs ONNX Runtime 1.23 or newer; this is 1.22.0"),
        ("1", "import fa_compiler.lowering.ort.library as l; l.library_path = lambda: 'none.so'", "none.so cannot"),
    ],
)
def test_what_fails_does_not_end_the_program(value: str, spoilt: str, reason: str, folder: Path) -> None:
    """ONNX Runtime is too old, or the library is missing. The reason is told once."""
    how = "" if value else "import fa_compiler.everywhere"
    lines, told = run(f"import onnxruntime as ort\n{how}\n{spoilt}\n{MAKE}{MAKE}", folder, FA_COMPILER_PROVIDER=value)
    assert lines == [PLAIN, PLAIN]
    assert told.count("sessions run without fused attention: ") == 1
    assert reason in told
    assert "Traceback" not in told


def test_a_package_that_cannot_be_imported(folder: Path) -> None:
    """As in a damaged installation."""
    damaged = """
import sys
class Damaged:
    def find_spec(self, name, path=None, target=None):
        if name == "fa_compiler":
            raise RuntimeError("two\\nlines")
sys.meta_path.insert(0, Damaged())
import onnxruntime as ort
"""
    lines, told = run(damaged + MAKE + MAKE, folder, FA_COMPILER_PROVIDER="1")
    assert lines == [PLAIN, PLAIN]
    assert told == "fa_compiler: sessions run without fused attention: RuntimeError: two lines\n"


def test_another_package_of_the_name(folder: Path) -> None:
    (folder / "onnxruntime.py").write_text("NAME = 'another'")
    assert run("import onnxruntime\nprint(onnxruntime.NAME)", folder, FA_COMPILER_PROVIDER="1") == (["another"], "")
