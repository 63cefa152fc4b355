"""The generated plugin, compiled against stand-ins for CANN's headers and run on what the parser hands over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from fa_compiler.lowering.ascend.onnx_route import plugin
from fa_compiler.op_registry import AttrSpec, Kind, full_attrs, get, names
from fa_compiler.op_registry.errors import RegistryError

STUB = Path(__file__).parent / "cann_stub"
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
OPERATORS = [name for name in names() if all(entry.type in plugin.SETTABLE for entry in get(name).attrs)]
"""Those whose attributes the plugin can set."""
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class Plugin:
    """The compiled plugin with a main function around it."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def parse(self, op_type: str, attribute: str) -> tuple[dict[str, tuple[str, str]], list[list[str]], int]:
        """What is set, the dynamic inputs, and the status, for one node's attributes."""
        done = subprocess.run(
            [self.program], input=f"ascend::1::{op_type}\t{attribute}\n", capture_output=True, text=True, check=True
        )
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        attrs = {row[1]: (row[2], row[3]) for row in rows if row[0] == "attr"}
        dynamic = [row[1:] for row in rows if row[0] == "dynamic"]
        status, ge_type, framework = rows[-1][1:]
        assert (ge_type, framework) == (op_type, "5")
        return attrs, dynamic, int(status)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    folder = tmp_path_factory.mktemp("plugin")
    for name, text in plugin.files(OPERATORS).items():
        (folder / name).write_text(text)
    program = folder / "program"
    sources = [folder / plugin.SOURCE, STUB / "main.cc"]
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=c++14", "-O0"]
    include = ["-I", STUB / "include"]
    subprocess.run([str(COMPILER), *warnings, *include, *sources, "-o", program], check=True)
    yield Plugin(program)


def as_parser_gives(node: onnx.NodeProto) -> str:
    """GE's text of a node's attributes: type numbers, floats as strings, nothing where a value is zero or empty."""
    listed = []
    for attr in node.attribute:
        entry: dict[str, Any] = {"name": attr.name, "type": int(attr.type)}
        if attr.type == onnx.AttributeProto.FLOAT and attr.f:
            entry["f"] = str(np.float32(attr.f))
        elif attr.type == onnx.AttributeProto.INT and attr.i:
            entry["i"] = attr.i
        elif attr.type == onnx.AttributeProto.STRING and attr.s:
            entry["s"] = attr.s.decode()
        elif attr.type == onnx.AttributeProto.INTS:
            entry["ints"] = list(attr.ints)
        listed.append(entry)
    return json.dumps({"attribute": listed})


def value_for(entry: AttrSpec, choice: int) -> int | float | str:
    """A value of the attribute's type: zero or empty, or something else."""
    values: dict[str, tuple[int | float | str, ...]] = {
        "Int": (0, 7, -(2**62) - 1),
        "Float": (0.0, 0.125, -1.5e-7),
        "Bool": (0, 1, 0),
        "String": ("", "BNSD", 'a "b" \\ c'),
    }
    return values[entry.type][choice]


def as_recorded(entry: AttrSpec, value: Any) -> tuple[str, str]:
    if entry.type == "Float":
        return "Float", np.format_float_positional(np.float32(value))
    return entry.type, str(int(value)) if entry.type in ("Int", "Bool") else str(value)


def same(left: tuple[str, str], right: tuple[str, str]) -> bool:
    if left[0] == right[0] == "Float":
        return np.float32(left[1]) == np.float32(right[1])
    return left == right


@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_every_attribute_arrives(built: Plugin, op_type: str, choice: int) -> None:
    spec = get(op_type)
    given = {entry.name: value_for(entry, choice) for entry in spec.attrs}
    node = helper.make_node(op_type, ["q"], ["o"], domain="ascend", **given)
    attrs, dynamic, status = built.parse(op_type, as_parser_gives(node))
    assert status == 0
    assert list(attrs) == list(spec.attr_names)
    for entry in spec.attrs:
        assert same(attrs[entry.name], as_recorded(entry, given[entry.name])), entry.name
    wanted = [entry.name for entry in spec.inputs if entry.kind is Kind.DYNAMIC]
    assert dynamic == [[name, "1", str(spec.input_names.index(name))] for name in wanted]


