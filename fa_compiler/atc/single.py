"""Files for `atc --singleop`: one for each distinct fused operator of a model, or one from the
command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fa_compiler.atc.job import RouteResult
from fa_compiler.atc.request import Request
from fa_compiler.atc.script import script
from fa_compiler.atc.sizes import parse_sizes
from fa_compiler.errors import InputError, InternalError
from fa_compiler.lowering.ascend.air.check import ACCEPTED, verdict
from fa_compiler.lowering.ascend.air.check_prototypes import DTYPE, check_op, entry_of
from fa_compiler.lowering.ascend.graph import Attr, Op, Output, TensorDesc, Weight, absent
from fa_compiler.lowering.ascend.infer import Fact, InferenceError, can_infer, infer
from fa_compiler.lowering.ascend.infer.graph import constant
from fa_compiler.lowering.ascend.single_op import broken_constraints, check_text, to_json
from fa_compiler.lowering.ascend.single_op.rules import CONSTRAINT
from fa_compiler.lowering.ascend.single_op.spelling import TYPES, type_spelling
from fa_compiler.op_registry import get, names, operator
from fa_compiler.op_registry.dtypes import canonical, to_numpy
from fa_compiler.op_registry.errors import UnknownOp, suggestion
from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.node import attr_value
from fa_compiler.op_registry.spec import AttrSpec, Kind, OpSpec

FOLDER = "single_op"
SCRIPT = "single_op.sh"

OTHER_SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "float64": "double", "fp64": "double"}
"""What people write for a type of ATC's, and what ATC takes."""

_T = TypeVar("_T")


def write_all(built: RouteResult, folder: Path, request: Request) -> list[Path]:
    """Write one JSON file for each distinct signature, and a script that compiles them; returns the
    JSON files.

    A signature is everything but the operator's name.

    Raises:
        InputError: --singleop has no notation for an attribute or type of an operator.
    """
    files: list[Path] = []
    seen: set[str] = set()
    for op in built.fused:
        values = _host_values(op, built.constants.get(op.name, {}), request.cann)
        signature = text_of(op, op.type, values)
        if signature not in seen:
            seen.add(signature)
            (folder / FOLDER).mkdir(exist_ok=True)
            files.append(folder / FOLDER / f"{op.type}_{len(files)}.json")
            files[-1].write_text(
                text_of(op, files[-1].stem, values), encoding="utf-8", newline="\n"
            )
    if files:
        title = (
            f"Compiles each fused operator alone for {request.soc.name}, into the folder single_op."
        )
        commands = [
            command(f"{FOLDER}/{file.name}", FOLDER, request.soc.name, request.precision)
            for file in files
        ]
        (folder / SCRIPT).write_text(script(title, commands), encoding="utf-8", newline="\n")
        (folder / SCRIPT).chmod(0o755)
    return files


def _host_values(op: Op, known: Mapping[str, Weight], cann: str | None) -> dict[str, Weight]:
    """The values of the inputs that the operator reads on the host at compile time. They are part
    of its signature."""
    spec = get(op.type, cann)
    read = {entry.name for entry in spec.inputs if entry.value_depend}
    return {name: weight for name, weight in known.items() if name in read}


def command(file: str, output: str, soc: str, precision: str = "origin") -> list[str]:
    """ATC's command for one file, as a list of words."""
    return [
        "atc",
        f"--singleop={file}",
        f"--output={output}",
        f"--soc_version={soc}",
        f"--precision_mode_v2={precision}",
        "--log=error",
    ]


def text_of(op: Op, name: str, constants: Mapping[str, Weight] | None = None) -> str:
    """The content of an operator's file, checked.

    Raises:
        InputError: ATC has no notation for something in the operator.
        InternalError: the text fails our own checks.
    """
    try:
        text = json.dumps([to_json(op, name, constants)], indent=1, allow_nan=False) + "\n"
    except ValueError as error:
        raise InputError(f"{op.type}: {error}") from None
    # The constraints are checked for the product and the version of the prototype, which the text
    # does not hold.
    diagnostics = [found for found in check_text(text.encode()) if found.rule != CONSTRAINT.name]
    if verdict(diagnostics) != ACCEPTED:
        raise InternalError(
            f"{op.name}: the JSON is not well formed ({diagnostics[0].rule}): {diagnostics[0]}"
        )
    return text


