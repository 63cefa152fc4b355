"""ONNX Runtime's C interface: as its headers declare it, as our headers declare it, and where the two differ.

Our headers, `ort_abi.hpp` and `provider/ep_abi.hpp`, declare functions by slot number. ONNX Runtime's headers declare
structs of function pointers, whose members have these numbers. `abi_slots.tsv` holds what these headers declare in the
releases that its first line names, so that the tests need no header of ONNX Runtime. `tools/compat/check_abi.py`
compares the table with headers, and writes it.

Signatures are spelled in one way on both sides, without names of parameters and annotations: `Status*(const Value*)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools import descriptors

TABLE = Path(__file__).with_name("abi_slots.tsv")
SOURCES = descriptors.PATH.parent
OURS = ("ort_abi.hpp", "provider/ep_abi.hpp")
EXPORTS = {
    "RegisterCustomOpsFn": ("register.cc", "RegisterCustomOps"),
    "CreateEpApiFactoriesFn": ("provider/provider.cc", "CreateEpFactories"),
    "ReleaseEpApiFactoryFn": ("provider/provider.cc", "ReleaseEpFactory"),
}
"""The functions that the library exports: the type that ONNX Runtime's header gives them, our source, our name."""

HEADERS = ("onnxruntime_error_code.h", "onnxruntime_c_api.h", "onnxruntime_ep_c_api.h")
"""The headers that declare the interface. A release has those that it needs."""
STRUCTS = (
    "OrtApiBase",
    "OrtApi",
    "OrtEpApi",
    "OrtCustomOp",
    "OrtNodeFusionOptions",
    "OrtNodeComputeInfo",
    "OrtEp",
    "OrtEpFactory",
)
ENUMS = (
    "OrtErrorCode",
    "ONNXTensorElementDataType",
    "OrtCustomOpInputOutputCharacteristic",
    "OrtAllocatorType",
    "OrtMemType",
    "OrtLoggingLevel",
    "ONNXType",
    "OrtOpAttrType",
    "OrtHardwareDeviceType",
)


@dataclass(frozen=True)
class Member:
    """A member of a struct of ONNX Runtime, a constant of an enum, or the type of a function that it calls."""

    owner: str
    """The struct or the enum; `typedef` for the type of a function."""
    name: str
    slot: int
    """The number of the member; the value of a constant."""
    signature: str
    """`OrtStatus*(const OrtValue*, size_t*)`, the type of a field that is no function, or empty for a constant."""


# How C declarations are read.

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ANNOTATION = re.compile(
    r"\b(_[A-Z][A-Za-z_]*_(\([^()]*\))?|NO_EXCEPTION|ORT_ALL_ARGS_NONNULL|ORT_API_CALL|struct|enum)(?!\w)"
)
FUNCTION = re.compile(r"(.+?)\( ?\* ?(\w*) ?\) ?\((.*)\)")


def declared(text: str) -> tuple[str, str]:
    """The name and the type of what a C declaration without its semicolon declares."""
    text = bare(text)
    if function := FUNCTION.fullmatch(text):
        result, name, parameters = function.groups()
        return name, f"{spelled(result)}{types(parameters)}"
    if field := re.fullmatch(r"(.+?)(\w+)", text):
        return field[2], spelled(field[1])
    raise ValueError(f"not understood: {text}")


def types(parameters: str) -> str:
    """The types of a function's parameters, in parentheses."""
    parts = re.split(r",(?![^(]*\))", parameters)  # not between the parameters of a parameter
    return "()" if parts in (["void"], [""]) else f"({', '.join(map(parameter, parts))})"


def parameter(text: str) -> str:
    """The type of a parameter, whose declaration may have a name."""
    text = bare(text)
    if function := FUNCTION.fullmatch(text):
        result, _, parameters = function.groups()
        return f"{spelled(result)}(*){types(parameters)}"
    words = re.findall(r"[\w:]+", text.replace("const", ""))
    named = re.fullmatch(r"(.*?)(\w+)(\[\])?", text)
    return spelled(f"{named[1]}{named[3] or ''}" if named and len(words) > 1 else text)


def bare(text: str) -> str:
    """A declaration without annotations, on one line."""
    return " ".join(ANNOTATION.sub("", text).split())


def spelled(kind: str) -> str:
    """A type with the spaces of `const char* const*`."""
    kind = re.sub(r"\bOrtStatusPtr\b", "OrtStatus*", kind.replace("[]", "*"))
    return re.sub(r" ?\* ?", "* ", " ".join(kind.split())).replace("* *", "**").strip()