@pytest.mark.parametrize("op_type", OPERATORS)
def test_absent_attributes_get_their_default(built: Plugin, op_type: str) -> None:
    spec = get(op_type)
    given = {entry.name: value_for(entry, 1) for entry in spec.attrs if entry.required}
    node = helper.make_node(op_type, ["q"], ["o"], domain="ascend", **given)
    attrs, _, status = built.parse(op_type, as_parser_gives(node))
    assert status == 0
    for name, value in full_attrs(spec, given).items():
        assert same(attrs[name], as_recorded(spec.attr(name), value)), name


def test_an_operator_with_a_list_among_its_attributes_has_no_plugin() -> None:
    with pytest.raises(RegistryError, match="no way to set qkv_size, of type ListInt"):
        plugin.files(["QkvRmsNormRopeCache"])


def test_lists_of_keys_and_values(built: Plugin) -> None:
    given = {"num_heads": 2, "key_count": 3, "value_count": 3}
    node = helper.make_node("IncreFlashAttention", ["q"], ["o"], domain="ascend", **given)
    attrs, dynamic, status = built.parse("IncreFlashAttention", as_parser_gives(node))
    assert (dynamic, status) == ([["key", "3", "1"], ["value", "3", "4"]], 0)
    assert "key_count" not in attrs


def test_no_attributes_at_all(built: Plugin) -> None:
    """AttentionUpdate's are all required or optional; without the text every one is absent."""
    required = any(entry.required for entry in get("AttentionUpdate").attrs)
    assert (built.parse("AttentionUpdate", "")[2] == 0) is not required


REFUSED = {
    "a required one is absent": '{"attribute":[{"name":"input_layout","type":3,"s":"BNSD"}]}',
    "an unknown one": '{"attribute":[{"name":"head_num","type":2,"i":2},{"name":"input_layout","type":3,"s":"BSH"},'
    '{"name":"cpu_mask_value","type":1,"f":"-1"}]}',
    "another type": '{"attribute":[{"name":"head_num","type":1,"f":"2"},{"name":"input_layout","type":3,"s":"BSH"}]}',
    "no number": '{"attribute":[{"name":"head_num","type":2,"i":"two"},{"name":"input_layout","type":3,"s":"BSH"}]}',
    "cut off": '{"attribute":[{"name":"head_num","type":2,"i":2},{"name":"input_lay',
    "no JSON": "head_num=2",
    "more behind it": '{"attribute":[]} x',
    "no name": '{"attribute":[{"type":2,"i":2}]}',
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(built: Plugin, case: str) -> None:
    assert built.parse("FlashAttentionScore", REFUSED[case])[2] != 0


def test_only_the_operators_that_are_used() -> None:
    files = plugin.files(["PromptFlashAttention"])
    assert set(files) == {"ascend_onnx_plugin.cc", "CMakeLists.txt", "README.md"}
    assert files[plugin.SOURCE].count("REGISTER_CUSTOM_OP") == 1
    assert "ascend::1::PromptFlashAttention" in files[plugin.GUIDE]
    assert not any("@" in text for text in files.values())


def test_an_older_cann_has_fewer_attributes() -> None:
    newest, older = (plugin.files(["FusedInferAttentionScore"], cann)[plugin.SOURCE] for cann in (None, "8.0"))
    assert "pse_type" in newest
    assert "pse_type" not in older


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_its_build_makes_and_installs_a_library(tmp_path: Path) -> None:
    """With a toolkit that has the stand-ins for headers and libraries without content."""
    toolkit, source, build = tmp_path / "toolkit", tmp_path / "plugin", tmp_path / "build"
    shutil.copytree(STUB / "include", toolkit / "include")
    (toolkit / "lib64").mkdir()
    (tmp_path / "empty.cc").touch()
    for name in ("register", "graph"):
        library = toolkit / "lib64" / f"lib{name}.so"
        subprocess.run([str(COMPILER), "-shared", tmp_path / "empty.cc", "-o", library], check=True)
    source.mkdir()
    for name, text in plugin.files(["FlashAttentionScore"]).items():
        (source / name).write_text(text)
    without = subprocess.run(["cmake", "-S", source, "-B", build], capture_output=True, text=True, env=_environment())
    assert without.returncode
    assert "set_env.sh" in without.stderr
    for command in (
        ["cmake", "-S", source, "-B", build, f"-DASCEND_HOME_PATH={toolkit}"],
        ["cmake", "--build", build],
        ["cmake", "--install", build, "--prefix", tmp_path / "installed"],
    ):
        subprocess.run(command, check=True, capture_output=True, env=_environment())
    assert (tmp_path / "installed/framework/onnx/libascend_onnx_plugin.so").is_file()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