def by_hand(
    op_type: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attrs: Sequence[str],
    constants: Sequence[str],
    soc: str | None,
    cann: str | None,
) -> str:
    """The file of one operator from the arguments of the command line.

    Args:
        inputs: tensors such as "query=1,12,512,64:float16".
        outputs: tensors in the same form; an output that follows from the inputs may be left out.
        attrs: attributes such as "head_num=12".
        constants: the values of inputs, such as "actual_seq_qlen=128,512".
        soc: the product for which the operator's numbered constraints are checked; None checks what
            holds on every product.
        cann: the version of the prototype; None is the newest.

    Raises:
        InputError: an argument cannot be parsed or does not fit the prototype, or the operator
            breaks a constraint.
    """
    spec = _spec(op_type, cann)
    op = Op(op_type, op_type)
    given = _once("--input", (_tensor(item, "--input") for item in inputs))
    op.input_descs = _placed(spec, given)
    op.inputs = [None if desc.is_absent else Output(desc.name) for desc in op.input_descs]
    op.attrs = _attrs(spec, attrs)
    texts = _once("--const", (_pair(item, "--const") for item in constants))
    values = {name: _constant(name, text, given) for name, text in texts.items()}
    described = _once("--output-desc", (_tensor(item, "--output-desc") for item in outputs))
    op.output_descs = _outputs(spec, op, described, values)
    _legal_types(op)
    _verify(spec, op, values, soc, cann)
    return text_of(op, op_type, values)


def _spec(op_type: str, cann: str | None) -> OpSpec:
    if op_type in names():
        if not operator(op_type).of_ascend:
            raise InputError(
                f"{op_type} is an operator of fa_compiler for ONNX Runtime, which no Ascend product has"
            )
        return get(op_type, cann)
    found = ge_prototype(op_type)
    if found is None:
        raise UnknownOp(op_type, ge_operators())
    return found


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if not equals or not name:
        raise InputError(f"{option} {text!r} is not a name, '=' and a value")
    return name, rest