# ONNX Runtime's headers.

MACROS = (
    (re.compile(r"ORT_API2_STATUS\((\w+), (.*)\)"), r"OrtStatus*(* \1)(\2)"),
    (re.compile(r"ORT_API_T\(([^,]+), (\w+), (.*)\)"), r"\1(* \2)(\3)"),
    (re.compile(r"ORT_CLASS_RELEASE\((\w+)\)"), r"void(* Release\1)(Ort\1*)"),
)


def release_of(text: str) -> int:
    """The release that a header belongs to: 29 for 1.29."""
    return int(re.findall(r"#define ORT_API_VERSION (\d+)", text)[0])


def members(text: str) -> list[Member]:
    """What the headers of a release declare; `text` is all of them, one after the other."""
    text = COMMENT.sub("", text)
    found: list[Member] = []
    for struct in STRUCTS:
        for body in re.findall(rf"^struct {struct} \{{(.*?)^\}};", text, re.MULTILINE | re.DOTALL):
            names = [declared(expanded(statement)) for statement in statements(body)]
            found += [Member(struct, name, slot, signature) for slot, (name, signature) in enumerate(names)]
    for enum in ENUMS:
        for body in re.findall(rf"typedef enum {enum} \{{(.*?)\}}", text, re.DOTALL):
            found += [Member(enum, name, value, "") for name, value in constants(body).items()]
    for name in EXPORTS:
        for declaration in re.findall(rf"^typedef ([^;]*\* ?{name}\)[^;]*);", text, re.MULTILINE):
            found.append(Member("typedef", name, 0, declared(declaration)[1]))
    return found


def statements(body: str) -> list[str]:
    """The declarations of a struct, each on one line, without spaces inside its parentheses."""
    lines = (" ".join(part.split()) for part in body.split(";"))
    return [line.replace("( ", "(").replace(" )", ")") for line in lines if line]


def expanded(statement: str) -> str:
    """A declaration without ONNX Runtime's macros."""
    for macro, meaning in MACROS:
        if match := macro.fullmatch(statement):
            return match.expand(meaning)
    return statement


def constants(body: str) -> dict[str, int]:
    """The constants of an enum. One without a value is one more than the constant before it."""
    values: dict[str, int] = {}
    following = 0
    for constant in filter(None, (part.strip() for part in body.split(","))):
        name, _, value = (part.strip() for part in constant.partition("="))
        if value:
            following = values[value] if value in values else int(value, 0)
        values[name] = following
        following += 1
    return values


# The table: a row for each form of a member, with the first release that has it.

Interface = Mapping[tuple[str, str], Member]
"""What a release declares, by owner and name."""
COLUMNS = "owner\tslot\tname\tsignature\tsince"


def by_name(declarations: Sequence[Member]) -> Interface:
    return {(member.owner, member.name): member for member in declarations}


def read_table(text: str) -> dict[int, Interface]:
    """What each release declares whose headers the table was written from."""
    first, _, *rows = text.splitlines()
    releases = [int(minor) for minor in re.findall(r"1\.(\d+)", first)]
    interfaces: dict[int, dict[tuple[str, str], Member]] = {release: {} for release in releases}
    for row in sorted(rows, key=since_of):  # a later form of a member replaces the earlier one
        owner, slot, name, signature, _ = row.split("\t")
        for release in releases:
            if release >= since_of(row):
                interfaces[release][owner, name] = Member(owner, name, int(slot), signature)
    return dict(interfaces)


def since_of(row: str) -> int:
    """The release in the last column."""
    return int(row.rpartition("\t1.")[2])


def written_table(interfaces: Mapping[int, Interface]) -> str:
    """The table of these releases. A member that a later release has no more raises ValueError."""
    forms: list[tuple[int, Member]] = []
    before: Interface = {}
    for release, interface in sorted(interfaces.items()):
        if gone := before.keys() - interface.keys():
            raise ValueError(f"ONNX Runtime 1.{release} has no {', '.join(map('.'.join, sorted(gone)))}")
        forms += [(release, member) for key, member in interface.items() if before.get(key) != member]
        before = interface
    order = {owner: place for place, owner in enumerate((*STRUCTS, *ENUMS, "typedef"))}
    forms.sort(key=lambda form: (order[form[1].owner], form[1].slot, form[1].name, form[0]))
    rows = [f"{one.owner}\t{one.slot}\t{one.name}\t{one.signature}\t1.{since}" for since, one in forms]
    releases = " ".join(f"1.{release}" for release in sorted(interfaces))
    return "\n".join((f"# From the headers of ONNX Runtime {releases}", COLUMNS, *rows, ""))


