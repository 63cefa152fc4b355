"""How the result of `optimize` is run: the lines of a program, by the target and the runtime."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import onnx

from fa_compiler import shell
from fa_compiler.checks.operators import needs_library, without_kernel
from fa_compiler.op_registry import DOMAIN, DOMAINS, collectives
from fa_compiler.op_registry.products import product
from fa_compiler.op_registry.soc import soc_versions
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.option import options_of
from fa_compiler.passes.answer.options import SHARED_CACHES
from fa_compiler.passes.attention_ops.names import ATTENTION_OPS
from fa_compiler.passes.in_place import METADATA
from fa_compiler.protos.cache_names import fixed_size, has_steps, named_pairs, open_states
from fa_compiler.protos.metadata import metadata_of, takes_one_token
from fa_compiler.protos.step_inputs import handed_on, is_made
from fa_compiler.protos.subgraphs import all_nodes, graph_inputs

PROVIDERS = {"ort-cuda": "CUDAExecutionProvider", "ort-dml": "DmlExecutionProvider"}
"""The execution providers of the runtimes that are ONNX Runtime on another processor."""
SOC_VERSION = "Ascend910B2"
"""The product for ATC if the user named none."""
OF_ATC = ("cann", "assume", "only", "join_weights")
"""The options of the fusion that `atc` has, too. It fuses again, so that it has to be told what was
left."""
COPIED = (
    "The model has caches, and each step copies all of them.\n"
    "With --in-place-caches they are buffers, which no step copies (`fa-compiler docs decoding`)."
)
"""What is said of a decoder whose caches could be buffers."""
TAKEN = (
    "# The file leaves the size of its states open. So it begins with `outputs`: those of the model that reads the",
    "# prompt, by their names (`fa-compiler docs decoding` has an example).",
)
"""What is said of a decoder with states whose size only the outputs of another model tell."""
OWN_SESSION = "Python, in a session of your own"
"""The name of the lines for a program that makes a session of ONNX Runtime and holds the caches
itself."""


@dataclass(frozen=True)
class Way:
    """One way to run a file: the language or the kind of program, and the lines for it."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HowToRun:
    """What a file needs, as a sentence, and the ways to run it. The first way is the one for most
    users."""

    needs: str
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        """The sentence, with options as keywords of Python, and each way with its lines below its
        name."""
        return "\n".join([_with_keywords(self.needs), *self.told])

    @property
    def told(self) -> list[str]:
        """Each way with its lines below its name."""
        lines = (
            [f"  {way.name}:", *(f"    {line}".rstrip() for line in way.lines)] for way in self.ways
        )
        return [*chain.from_iterable(lines)]


def _with_keywords(sentence: str) -> str:
    """A sentence in which the options of the command line are the keywords of `optimize`."""
    named = sentence.replace("--in-place-caches", "in_place_caches=True")
    named = re.sub(r" --runtime ([\w-]+)", r", runtime='\1'", named)
    return re.sub(r"--target ([\w-]+)", r"target='\1'", named)


def how_to_run(
    path: str | os.PathLike[str],
    options: Options | None = None,
    proto: onnx.ModelProto | None = None,
    given: onnx.ModelProto | None = None,
) -> HowToRun:
    """How to run a fused file.

    Args:
        path: the file that `optimize` wrote.
        options: the options that it was written with, by default those of `optimize`.
        proto: the model in the file: its inputs, its caches in place, and whether its fused nodes
            have bodies.
        given: the model that was fused.
    """
    place, options = os.fspath(path), options or Options()
    if proto is not None and (ranks := _ranks_of(proto)) is not None:
        return _sharded(place, ranks)
    if options.target == "ort" or (
        options.is_standard and proto is not None and needs_library(proto)
    ):
        if proto is not None and metadata_of(proto, METADATA) is not None:
            return _in_place(place, proto)
        return _with_library(place, options, proto, given)
    if options.target == "ascend":
        return _with_atc(place, options, proto)
    return _without_library(place, None if options.runtime is None else options.runtime.name)