def _once(option: str, items: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    found: dict[str, _T] = {}
    for name, value in items:
        if name in found:
            raise InputError(f"{option} {name} is given twice; give it once")
        found[name] = value
    return found


def _tensor(text: str, option: str) -> tuple[str, TensorDesc]:
    name, rest = _pair(text, option)
    dims, colon, word = rest.rpartition(":")
    if not colon or word.lower() not in TYPES:
        hint = f"; there is no type {word!r}{_type_meant(word.lower())}" if colon else ""
        raise InputError(f"{option} {text!r} is not of the form {name}=1,12,512,64:float16{hint}")
    sizes = parse_sizes(dims, text)
    shape = tuple(size if isinstance(size, int) else -1 for size in sizes)
    ranges = tuple((size, size) if isinstance(size, int) else size for size in sizes)
    return name, TensorDesc(name, TYPES[word.lower()], shape, "ND", ranges if -1 in shape else None)


def _type_meant(word: str) -> str:
    """The end of a message about an unknown type."""
    word = word.removeprefix("dt_")
    meant = word if word in TYPES else OTHER_SPELLINGS.get(word)
    return suggestion(word, TYPES) if meant is None else f", did you mean {meant!r}?"


def _placed(spec: OpSpec, given: Mapping[str, TensorDesc]) -> list[TensorDesc]:
    """The tensors in the order of the prototype. A missing tensor before the last given one becomes
    a placeholder."""
    named = {
        (f"{name}0" if _is_dynamic(spec, name) else name): desc for name, desc in given.items()
    }
    of_entry: dict[str, list[str]] = {entry.name: [] for entry in spec.inputs}
    for name in named:
        place = entry_of(spec.inputs, name)
        if place is None:
            hint = suggestion(name, spec.input_names)
            raise InputError(f"{spec.name} has no input {name!r}{hint}")
        of_entry[place[0].name].append(name)
    placed: list[TensorDesc] = []
    for entry in spec.inputs:
        own = of_entry[entry.name]
        if entry.kind is Kind.DYNAMIC:
            expected = [f"{entry.name}{number}" for number in range(len(own))]
            if sorted(own) != sorted(expected):
                raise InputError(
                    f"{spec.name} needs the tensors of {entry.name} numbered {', '.join(expected)}"
                )
            placed += [_renamed(named[name], name) for name in expected]
        elif own:
            placed.append(named[own[0]])
        elif entry.kind is Kind.REQUIRED:
            raise InputError(
                f"{spec.name} needs the input {entry.name}; give --input {entry.name}=..."
            )
        else:
            placed.append(absent(entry.name))
    while placed and placed[-1].is_absent:
        placed.pop()
    return placed


def _is_dynamic(spec: OpSpec, name: str) -> bool:
    return any(entry.name == name and entry.kind is Kind.DYNAMIC for entry in spec.inputs)


def _renamed(desc: TensorDesc, name: str) -> TensorDesc:
    return TensorDesc(name, desc.dtype, desc.shape, desc.layout, desc.ranges)


def _attrs(spec: OpSpec, words: Sequence[str]) -> dict[str, Attr]:
    """Every attribute of the prototype. Defaults are written out, because they differ between
    versions of CANN."""
    given = _once("--attr", (_pair(word, "--attr") for word in words))
    for name in given:
        if name not in spec.attr_names:
            raise InputError(
                f"{spec.name} has no attribute {name!r}{suggestion(name, spec.attr_names)}"
            )
    attrs: dict[str, Attr] = {}
    for entry in spec.attrs:
        if entry.name in given:
            attrs[entry.name] = Attr(entry.type, _value(spec, entry, given[entry.name]))
        elif entry.required:
            raise InputError(
                f"{spec.name} needs the attribute {entry.name}; give --attr {entry.name}=..."
            )
        elif entry.value_if_absent is not None:
            attrs[entry.name] = Attr(entry.type, entry.value_if_absent)
    return attrs


def _value(spec: OpSpec, entry: AttrSpec, text: str) -> Any:
    parsed: Any = text
    if entry.type == "Bool":
        parsed = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif entry.type == "Type":
        parsed = TYPES.get(text.lower(), text)
        if parsed in TYPES.values():
            return parsed
    elif entry.type not in ("String", "ListString"):
        try:
            parsed = json.loads(
                f"[{text}]" if entry.type.startswith("List") and not text.startswith("[") else text
            )
        except ValueError:
            parsed = text
    elif entry.type == "ListString":
        parsed = text.split(",")
    return attr_value(spec.name, entry, parsed)


def _constant(name: str, text: str, given: Mapping[str, TensorDesc]) -> Weight:
    desc = given.get(name)
    if desc is None or desc.shape is None:
        raise InputError(f"--const {name}: give its type and shape with --input {name}=... as well")
    if -1 in desc.shape:
        raise InputError(f"--const {name}: the sizes of --input {name}=... must all be numbers")
    dtype = np.dtype(to_numpy(desc.dtype))
    try:
        words = text.split(",") if text else []
        with np.errstate(over="ignore"):  # an infinite number is refused when the file is written
            array = np.array(
                [int(word) if dtype.kind in "iub" else float(word) for word in words], dtype
            )
        array = array.reshape(desc.shape)
    except (ValueError, OverflowError):
        raise InputError(
            f"--const {name}={text} does not fit {desc.dtype} {list(desc.shape)}"
        ) from None
    data = array.tobytes()
    return Weight(desc.dtype, desc.shape, len(data), lambda: data)


def _outputs(
    spec: OpSpec, op: Op, given: Mapping[str, TensorDesc], values: Mapping[str, Weight]
) -> list[TensorDesc]:
    """The outputs: those that the user gave, and otherwise those that shape inference derives from
    the inputs."""
    inferred = _inferred(spec, op, values)
    single = sum(entry.kind is not Kind.DYNAMIC for entry in spec.outputs)
    names_of: list[str] = []
    for entry in spec.outputs:
        if entry.kind is Kind.DYNAMIC:
            count = max(len(inferred) - single, sum(_numbered(entry.name, name) for name in given))
            names_of += [f"{entry.name}{number}" for number in range(count)]
        else:
            names_of.append(entry.name)
    for name in given:
        if name not in names_of:
            raise InputError(f"{spec.name} has no output {name!r}{suggestion(name, names_of)}")
    descs: list[TensorDesc] = []
    for place, name in enumerate(names_of):
        fact = inferred[place] if place < len(inferred) else Fact("")
        known = given.get(name)
        if known is None and fact.dtype and fact.shape is not None:
            known = TensorDesc(name, fact.dtype, fact.shape)
        if known is None:
            raise InputError(
                f"the output {name!r} of {spec.name} is not known; give --output-desc {name}=..."
            )
        descs.append(known)
    return descs


def _numbered(group: str, name: str) -> bool:
    return re.fullmatch(re.escape(group) + r"\d+", name) is not None


def _legal_types(op: Op) -> None:
    """Raise InputError for a tensor with a type that the prototype does not allow; the message
    lists the types."""
    for diagnostic in check_op(op):
        if diagnostic.rule == DTYPE.name:
            message = re.sub(
                r"\bDT_\w+",
                lambda found: type_spelling(canonical(found[0])) or found[0],
                diagnostic.message,
            )
            raise InputError(message)


def _inferred(spec: OpSpec, op: Op, values: Mapping[str, Weight]) -> Sequence[Fact]:
    if not can_infer(spec.name):
        return []
    facts = {}
    for desc in op.input_descs:
        if not desc.is_absent:
            facts[desc.name] = (
                constant(values[desc.name]) if desc.name in values else Fact(desc.dtype, desc.shape)
            )
    try:
        found = infer(op, facts)
    except InferenceError as error:
        raise InputError(f"{spec.name} does not take these inputs: {error}") from None
    largest = max((size for fact in found for size in fact.shape or ()), default=0)
    if largest >= 1 << 63:
        raise InputError(
            f"{spec.name} does not take these inputs: a size of its output is {largest}"
        )
    return found


def _verify(
    spec: OpSpec, op: Op, values: Mapping[str, Weight], soc: str | None, cann: str | None
) -> None:
    found = broken_constraints(op, values, soc, cann)
    if found:
        place = "any product" if soc is None else soc
        raise InputError(
            f"{spec.name} cannot run on {place} in this form: {'; '.join(map(str, found))}"
        )