# Our headers.

TYPES = {
    "OrtTensorTypeAndShapeInfo": "TensorInfo",
    "OrtEp": "Provider",
    "OrtEpFactory": "Factory",
    "OrtEpGraphSupportInfo": "GraphSupportInfo",
    "OrtDataTransferImpl": "DataTransfer",
    "OrtNodeFusionOptions": "FusionOptions",
    "ONNXTensorElementDataType": "Element",
    "OrtCustomOpInputOutputCharacteristic": "Characteristic",
    "OrtAllocatorType": "AllocatorKind",
    "OrtMemType": "MemoryType",
    "OrtLoggingLevel": "Severity",
    "ONNXType": "Kind",
    "OrtOpAttrType": "AttributeKind",
    "OrtHardwareDeviceType": "DeviceKind",
    "ORTCHAR_T": "PathChar",
}
"""Their name of a type -> ours. Other types lose their `Ort` only. `const OrtApi*`, the table itself, is `Api`."""

FIELDS = {
    "OrtApiBase": {"get_api": "GetApi", "version": "GetVersionString"},
    "OrtCustomOp": {
        "version": "version",
        "create": "CreateKernel",
        "name": "GetName",
        "execution_provider": "GetExecutionProviderType",
        "input_type": "GetInputType",
        "input_count": "GetInputTypeCount",
        "output_type": "GetOutputType",
        "output_count": "GetOutputTypeCount",
        "compute": "KernelCompute",
        "destroy": "KernelDestroy",
        "input_characteristic": "GetInputCharacteristic",
        "output_characteristic": "GetOutputCharacteristic",
        "input_memory_type": "GetInputMemoryType",
        "variadic_input_min_arity": "GetVariadicInputMinArity",
        "variadic_input_homogeneity": "GetVariadicInputHomogeneity",
        "variadic_output_min_arity": "GetVariadicOutputMinArity",
        "variadic_output_homogeneity": "GetVariadicOutputHomogeneity",
        "create_v2": "CreateKernelV2",
        "compute_v2": "KernelComputeV2",
        "infer_shapes": "InferOutputShapeFn",
        "first_version": "GetStartVersion",
        "last_version": "GetEndVersion",
        "may_inplace": "GetMayInplace",
        "release_may_inplace": "ReleaseMayInplace",
        "alias_map": "GetAliasMap",
        "release_alias_map": "ReleaseAliasMap",
    },
    "OrtNodeFusionOptions": {
        "version": "ort_version_supported",
        "drop_constant_initializers": "drop_constant_initializers",
    },
    "OrtNodeComputeInfo": {
        "version": "ort_version_supported",
        "create_state": "CreateState",
        "compute": "Compute",
        "release_state": "ReleaseState",
    },
    "OrtEp": {
        "version": "ort_version_supported",
        "name": "GetName",
        "get_capability": "GetCapability",
        "compile": "Compile",
        "release_node_compute_infos": "ReleaseNodeComputeInfos",
        "preferred_layout": "GetPreferredDataLayout",
        "should_convert_layout": "ShouldConvertDataLayoutForOp",
        "set_dynamic_options": "SetDynamicOptions",
        "on_run_start": "OnRunStart",
        "on_run_end": "OnRunEnd",
        "create_allocator": "CreateAllocator",
        "create_sync_stream": "CreateSyncStreamForDevice",
        "compiled_model_compatibility": "GetCompiledModelCompatibilityInfo",
    },
    "OrtEpFactory": {
        "version": "ort_version_supported",
        "name": "GetName",
        "vendor": "GetVendor",
        "supported_devices": "GetSupportedDevices",
        "create_provider": "CreateEp",
        "release_provider": "ReleaseEp",
        "vendor_id": "GetVendorId",
        "provider_version": "GetVersion",
        "validate_compatibility": "ValidateCompiledModelCompatibilityInfo",
        "create_allocator": "CreateAllocator",
        "release_allocator": "ReleaseAllocator",
        "create_data_transfer": "CreateDataTransfer",
        "is_stream_aware": "IsStreamAware",
        "create_sync_stream": "CreateSyncStreamForDevice",
        "incompatibility_details": "GetHardwareDeviceIncompatibilityDetails",
        "external_resource_importer": "CreateExternalResourceImporterForDevice",
        "domain_count": "GetNumCustomOpDomains",
        "domains": "GetCustomOpDomains",
    },
}
"""Our name of each field -> ONNX Runtime's, for the structs that we declare."""