def how_to_run_result(
    path: str | os.PathLike[str],
    report: Report,
    options: Options,
    proto: onnx.ModelProto,
    given: onnx.ModelProto,
) -> HowToRun | None:
    """How the file of a run is run; None if it holds no fused operator and so is run as before.
    `given` is the model that was fused, and `proto` the one in the file."""
    if not (report.has_fused or report.count("already_fused")):
        return None
    traced, has_buffers = _has_one_token(report), metadata_of(proto, METADATA) is not None
    if options.target == "ort" and (
        has_buffers or any(SHARED_CACHES in block.assumed for block in report.blocks)
    ):
        return _in_place(os.fspath(path), proto, traced)
    how = how_to_run(path, options, proto, given)
    if report.possible_buffers:
        return _step_by_step(how, os.fspath(path), proto, traced, COPIED)
    is_stepped = options.target == "ort" and has_steps(proto)
    return _step_by_step(how, os.fspath(path), proto, traced) if is_stepped else how


def _has_one_token(report: Report) -> bool:
    """Whether a Reshape fixes the rows of each attention: such a file was traced with one token,
    and takes one in a step, even if it declares an open number. With more than one row these are
    the query heads of one key head."""
    rows = [
        block.scores[0]
        for block in report.blocks
        if block.kind == "forward" and block.scores is not None
    ]
    return bool(rows) and all(rows)


def _ready_made(proto: onnx.ModelProto) -> Counter[str]:
    """How often a model has each attention operator of ONNX Runtime."""
    ready = {name for domain, name in ATTENTION_OPS if domain == "com.microsoft"}
    nodes = (node for node in all_nodes(proto.graph.node) if node.domain == "com.microsoft")
    return Counter(node.op_type for node in nodes if node.op_type in ready)


def _without_the_library(proto: onnx.ModelProto | None, given: onnx.ModelProto | None) -> str:
    """What a session without the library does with a file."""
    if proto is None:
        return "the file runs about as fast as the model did"
    bodies = {(each.domain, each.name) for each in proto.functions}
    operators = {
        (node.domain, node.op_type)
        for node in all_nodes(proto.graph.node)
        if node.domain in DOMAINS
    }
    if not operators <= bodies:
        return "ONNX Runtime does not load the file"
    if any(domain == DOMAIN for domain, _ in operators):
        return "linear attention runs token by token, which is slow"
    if given is not None and (replaced := _ready_made(given) - _ready_made(proto)):
        names = " and ".join(sorted(replaced))
        return f"the file may run slower than the model did, because ONNX Runtime has a kernel for its {names}"
    return "the file runs about as fast as the model did"


def _for_other_sessions(proto: onnx.ModelProto | None, options: Options) -> str:
    """What to do where a session cannot load the library."""
    nodes = [] if proto is None else [*all_nodes(proto.graph.node)]
    if any(node.domain in DOMAINS and "Grad" in node.op_type for node in nodes):
        return "No other target has an operator for the gradient: sessions that cannot load it run the original model."
    words = (
        f"--target {options.target}"
        if options.is_standard
        else "--target contrib --runtime ort-cpu"
    )
    if any(node.domain == DOMAIN for node in nodes):
        return (
            "Sessions that cannot load it run the original model, or what is made of it with\n"
            f"{words}, which fuses some kinds of linear attention only."
        )
    return f"For sessions that cannot load it, fuse the original model with {words}."


def _with_library(
    path: str, options: Options, proto: onnx.ModelProto | None, given: onnx.ModelProto | None
) -> HowToRun:
    return HowToRun(
        "The kernels of this file are in the library of fa_compiler, which the session has to load.\n"
        f"Without the library {_without_the_library(proto, given)}.\n{_for_other_sessions(proto, options)}",
        (
            Way("Python", _registered(path)),
            Way(
                "Python, if other code makes the sessions: it may load this file or the original",
                shell.with_variable(
                    "FA_COMPILER_PROVIDER", "1", "python script.py    # ONNX Runtime 1.23 or newer"
                ),
            ),
            Way(
                "C++",
                (
                    "options.RegisterCustomOpsLibrary(library);    // `fa-compiler library` prints its path",
                    f"Ort::Session session(env, {'L' if shell.IS_WINDOWS else ''}{_quoted(path)}, options);",
                ),
            ),
        ),
    )


