"""Every kind of bad input ends in one line that names the file or node, exit code 2, and nothing written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.model_files import reading, writing
from tests.graphs import harness
from tests.systems import DEVICES, LINKS, NAMED_PIPES, NAMES_OF_BYTES

from .builders import attention, contents, external, plain, projected, saved

Make = Callable[[Path], Path]


def _file(content: bytes, name: str = "model.onnx") -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _folder(folder: Path) -> Path:
    (folder / "model.onnx").mkdir()
    return folder / "model.onnx"


def _edited(edit: Callable[[onnx.ModelProto], object]) -> Make:
    def make(folder: Path) -> Path:
        model = attention()
        edit(model)
        return saved(model, folder / "model.onnx")

    return make


def _located(location: str, offset: int = 64, length: int | None = None) -> Make:
    """Attention whose weights.bin is there, but whose tensor says something else."""

    def make(folder: Path) -> Path:
        path, weight = projected(folder)
        model = onnx.load(path, load_external_data=False)
        model.graph.initializer.pop()
        model.graph.initializer.append(external("w", weight.shape, location, offset, length))
        return saved(model, path)

    return make


def _truncated_weights(folder: Path) -> Path:
    path, _ = projected(folder)
    os.truncate(folder / "weights.bin", 1087)
    return path


def _unreadable_location(folder: Path) -> Path:
    path, _ = projected(folder)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"weights\xffbin"))
    return path


def _typed_weights(folder: Path, number: int) -> Path:
    path, _ = projected(folder)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[-1].data_type = number
    return saved(model, path)


def _unsized_weights(folder: Path) -> Path:
    return _typed_weights(folder, TensorProto.UNDEFINED)


def _text_weights(folder: Path) -> Path:
    return _typed_weights(folder, TensorProto.STRING)


def _missing_weights(folder: Path) -> Path:
    path, _ = projected(folder)
    (folder / "weights.bin").unlink()
    return path


def _linked_weights(folder: Path) -> Path:
    (folder / "inside").mkdir()
    path, _ = projected(folder / "inside")
    (folder / "inside" / "weights.bin").rename(folder / "secret.bin")
    (folder / "inside" / "weights.bin").symlink_to(folder / "secret.bin")
    return path


def _sparse(model: onnx.ModelProto) -> None:
    values = helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))


def _duplicate(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Relu", ["out"], ["scaled"], "twice"))


def _renamed(model: onnx.ModelProto, name: bytes) -> bytes:
    """The serialised model with an initializer whose name ends in a byte that is no text."""
    model.graph.initializer.append(helper.make_tensor(name.decode(), TensorProto.FLOAT, [1], [1.0]))
    return model.SerializeToString().replace(name, name[:-1] + b"\xff")


def _cast(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Cast", ["query"], ["more"], "cast", to=99))


def _split(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 18
    model.graph.node.append(helper.make_node("Split", ["query"], ["a", "b"], "split", num_outputs=1))


def _called_with(model: onnx.ModelProto, inputs: list[str], outputs: list[str]) -> None:
    """The softmax as a function of one input and one output."""
    _call(model, -1)
    call = model.graph.node[3]
    call.input[:], call.output[:] = inputs, outputs


def _call(model: onnx.ModelProto, along: float, default: bytes | None = None) -> None:
    """The softmax as a function with its axis as attribute."""
    soft = helper.make_node("Softmax", ["x"], ["y"], "inner")
    soft.attribute.add(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="along")
    defaults = [] if default is None else [helper.make_attribute("along", default)]
    names = ["along"] if default is None else []
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Soft", ["x"], ["y"], [soft], imports, names, defaults))
    model.opset_import.add(domain="own", version=1)
    call = helper.make_node("Soft", ["scaled"], ["probs"], "call", domain="own", along=along)
    model.graph.node[3].CopyFrom(call)


def _unmade(model: onnx.ModelProto) -> None:
    """An output without a type: the ONNX checker does not get to see it."""
    model.graph.output[0].name = "nowhere"
    model.graph.output[0].ClearField("type")


def _holding(dims: list[int], **fields: object) -> Make:
    """A constant whose data its type and shape do not go with."""
    tensor = TensorProto(name="odd", dims=dims, **{"data_type": TensorProto.FLOAT, **fields})  # type: ignore[arg-type]
    return _edited(lambda m: m.graph.node.insert(0, helper.make_node("Constant", [], ["odd"], "odd", value=tensor)))


def _contradicting(model: onnx.ModelProto) -> None:
    """A product of sizes that do not fit, beside an operator that the ONNX checker does not know."""
    model.opset_import.add(domain="com.microsoft", version=1)
    scores = next(node for node in model.graph.node if node.op_type == "MatMul")
    scores.domain, scores.op_type = "com.microsoft", "FusedMatMul"
    for name, shape in (("left", [2, 3]), ("right", [4, 5])):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, shape, [0.0] * shape[0] * shape[1]))
    model.graph.node.append(helper.make_node("MatMul", ["left", "right"], ["unread"], "product"))


CASES: dict[str, tuple[Make, str]] = {
    "missing": (lambda folder: folder / "model.onnx", "no such file"),
    "an address": (lambda folder: Path("https://example.com/model.onnx"), "no such file; download an address first"),
    "folder": (_folder, "is a folder"),
    "empty": (_file(b""), "is empty"),
    "text": (_file(b"ir_version: 8\nthis is no protobuf\n"), "not an ONNX model"),
    "zip": (_file(b"PK\x03\x04" + bytes(100)), "not an ONNX model"),
    "truncated": (lambda folder: _file(attention().SerializeToString()[:-20])(folder), "truncated"),
    "damaged name": (_file(attention().SerializeToString().replace(b"Softmax", b"Soft\xffax")), "is not UTF-8"),
    "damaged node name": (_file(attention().SerializeToString().replace(b"attn/", b"attn\xff")), "is not UTF-8"),
    "damaged value name": (_file(attention().SerializeToString().replace(b"probs", b"prob\xff")), "is not UTF-8"),
    "damaged initializer": (_file(_renamed(plain(), b"table")), "of an initializer is not UTF-8"),
    "damaged size": (_file(attention().SerializeToString().replace(b"batch", b"batc\xff")), "at the value 'query' is"),
    "no graph": (
        _file(onnx.ModelProto(ir_version=8, producer_name="x").SerializeToString()),
        "holds no graph",
    ),
    "undefined value": (_edited(lambda m: m.graph.node[1].input.__setitem__(0, "nowhere")), "'nowhere'"),
    "two producers": (_edited(_duplicate), "scaled"),
    "newer IR": (_edited(lambda m: setattr(m, "ir_version", 999)), "ir_version 999"),
    "unknown attribute": (_edited(lambda m: m.graph.node[3].attribute.add(name="x", type=2, i=1)), "Softmax"),
    "sparse initializer": (_edited(_sparse), "sparse initializers"),
    "training": (_edited(lambda m: m.training_info.add()), "training_info"),
    "no permutation": (
        _edited(
            lambda m: m.graph.node.append(helper.make_node("Transpose", ["nothing"], ["t"], "turned", perm=[0, 23]))
        ),
        "node 'turned' (Transpose) has the perm [0, 23], which is not a permutation",
    ),
    "opset below 1": (_edited(lambda m: setattr(m.opset_import[0], "version", -1)), "no opset -1"),
    "opset beyond 32 bits": (_edited(lambda m: setattr(m.opset_import[0], "version", 1 << 62)), "no opset 46116860"),
    "reference outside a function": (
        _edited(lambda m: setattr(m.graph.node[3].attribute[0], "ref_attr_name", "axis")),
        "node 'attn/Softmax' takes its 'axis' from a function",
    ),
    "attribute of another type": (_edited(lambda m: _call(m, 1.5)), "node 'call' gives function 'Soft' an attribute"),
    "default of another type": (_edited(lambda m: _call(m, -1, b"x")), "function 'Soft' has an attribute 'along'"),
    "more inputs than a function has": (
        _edited(lambda m: _called_with(m, ["scaled", "query"], ["probs"])),
        "node 'call' gives function 'Soft' more inputs or outputs",
    ),
    "more outputs than a function has": (
        _edited(lambda m: _called_with(m, ["scaled"], ["probs", "more"])),
        "node 'call' gives function 'Soft' more inputs or outputs",
    ),
    "type that is none": (_edited(_cast), "node 'cast' (Cast) has the 'to' 99, which is not a type"),
    "split in more parts than said": (_edited(_split), "node 'split' (Split) has 2 outputs and num_outputs 1"),
    "too many numbers": (_holding([], float_data=[1.0, 2.0]), "'odd' holds 2 numbers, its type and shape [] need 1"),
    "a number of numbers that nobody prints": (
        _holding([1 << 62] * 300, float_data=[1.0]),
        "need more than 2^63",
    ),
    "strings as bytes": (
        _holding([2], data_type=TensorProto.STRING, raw_data=bytes(8)),
        "'odd' holds raw bytes, its type and shape [2] need 2 strings",
    ),
    "too few strings": (
        _holding([2], data_type=TensorProto.STRING, string_data=[b"one"]),
        "'odd' holds 1 strings, its type and shape [2] need 2 strings",
    ),
    "too many bytes": (_holding([2], raw_data=bytes(12)), "'odd' holds 12 bytes, its type and shape [2] need 8"),
    "large tensor of no type": (_holding([1 << 16], data_type=0, raw_data=bytes(1 << 18)), "'odd' is of type 0"),
    "large tensor, too few": (_holding([1 << 17], raw_data=bytes(1 << 18)), "'odd' holds 262144 bytes"),
    "sizes that do not fit": (
        _edited(_contradicting),
        "node 'product' (MatMul) cannot take its inputs: [ShapeInferenceError] Incompatible dimensions",
    ),
    "output without a name": (_edited(lambda m: setattr(m.graph.output[0], "name", "")), "has no name"),
    "output that nothing makes": (_edited(_unmade), "no node makes the output 'nowhere' of its graph"),
    "damaged producer": (_file(attention().SerializeToString() + b"\x12\x02\xff\xfe"), "which is not UTF-8"),
    "damaged metadata": (_file(attention().SerializeToString() + b"\x72\x04\x0a\x02\xff\xfe"), "metadata is not UTF-8"),
    "weights of no size": (_unsized_weights, "'w' is of type 0, which ONNX does not have"),
    "weights of text": (_text_weights, "which a tensor of type 8 cannot"),
    "weights missing": (_missing_weights, "tensor 'w' needs 1024 bytes"),
    "weights in a file of no text": (_unreadable_location, "which is not UTF-8"),
    "weights truncated": (_truncated_weights, "has only 1087 bytes"),
    "weights above": (_located("../weights.bin"), "'../weights.bin', outside the model's folder"),
    "weights above, hidden": (_located("x/../../weights.bin"), "outside the model's folder"),
    "weights absolute": (_located("/etc/hostname"), "'/etc/hostname', outside the model's folder"),
    "weights linked out": (_linked_weights, "a link to"),
    "weights are a folder": (_located("."), "is not a regular file"),
    "weights nowhere": (_located(""), "names no file"),
    "weights short": (_located("weights.bin", length=1000), "length 1000"),
    "weights before the file": (_located("weights.bin", offset=-4), "offset -4"),
}


def test_weights_that_this_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is where it should be."""
    path, _ = projected(tmp_path)
    opened = Path.open

    def refuse(self: Path, *rest: Any, **options: Any) -> Any:
        if self.name == "weights.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return opened(self, *rest, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(["inspect", str(path)]) == 2
    assert "(Permission denied); let this user read the file" in capsys.readouterr().err