CONSTANTS = {
    "OrtErrorCode": {
        "fail": "ORT_FAIL",
        "invalid_argument": "ORT_INVALID_ARGUMENT",
        "not_implemented": "ORT_NOT_IMPLEMENTED",
    },
    "ONNXTensorElementDataType": {
        "undefined": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED",
        "float32": "ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT",
        "uint8": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8",
        "int8": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8",
        "int32": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32",
        "int64": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64",
        "string": "ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING",
        "boolean": "ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL",
        "float16": "ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16",
        "uint64": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64",
        "bfloat16": "ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16",
    },
    "OrtCustomOpInputOutputCharacteristic": {"required": "INPUT_OUTPUT_REQUIRED", "optional": "INPUT_OUTPUT_OPTIONAL"},
    "OrtAllocatorType": {"device": "OrtDeviceAllocator"},
    "OrtMemType": {"standard": "OrtMemTypeDefault"},
    "OrtLoggingLevel": {
        "info": "ORT_LOGGING_LEVEL_INFO",
        "warning": "ORT_LOGGING_LEVEL_WARNING",
        "fatal": "ORT_LOGGING_LEVEL_FATAL",
    },
    "ONNXType": {
        "unknown": "ONNX_TYPE_UNKNOWN",
        "tensor": "ONNX_TYPE_TENSOR",
        "sequence": "ONNX_TYPE_SEQUENCE",
        "optional": "ONNX_TYPE_OPTIONAL",
    },
    "OrtOpAttrType": {
        "integer": "ORT_OP_ATTR_INT",
        "integers": "ORT_OP_ATTR_INTS",
        "number": "ORT_OP_ATTR_FLOAT",
        "numbers": "ORT_OP_ATTR_FLOATS",
        "string": "ORT_OP_ATTR_STRING",
        "strings": "ORT_OP_ATTR_STRINGS",
        "graph": "ORT_OP_ATTR_GRAPH",
        "tensor": "ORT_OP_ATTR_TENSOR",
    },
    "OrtHardwareDeviceType": {"cpu": "OrtHardwareDeviceType_CPU"},
}
"""Our name of each constant -> ONNX Runtime's, for the enums that we declare."""

PLACE = "void*"
"""The type of a field that stays null: it keeps the place of a function whose signature our header does not state."""


@dataclass(frozen=True)
class Declaration:
    """What one of our headers says of a member."""

    file: str
    ours: str
    """Our name, as C++ spells it in namespace ort: `Run`, `ep::Factory::vendor`, `ErrorCode::fail`."""
    owner: str
    name: str
    slot: int
    signature: str
    """With our names of the types."""
    since: int
    """The first release that has the member, as the header states it: by a comment, or for all members without one."""


def sources() -> dict[str, str]:
    """Our headers, and the sources that define what the library exports."""
    files = {*OURS, *(file for file, _ in EXPORTS.values())}
    return {file: (SOURCES / file).read_text(encoding="utf-8") for file in sorted(files)}


def oldest(texts: Mapping[str, str]) -> dict[str, int]:
    """For each of our headers, the release that has all its members without a comment."""
    library, provider = OURS
    return {
        library: int(re.findall(r"kApiVersion = (\d+);", texts[library])[0]),
        provider: int(re.findall(r"kFirstEpMinor = (\d+);", texts[provider])[0]),
    }


def declarations(texts: Mapping[str, str]) -> list[Declaration]:
    """All that our headers and the exported functions state of the interface."""
    found: list[Declaration] = []
    for file, release in oldest(texts).items():
        header = Header(file, texts[file], release)
        found += [*header.slots(), *header.fields(), *header.constants()]
    for name, (file, ours) in EXPORTS.items():
        (definition,) = re.findall(rf"(ort::Status\* {ours}\([^{{]*\)) \{{", texts[file])
        result, _, parameters = definition.partition(f" {ours}(")
        signature = declared(f"{result}(* {ours})({unqualified(parameters)}")[1]
        release = oldest(texts)[OURS["provider" in file]]
        found.append(Declaration(file, ours, "typedef", name, 0, unqualified(signature), release))
    return found


def unqualified(text: str) -> str:
    """Types without their namespace."""
    return re.sub(r"\b(ort|ep)::", "", text)