def _in_place(path: str, proto: onnx.ModelProto, has_one_token: bool = False) -> HowToRun:
    return HowToRun(
        "The caches of this file are buffers. A DecodingSession binds each of them as past and as present.\n"
        "Other programs have to do the same (`fa-compiler docs decoding`), and to load the library of fa_compiler.",
        (
            Way("Python", _steps(path, proto, has_one_token, ", room=4096")),
            Way(OWN_SESSION, _registered(path)),
        ),
    )


def _step_by_step(
    how: HowToRun, path: str, proto: onnx.ModelProto, has_one_token: bool, told: str = ""
) -> HowToRun:
    """How a decoder is run whose caches are no buffers: they grow, or are states. `told` is what to
    say of them."""
    own, *others = how.ways
    steps = Way("Python, with a session that holds the caches", _steps(path, proto, has_one_token))
    needs = f"{how.needs}\n{told}" if told else how.needs
    return HowToRun(needs, (steps, Way(OWN_SESSION, own.lines), *others))


def _steps(
    path: str, proto: onnx.ModelProto, has_one_token: bool, room: str = ""
) -> tuple[str, ...]:
    """The lines of a DecodingSession."""
    tokens = [
        info.type.tensor_type.shape.dim for info in graph_inputs(proto) if info.name == "input_ids"
    ]
    is_one = has_one_token or takes_one_token(proto)
    batch = max([1, *(fixed_size(dims[0]) for dims in tokens if dims)])
    step = f'{{"input_ids": {[[1, 2, 3]] * batch}}})    # then one token at a time'
    if not tokens or _takes_more_than_tokens(proto):
        step = "inputs)    # session.inputs names what a step takes, such as the new tokens"
    elif is_one or any(len(dims) > 1 and dims[1].dim_value == 1 for dims in tokens):
        what = "one token a step; take_caches takes those of a prompt"
        step = f'{{"input_ids": {[[1]] * batch}}})    # {what}'
    session = f"session = fa_compiler.DecodingSession({_quoted(path)}{room})"
    if open_states(proto):
        step = step.partition("    #")[0] if tokens else step
        return (
            "import fa_compiler",
            *TAKEN,
            session,
            "session.take_caches(outputs)",
            f"outputs = session.step({step}",
        )
    return ("import fa_compiler", session, f"outputs = session.step({step}")


def _takes_more_than_tokens(proto: onnx.ModelProto) -> bool:
    """Whether a step has to be given more than `input_ids`: what an encoder made, or an input that
    does not follow from the number of tokens."""
    infos = graph_inputs(proto)
    if any("encoder" in info.name or "cross" in info.name for info in infos):
        return True
    known = {"input_ids", *handed_on(proto), *(past.name for past, _ in named_pairs(proto))}
    with suppress(ValueError, KeyError, TypeError):
        for cache in json.loads(metadata_of(proto, METADATA) or "[]"):
            known |= {cache["past"], cache["length"]}
    return any(info.name not in known and not is_made(info, False) for info in infos)


def _ranks_of(proto: onnx.ModelProto) -> str | None:
    """The number of ranks of a sharded model, or N if its metadata are damaged; None for any other
    model."""
    text = metadata_of(proto, collectives.METADATA_KEY)
    if text is None:
        return None
    with suppress(ValueError, KeyError, TypeError):
        return str(int(json.loads(text)["ranks"]))
    return "N"


def run_by_ranks(path: str, ranks: str) -> str:
    """The command that runs a sharded model on so many ranks."""
    words = [
        "mpirun",
        "-n",
        ranks,
        "fa-compiler",
        "run",
        path,
        "--inputs",
        "X.npz",
        "--outputs",
        "Y.npz",
    ]
    return shell.command(words)