@pytest.mark.parametrize("case", [pytest.param(case, marks=LINKS if "linked" in case else ()) for case in CASES])
@pytest.mark.parametrize("command", ["optimize", "inspect"])
def test_bad_model(case: str, command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, expected = CASES[case]
    path = make(tmp_path)
    before = contents(tmp_path)
    arguments = [command, str(path)] + (["-o", str(tmp_path / "out.onnx")] if command == "optimize" else [])
    assert main(arguments) == 2
    _one_error(capfd, expected, str(path))
    assert contents(tmp_path) == before


def test_offset_that_is_no_number(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = projected(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[-1].external_data[1].value = "many"
    assert main(["inspect", str(saved(model, path))]) == 2
    _one_error(capfd, "not a number", "tensor 'w'")


OUTPUTS = {
    "folder": (lambda folder: folder, "is a folder"),
    "no such folder": (lambda folder: folder / "no" / "out.onnx", "make it first"),
    "parent is a file": (lambda folder: folder / "model.onnx" / "out.onnx", "make it first"),
    "read-only": (lambda folder: Path("/proc/out.onnx"), "cannot be written"),
    "full": (lambda folder: Path("/dev/full"), "No space left"),
    "input": (lambda folder: folder / "model.onnx", "is the input itself"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=DEVICES if case in ("read-only", "full") else ()) for case in OUTPUTS]
)
def test_bad_output(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, expected = OUTPUTS[case]
    path = saved(attention(), tmp_path / "model.onnx")
    before = contents(tmp_path)
    assert main(["optimize", str(path), "-o", str(make(tmp_path))]) == 2
    _one_error(capfd, expected, str(make(tmp_path)))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("link", [pytest.param("symbolic", marks=LINKS), "hard", "spelling"])
def test_output_is_the_input_by_another_name(link: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    other = tmp_path / "other.onnx"
    if link == "symbolic":
        other.symlink_to(path)
    elif link == "hard":
        other.hardlink_to(path)
    else:
        other = Path(f"{tmp_path}/./x/../model.onnx")
        (tmp_path / "x").mkdir()
    content = path.read_bytes()
    assert main(["optimize", str(path), "-o", str(other)]) == 2
    _one_error(capfd, "--force", str(other))
    assert path.read_bytes() == content


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_output_is_the_weights(force: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = projected(tmp_path)
    before = contents(tmp_path)
    assert main(["optimize", str(path), "-o", str(tmp_path / "weights.bin"), *force]) == 2
    _one_error(capfd, "holds the weights", "weights.bin")
    assert contents(tmp_path) == before


@NAMED_PIPES
def test_verify_reads_its_files_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "model.onnx"
    os.mkfifo(pipe)
    assert main(["optimize", str(pipe), "-o", str(tmp_path / "out.onnx"), "--verify"]) == 2
    _one_error(capfd, "--verify has to read it again", str(pipe))


@DEVICES
def test_input_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "PROTO_LIMIT", 1 << 20)
    assert main(["inspect", "/dev/zero"]) == 2
    _one_error(capfd, "/dev/zero has more than 2 GiB")


def test_report_may_not_be_a_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(plain(), tmp_path / "model.onnx")
    before = contents(tmp_path)
    out = str(tmp_path / "out.onnx")
    assert main(["optimize", str(path), "-o", out, "--report", str(path), "--force"]) == 2
    _one_error(capfd, "is the input itself", str(path))
    assert main(["optimize", str(path), "-o", out, "--report", out]) == 2
    _one_error(capfd, "both", out)
    assert main(["optimize", str(path), "-o", out, "--report", str(tmp_path / "no" / "r.json")]) == 2
    _one_error(capfd, "make it first", "r.json")
    assert contents(tmp_path) == before


USAGE = {
    "unknown command": (["optimise"], "optimise"),
    "no output": (["optimize", "MODEL"], "-o"),
    "unknown target": (["optimize", "MODEL", "-o", "OUT", "--target", "luck"], "unknown target 'luck'; known are"),
    "nearly a target": (["optimize", "MODEL", "-o", "OUT", "--target", "ontx"], "did you mean 'onnx'?"),
    "a runtime as target": (["inspect", "MODEL", "--target", "cuda"], "--target onnx --runtime ort-cuda"),
    "unknown assumption": (["optimize", "MODEL", "-o", "OUT", "--assume", "luck"], "'luck'"),
    "nearly an assumption": (["inspect", "MODEL", "--assume", "no-empty-row"], "did you mean 'no-empty-rows'?"),
    "nearly an option": (
        ["optimize", "MODEL", "-o", "OUT", "--verfy"],
        "unknown argument '--verfy', did you mean --verify? See 'fa-compiler optimize --help'",
    ),
    "an option of another command": (["verify", "MODEL", "MODEL", "--lenghts=3"], "see 'fa-compiler verify --help'"),
    "ATC's spelling": (
        ["atc", "MODEL", "-o", "OUT", "--soc_version=Ascend910B2"],
        "unknown argument '--soc_version=Ascend910B2', did you mean --soc-version? Options here have '-' and not '_'",
    ),
    "an option that atc.sh sets": (
        ["atc", "MODEL", "-o", "OUT", "--soc-version", "Ascend910B2", "--framework=5"],
        "unknown argument '--framework=5': atc.sh sets this option of ATC",
    ),
    "an option for atc.sh": (
        ["atc", "MODEL", "-o", "OUT", "--soc-version", "Ascend910B2", "--output-type=FP32"],
        "unknown argument '--output-type=FP32': it is an option of ATC: give it to atc.sh, which passes it on",
    ),
    "an option of ATC that has another name here": (
        ["atc", "MODEL", "-o", "OUT", "--soc-version", "Ascend910B2", "--dynamic_batch_size", "1,2"],
        "unknown argument '--dynamic_batch_size': give --dynamic-dims instead",
    ),
    "a folder that cannot be made": (
        ["atc", "MODEL", "-o", "/proc/nothing", "--soc-version", "Ascend910B2", "--input-shape", "x:2,4"],
        "/proc/nothing cannot be made: No such file or directory; choose another place",
    ),
    "a text in the place of a whole number": (
        ["run", "MODEL", "--threads", "a"],
        "--threads: 'a' is not a whole number",
    ),
    "a text in the place of a number": (
        ["shard", "MODEL", "-o", "OUT", "--sequence-parallel", "2", "--latency", "x"],
        "--latency: 'x' is not a number",
    ),
    "no value": (["inspect", "MODEL", "--html"], "argument --html needs a value behind it"),
    "a picture of another kind": (
        ["inspect", "MODEL", "--graph", "x.png"],
        "--graph writes SVG: x.png has to end with .svg, not .png",
    ),
    "a report in the place of a model": (
        ["optimize", "MODEL", "-o", "OUT", "--report", "other.onnx"],
        "the report cannot be other.onnx, which is the name of a model; choose another name",
    ),
    "a plan in the place of a model": (
        ["plan", "MODEL", "-o", "other.onnx"],
        "the plan cannot be other.onnx, which is the name of a model",
    ),
    "a page of figures in the place of a model": (
        ["bench", "MODEL", "--html", "other.onnx"],
        "the page cannot be other.onnx, which is the name of a model",
    ),
    "outputs in the place of a model": (
        ["run", "MODEL", "--outputs", "other.ONNX"],
        "the file of outputs cannot be other.ONNX, which is the name of a model",
    ),
    "a page in the place of a model": (
        ["inspect", "MODEL", "--html", "other.onnx"],
        "the page cannot be other.onnx, which is the name of a model",
    ),
    "an option that another command has": (
        ["inspect", "MODEL", "--verify"],
        "unknown argument '--verify': it is an option of optimize; see 'fa-compiler inspect --help'",
    ),
    "the model behind an option": (
        ["optimize", "--input", "MODEL", "-o", "OUT"],
        "unknown argument '--input': IN.onnx stands without an option in front of it",
    ),
    "the model behind the option of ATC": (
        ["atc", "--model=MODEL", "-o", "OUT", "--soc-version", "Ascend910B2"],
        "unknown argument '--model=MODEL': IN.onnx stands without an option in front of it",
    ),
    "a model behind its name in the help": (
        ["verify", "--original", "MODEL", "--other", "MODEL"],
        "unknown argument '--original': A.onnx stands without an option in front of it",
    ),
    "another word for an option": (["inspect", "MODEL", "--product=A2"], "'--product=A2', did you mean --soc-version?"),
    "another word for an option that this command lacks": (
        ["library", "--product=A2"],
        "unknown argument '--product=A2'; see 'fa-compiler library --help'",
    ),
    "the beginning of an option": (["optimize", "MODEL", "--out", "OUT"], "'--out', did you mean --output?"),
    "an option with more behind it": (
        ["optimize", "MODEL", "-o", "OUT", "--opset-version", "20"],
        "'--opset-version', did you mean --opset?",
    ),
    "one dash in the place of two": (["optimize", "MODEL", "-output", "OUT"], "'-output', did you mean --output?"),
    "a misspelt option that is required": (
        ["shard", "MODEL", "-o", "OUT", "--sequence-parallell", "2"],
        "'--sequence-parallell', did you mean --sequence-parallel?",
    ),
    "two models": (
        ["optimize", "MODEL", "b.onnx", "-o", "OUT"],
        "unexpected argument 'b.onnx': the command takes IN.onnx and options only; see",
    ),
    "two models of a measurement": (
        ["bench", "MODEL", "fused.onnx"],
        "'fused.onnx': the command takes IN.onnx and options only, because it fuses the model itself and measures both",
    ),
    "an empty word": (
        ["optimize", "MODEL", "", "-o", "OUT"],
        "unexpected argument '': the command takes IN.onnx and options only; see",
    ),
    "two values of an option": (
        ["bench", "MODEL", "--lengths", "128", "512"],
        "'512': the command takes IN.onnx and options only; commas separate the values of an option",
    ),
    "an operator behind a list": (
        ["registry", "list", "Conv"],
        "unexpected argument 'Conv': the command takes options only; see 'fa-compiler registry list --help'",
    ),
    "no command": (
        ["b.onnx", "-o", "OUT"],
        "a command stands in front of a file, such as: fa-compiler optimize b",
    ),
    "a target by its device": (["inspect", "MODEL", "--target", "npu"], "unknown target 'npu', did you mean 'ascend'?"),
    "a target by its processor": (["inspect", "MODEL", "--target", "gpu"], "use --target onnx --runtime ort-cuda"),
    "more threads than cores": (
        ["run", "MODEL", "--threads", "100000"],
        "100000 threads are more than this machine's ",
    ),
    "an option in the place of a command": (["version"], "unknown command 'version': did you mean '--version'?"),
    "bodies of another target": (
        ["optimize", "MODEL", "-o", "OUT", "--target", "onnx", "--no-bodies"],
        "--no-bodies needs --target ort, the default",
    ),
    "caches in one buffer and in two": (
        ["verify", "MODEL", "MODEL", "--shared-caches", "--assume", "separate-caches"],
        "shared caches and the assumption 'separate-caches' cannot both hold",
    ),
    "opset without onnx": (["inspect", "MODEL", "--opset", "23"], "an opset needs --target onnx"),
    "one unknown of two": (["inspect", "MODEL", "--assume", "no-empty-rows,luck"], "'luck'"),
    "SoC without ascend": (["optimize", "MODEL", "-o", "OUT", "--soc-version", "Ascend910B2"], "ascend"),
    "a misspelt target with a SoC": (
        ["optimize", "MODEL", "-o", "OUT", "--target", "ascned", "--soc-version", "Ascend910B2"],
        "unknown target 'ascned', did you mean 'ascend'?",
    ),
    "unknown SoC": (["inspect", "MODEL", "--target", "ascend", "--soc-version", "Ascend7"], "'Ascend7'"),
    "unknown CANN": (["inspect", "MODEL", "--target", "ascend", "--cann", "yesterday"], "'yesterday'"),
    "abbreviated": (["inspect", "MODEL", "--expl"], "--expl"),
    "unknown op": (["registry", "show", "FlashAttentionScor"], "did you mean 'FlashAttentionScore'"),
    "an op of other runtimes": (
        ["registry", "show", "MultiHeadAttention"],
        "MultiHeadAttention is no operator of Ascend; `fa-compiler registry runtimes` prints what other runtimes take",
    ),
    "unknown variant": (["registry", "show", "FlashAttentionScore", "--cann", "x"], "'x'"),
    "diff of nothing": (["registry", "diff", "MISSING"], "missing.h"),
    "tolerance": (["verify", "MODEL", "MODEL", "--rtol", "-1"], "--rtol"),
    "no number": (["verify", "MODEL", "MODEL", "--rtol", "abc"], "abc is not a number from 0 upwards"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=DEVICES if case == "a folder that cannot be made" else ()) for case in USAGE]
)
def test_bad_usage(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = USAGE[case]
    places = {
        "MODEL": str(saved(plain(), tmp_path / "model.onnx")),
        "OUT": str(tmp_path / "out.onnx"),
        "MISSING": str(tmp_path / "missing.h"),
    }
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    _one_error(capfd, expected)
    assert contents(tmp_path).keys() == {"model.onnx"}


def test_a_compressed_model_is_called_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx.gz"
    path.write_bytes(gzip.compress(attention().SerializeToString()))
    assert main(["inspect", str(path)]) == 2
    _one_error(capfd, "is compressed by gzip, and not an ONNX model; unpack it")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "model.onnx_data", "model.onnx.data"])
def test_a_file_of_weights_is_called_so(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(64))
    assert main(["inspect", str(path)]) == 2
    _one_error(capfd, "holds weights only; give the .onnx file, or export the model")


def test_a_name_that_ends_as_a_folder_is_no_file_to_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where there is no such folder: the file would have its name."""
    model = saved(attention(), tmp_path / "model.onnx")
    before = contents(tmp_path)
    out, folder = str(tmp_path / "out.onnx"), f"{tmp_path}/new/"
    for words in (["-o", folder], ["-o", out, "--html", folder], ["-o", out, "--report", folder]):
        assert main(["optimize", str(model), *words]) == 2
        _one_error(capfd, "new/ is a folder; give the name of the file to write")
    assert main(["optimize", str(model), "-o", ""]) == 2
    _one_error(capfd, "the path of the output is empty")
    with pytest.raises(fa_compiler.InputError, match="new/ is a folder"):
        fa_compiler.optimize(model, folder)
    assert contents(tmp_path) == before


def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n")
    assert main(["inspect", str(path)]) == 2
    _one_error(capfd, "is a pointer of Git LFS, not the file; `git lfs pull` fetches it")


@NAMES_OF_BYTES
def test_names_that_are_no_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """File names are bytes: a model and a report may have any, weights need a name that ONNX can hold."""
    path = tmp_path / os.fsdecode(b"m\xff.onnx")
    saved(attention(), path)
    out, report = tmp_path / os.fsdecode(b"o\xff.onnx"), tmp_path / "r.json"
    assert main(["optimize", str(path), "-o", str(out), "--report", str(report), "--quiet"]) == 0
    assert json.loads(report.read_text(encoding="utf-8"))["model"] == str(path)
    projected(tmp_path / "in")
    assert main(["optimize", str(tmp_path / "in" / "model.onnx"), "-o", str(out)]) == 2
    _one_error(capfd, "UTF-8")


@pytest.mark.parametrize("weights", [False, True])
def test_disk_fills_up(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when the model, or the copy of its weights, is synced."""
    path, _ = projected(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    done = 0

    def full(descriptor: int) -> None:
        nonlocal done
        done += 1
        if weights or done == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "fsync", full)
    assert main(["optimize", str(path), "-o", str(out / "out.onnx")]) == 2
    _one_error(capfd, "No space left", "out.onnx.data" if weights else "out.onnx")
    assert list(out.iterdir()) == []


def test_existing_output_survives_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    out = tmp_path / "out.onnx"
    out.write_bytes(b"precious")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writing.Path, "replace", refuse)
    assert main(["optimize", str(path), "-o", str(out)]) == 2
    _one_error(capfd, "Read-only", "out.onnx")
    assert out.read_bytes() == b"precious"
    assert contents(tmp_path).keys() == {"model.onnx", "out.onnx"}


@pytest.mark.parametrize("moment", ["fuse", "write"])
def test_interrupted(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, _ = projected(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    if moment == "fuse":
        monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", interrupt)
    else:
        monkeypatch.setattr(writing.Path, "replace", interrupt)
    assert main(["optimize", str(path), "-o", str(out / "out.onnx")]) == 130
    _one_error(capfd, "interrupted")
    assert list(out.iterdir()) == []


def test_fault_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A surprise inside gives code 3 and one line; the traceback only when asked for."""
    path = saved(attention(), tmp_path / "model.onnx")

    def broken(*args: object) -> None:
        raise ZeroDivisionError("a surprise")

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", broken)
    arguments = ["optimize", str(path), "-o", str(tmp_path / "out.onnx")]
    monkeypatch.delenv("FA_COMPILER_DEBUG", raising=False)
    assert main(arguments) == 3
    _one_error(capfd, "FA_COMPILER_DEBUG=1", "a surprise")
    monkeypatch.setenv("FA_COMPILER_DEBUG", "1")
    assert main(arguments) == 3
    assert "Traceback" in capfd.readouterr().err
    assert contents(tmp_path).keys() == {"model.onnx"}


def test_names_cannot_steer_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = attention()
    model.graph.node[1].input[0] = "x\x1b[2J\nfa-compiler: all is well"
    assert main(["inspect", str(saved(model, tmp_path / "model.onnx"))]) == 2
    error = capfd.readouterr().err
    assert "\x1b" not in error
    assert error.count("\n") == 1


def _one_error(capfd: pytest.CaptureFixture[str], *expected: str) -> None:
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fa-compiler: error: ")
    assert captured.err.count("\n") == 1, captured.err
    for text in expected:
        assert text in captured.err


def test_no_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container whose file systems are read-only. Models that lie in files need no such folder."""
    fused, model = tmp_path / "fused.onnx", saved(attention(), tmp_path / "model.onnx")
    fa_compiler.optimize(model, fused)
    step = tmp_path / "step.onnx"
    onnx.save(harness.load("llama_past__tsn_eager_op14"), step)

    def refused() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refused)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", refused)
    assert fa_compiler.verify(model, fused).same
    fa_compiler.DecodingSession(step)
    with pytest.raises(fa_compiler.InputError, match="No usable temporary directory.*; let .* TMPDIR name a folder"):
        fa_compiler.DecodingSession(onnx.load(step))
    assert main(["bench", str(model), "--lengths", "16", "--seconds", "0.1"]) == 2
    assert "no folder for temporary files can be made" in capsys.readouterr().err