@dataclass(frozen=True)
class Header:
    """One of our headers. Its members exist since `oldest` where no comment says otherwise."""

    file: str
    text: str
    oldest: int

    @cached_property
    def code(self) -> str:
        """The text with spaces for comments, so that places in it are places in the text."""
        return COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment[0]), self.text)

    def slots(self) -> Iterator[Declaration]:
        """The functions: OrtApi's, and in namespace ep OrtEpApi's."""
        for slot in re.finditer(r"Slot<([^\n(]*)\(([^\n]*)\)> (\w+)\{(\d+)\};", self.code):
            result, parameters, name, number = slot.groups()
            before = self.code[: slot.start()]
            inside = before.rfind("namespace ep {") > before.rfind("\n}")
            owner, ours = ("OrtEpApi", f"ep::{name}") if inside else ("OrtApi", name)
            signature = declared(f"{result}(* {name})({parameters})")[1]
            yield Declaration(self.file, ours, owner, name, int(number), signature, self.since(slot.start()))

    def fields(self) -> Iterator[Declaration]:
        """The structs that the library fills, and the one that it is called with."""
        for owner, names in FIELDS.items():
            struct = translated(owner)
            scope = "ep::" if self.file == OURS[1] else ""
            for body in re.finditer(rf"^struct {struct} \{{(.*?)^\}};", self.code, re.MULTILINE | re.DOTALL):
                for slot, field in enumerate(re.finditer(r"\s*([^;]+);", body[1])):
                    name, signature = declared(field[1].partition(" = ")[0])
                    ours, theirs = f"{scope}{struct}::{name}", names.get(name, name)
                    since = self.since(body.start(1) + field.start(1))
                    yield Declaration(self.file, ours, owner, theirs, slot, signature, since)

    def constants(self) -> Iterator[Declaration]:
        """The enums."""
        for owner, names in CONSTANTS.items():
            enum = translated(owner)
            for body in re.findall(rf"^enum class {enum} : int \{{(.*?)\}}", self.code, re.MULTILINE | re.DOTALL):
                for name, value in constants(body).items():
                    ours, theirs = f"{enum}::{name}", names.get(name, name)
                    yield Declaration(self.file, ours, owner, theirs, value, "", self.oldest)

    def since(self, place: int) -> int:
        """The release that the comment above names: it holds for the lines below it up to an empty one or a comment."""
        for line in reversed(self.text[:place].splitlines()[:-1]):
            if release := re.match(r"\s*// Since 1\.(\d+)\.", line):
                return int(release[1])
            if not line.strip() or line.lstrip().startswith(("//", "}")):
                break
        return self.oldest


# Where both differ.


def compared(ours: Declaration, theirs: Interface, release: int) -> bool:
    """Whether a declaration has to hold in a release: from the release on that our header names.

    What the library declares also holds in older releases that have it; before 1.23 the provider's interface was
    another one.
    """
    exists = (ours.owner, ours.name) in theirs
    return ours.since <= release or (exists and not ours.file.startswith("provider/"))


def differences(ours: Sequence[Declaration], theirs: Interface, release: int) -> list[str]:
    """What is otherwise in a release than our headers say, a sentence for each."""
    at_slots = {(member.owner, member.slot): member.name for member in theirs.values() if member.signature}
    there = f"in ONNX Runtime 1.{release}"
    found: list[str] = []
    for one in ours:
        if not compared(one, theirs, release):
            continue
        member = theirs.get((one.owner, one.name))
        here = f"{one.file}: {one.ours} is {one.owner}.{one.name}"
        number = "slot" if one.signature else "value"
        other = at_slots.get((one.owner, one.slot), one.name)
        instead = f"; slot {one.slot} is {other} there" if other != one.name else ""
        if member is None:
            found.append(f"{here}, {number} {one.slot} here, which does not exist {there}{instead}")
        elif member.slot != one.slot:
            found.append(f"{here}, {number} {one.slot} here, but {number} {member.slot} {there}{instead}")
        elif one.signature not in (PLACE, translated(member.signature)):
            found.append(f"{here}, `{one.signature}` here, but `{member.signature}` {there}")
    return found


def translated(signature: str) -> str:
    """A signature of ONNX Runtime with our names of the types."""
    signature = re.sub(r"\bconst Ort(Ep)?Api\*", "Api", signature)
    return re.sub(r"\b(Ort|ONNX|ORT)\w+", lambda name: TYPES.get(name[0], name[0].removeprefix("Ort")), signature)