def _sharded(path: str, ranks: str) -> HowToRun:
    return HowToRun(
        f"The model is divided among {ranks} ranks. Each of them is a process, which MPI starts.",
        (Way("shell", (run_by_ranks(path, ranks),)),),
    )


def _registered(path: str) -> tuple[str, ...]:
    return (
        "import onnxruntime",
        "import fa_compiler",
        "options = onnxruntime.SessionOptions()",
        "fa_compiler.register_custom_ops(options)",
        f"session = onnxruntime.InferenceSession({_quoted(path)}, options)",
    )


def _with_atc(path: str, options: Options, proto: onnx.ModelProto | None) -> HowToRun:
    words = ["fa-compiler", "atc", path, "-o", "folder", "--soc-version", _soc_version(options)]
    for name in OF_ATC:
        option = options_of(Options)[name]
        if (value := getattr(options, option.field)) and value != option.default:
            words += [
                option.flag,
                ",".join(sorted(value)) if isinstance(value, frozenset) else str(value),
            ]
    command = shell.command(words)
    needs = "The operators of this file are those of Ascend. The first command writes the folder that ATC compiles."
    if sizes := "" if proto is None else _open_sizes(proto):
        command += f' --input-shape "{sizes}"'
        needs += "\nReplace each name of a size in it by a number, a range such as 1~512, or -1 for any size."
    return HowToRun(needs, (Way("for the device", (command,)), _on_this_machine(path, proto)))


def _on_this_machine(path: str, proto: onnx.ModelProto | None) -> Way:
    """How a file with Ascend's operators is run here: by the kernels or, where one is missing, by
    the reference."""
    missing = () if proto is None else without_kernel(proto)
    if not missing:
        return Way("on this machine's CPU, in Python", _registered(path))
    return Way(
        f"on this machine, slowly and in float64, because there is no CPU kernel of {' and '.join(missing)}",
        (
            "import fa_compiler.reference",
            f"session = fa_compiler.reference.evaluator({_quoted(path)})",
        ),
    )


def _soc_version(options: Options) -> str:
    """The product that the file was written for, as ATC names it; of a family the first member."""
    if options.soc_version is None:
        return SOC_VERSION
    if options.soc_version in soc_versions():
        return options.soc_version
    family = product(options.soc_version)
    return next(name for name in soc_versions() if re.fullmatch(family.pattern, name))


def _open_sizes(proto: onnx.ModelProto) -> str:
    """The inputs with sizes that are open, in the notation of --input-shape; empty if all sizes are
    fixed."""
    inputs = {}
    for value in graph_inputs(proto):
        dims = value.type.tensor_type.shape.dim
        if not all(dim.HasField("dim_value") for dim in dims):
            sizes = (
                str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "SIZE"
                for dim in dims
            )
            inputs[value.name] = ",".join(sizes)
    return ";".join(f"{name}:{sizes}" for name, sizes in inputs.items())


def _without_library(path: str, runtime: str | None) -> HowToRun:
    needs = "The operators of this file are those of ONNX or ONNX Runtime. It needs no library."
    if runtime == "openvino":
        lines = (
            "import openvino",
            f'model = openvino.Core().compile_model({_quoted(path)}, "CPU")',
        )
        return HowToRun(needs, (Way("Python", lines),))
    if runtime == "ort-webgpu":
        create = f'await ort.InferenceSession.create({_quoted(path)}, {{executionProviders: ["webgpu"]}});'
        return HowToRun(
            needs, (Way("JavaScript, with onnxruntime-web", (f"const session = {create}",)),)
        )
    if runtime is not None and not runtime.startswith("ort-"):
        return HowToRun(f"{needs} {runtime} loads it as any other ONNX file.", ())
    provider = PROVIDERS.get(runtime or "")
    providers = "" if provider is None else f', providers=["{provider}", "CPUExecutionProvider"]'
    session = f"session = onnxruntime.InferenceSession({_quoted(path)}{providers})"
    return HowToRun(needs, (Way("Python", ("import onnxruntime", session)),))


def _quoted(path: str) -> str:
    """The path as a string of Python, C++ and JavaScript."""
    return json.dumps(path, ensure_ascii=False)
