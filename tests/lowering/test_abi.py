"""The declared part of ONNX Runtime's C interface against what the headers of its releases say (abi_slots.tsv)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lowering import abi
from tests.systems import SOURCES

pytestmark = SOURCES

ORT, EP = abi.OURS
TABLE = abi.read_table(abi.TABLE.read_text(encoding="utf-8"))
NEWEST = max(TABLE)
FIRST = {key: min(release for release in TABLE if key in TABLE[release]) for key in TABLE[NEWEST]}
"""The first release of the table that has a member."""


def test_declarations_are_those_of_each_release() -> None:
    ours = abi.declarations(abi.sources())
    assert [fault for release, theirs in TABLE.items() for fault in abi.differences(ours, theirs, release)] == []


def test_slots_of_the_program_without_python_are_those_of_each_release() -> None:
    text = (Path(__file__).parents[1] / "face" / "plan_host.cc").read_text(encoding="utf-8")
    slots = list(abi.Header("plan_host.cc", abi.unqualified(text), min(TABLE)).slots())
    assert len(slots) == text.count("constexpr Slot<")
    assert abi.differences(slots, TABLE[NEWEST], NEWEST) == []


def test_everything_that_is_declared_is_compared() -> None:
    texts = abi.sources()
    declarations = abi.declarations(texts)
    slots = [one for one in declarations if one.owner in ("OrtApi", "OrtEpApi")]
    fields = {owner: [one for one in declarations if one.owner == owner] for owner in abi.STRUCTS}
    assert len(slots) == sum(text.count("inline constexpr Slot<") for text in texts.values())
    assert {owner: len(ours) for owner, ours in fields.items() if owner not in ("OrtApi", "OrtEpApi")} == {
        "OrtApiBase": 2,
        "OrtCustomOp": 26,
        "OrtNodeFusionOptions": 2,
        "OrtNodeComputeInfo": 4,
        "OrtEp": 13,
        "OrtEpFactory": 18,
    }
    enums = re.findall(r"^enum class (\w+)", texts[ORT] + texts[EP], re.MULTILINE)
    assert sorted(enums) == sorted(map(abi.translated, abi.CONSTANTS))
    assert sum(one.owner in abi.ENUMS for one in declarations) == sum(map(len, abi.CONSTANTS.values()))
    assert sum(one.owner == "typedef" for one in declarations) == len(abi.EXPORTS)


def test_the_headers_state_the_first_release() -> None:
    texts = abi.sources()
    for file, release in abi.oldest(texts).items():
        ours = [one for one in abi.declarations(texts) if one.file == file]
        first = {one.ours: FIRST[one.owner, one.name] for one in ours}
        assert {one.ours: one.since for one in ours if one.since != release} == {
            one: since for one, since in first.items() if since > release
        }
        assert max(since for since in first.values() if since <= release) == release


def test_the_table_reads_as_it_was_written() -> None:
    assert abi.written_table(TABLE) == abi.TABLE.read_text(encoding="utf-8")


def test_releases_only_append() -> None:
    """The table's first releases rise from slot to slot, and no slot is left out."""
    for struct in abi.STRUCTS:
        members = sorted(
            (member for member in TABLE[NEWEST].values() if member.owner == struct), key=lambda one: one.slot
        )
        since = [FIRST[struct, member.name] for member in members]
        assert [member.slot for member in members] == list(range(len(members)))
        assert since == sorted(since)


EDITS = {
    "another slot": (ORT, r"ReleaseStatus\{93\}", "ReleaseStatus{92}", "slot 92 here, but slot 93"),
    "another slot of the provider's table": (
        EP,
        r"AddNodesToFuse\{2\}",
        "AddNodesToFuse{3}",
        "slot 3 here, but slot 2",
    ),
    "two slots of one signature": (
        ORT,
        r"InputCount\{230\};\n(.*)OutputCount\{231\}",
        r"InputCount{231};\n\1OutputCount{230}",
        "slot 231 is KernelInfo_GetOutputCount there",
    ),
    "another type of a parameter": (
        EP,
        r"int64_t\*\)> Graph_GetOnnxIRVersion",
        "int*)> Graph_GetOnnxIRVersion",
        "`Status*",
    ),
    "a parameter less": (ORT, r", size_t\)> GetDimensions\{", ")> GetDimensions{", "`OrtStatus*(const OrtTensorType"),
    "a const less": (ORT, r"const Value\*\*\)> KernelContext_GetInput", "Value**)> KernelContext_GetInput", "`Status*"),
    "another result": (EP, r"void\(Env\*\)", "Status*(Env*)", "`Status*(Env*)` here, but `void(OrtEnv*)`"),
    "another name": (EP, r"> IsTensor\{", "> IsTensors{", "slot 50 is IsTensor there"),
    "two fields": (
        ORT,
        r"(  size_t \(\*input_count\).*\n)(.*\n)(.*\n)",
        r"\3\2\1",
        "OrtCustomOp.GetInputTypeCount, slot 7 here, but slot 5",
    ),
    "two fields that stay null": (
        EP,
        r"(  void\* preferred_layout.*\n)(.*\n)",
        r"\2\1",
        "OrtEp.GetPreferredDataLayout, slot 6 here, but slot 5",
    ),
    "a field less": (EP, r"  void\* validate_compatibility.*\n", "", "OrtEpFactory.GetCustomOpDomains, slot 16 here"),
    "another type of a field's parameter": (
        EP,
        r"const RunOptions\*, bool synchronise",
        "const RunOptions*, int",
        "`Status*",
    ),
    "another constant": (ORT, "boolean = 9", "boolean = 10", "ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, value 10 here"),
    "another exported function": (
        "provider/provider.cc",
        "factories, size_t most",
        "factories, int most",
        "typedef.CreateEpApiFactoriesFn",
    ),
}
"""A file, a regular expression for a text in it, what takes its place, and what is then said."""


@pytest.mark.parametrize("edit", EDITS)
def test_a_wrong_declaration_is_found(edit: str) -> None:
    file, old, new, sentence = EDITS[edit]
    texts = abi.sources()
    edited, count = re.subn(old, new, texts[file])
    assert count == 1
    found = abi.differences(abi.declarations({**texts, file: edited}), TABLE[NEWEST], NEWEST)
    assert any(sentence in one for one in found), found


def test_a_release_that_moves_a_slot_is_found() -> None:
    moved = {
        key: abi.Member(
            member.owner, member.name, member.slot + (member.owner == "OrtApi" and member.slot >= 414), member.signature
        )
        for key, member in TABLE[NEWEST].items()
    }
    assert abi.differences(abi.declarations(abi.sources()), moved, NEWEST + 1) == [
        "ort_abi.hpp: GetTensorElementTypeAndShapeDataReference is OrtApi.GetTensorElementTypeAndShapeDataReference, "
        f"slot 414 here, but slot 415 in ONNX Runtime 1.{NEWEST + 1}"
    ]


def test_headers_are_read_in_all_their_forms() -> None:
    text = """
#define ORT_API_VERSION 99
typedef enum OrtMemType {
  OrtMemTypeCPUInput = -2,  // a comment, with a comma
  OrtMemTypeCPUOutput,
  OrtMemTypeCPU = OrtMemTypeCPUOutput,
} OrtMemType;
typedef OrtStatus*(ORT_API_CALL* RegisterCustomOpsFn)(OrtSessionOptions* options, const OrtApiBase* api);
struct OrtApi {
  /** Text; with a semicolon. */
  const char*(ORT_API_CALL* GetBuildInfoString)(void)NO_EXCEPTION ORT_ALL_ARGS_NONNULL;
  ORT_API2_STATUS(GetShape, _In_ const OrtInfo* info, _Out_writes_all_(n) const char* names[], size_t n);
  ORT_CLASS_RELEASE(Env);
  ORT_API_T(bool, HasShape,
            _In_ const OrtInfo* info);
  OrtStatusPtr(ORT_API_CALL* ForEach)(_In_ void (*fn)(void*, size_t), enum OrtMemType, const char* const* keys);
};
struct OrtNodeFusionOptions {
  uint32_t ort_version_supported;
  bool drop_constant_initializers;
};
"""
    assert abi.release_of(text) == 99
    assert [(member.owner, member.slot, member.name, member.signature) for member in abi.members(text)] == [
        ("OrtApi", 0, "GetBuildInfoString", "const char*()"),
        ("OrtApi", 1, "GetShape", "OrtStatus*(const OrtInfo*, const char**, size_t)"),
        ("OrtApi", 2, "ReleaseEnv", "void(OrtEnv*)"),
        ("OrtApi", 3, "HasShape", "bool(const OrtInfo*)"),
        ("OrtApi", 4, "ForEach", "OrtStatus*(void(*)(void*, size_t), OrtMemType, const char* const*)"),
        ("OrtNodeFusionOptions", 0, "ort_version_supported", "uint32_t"),
        ("OrtNodeFusionOptions", 1, "drop_constant_initializers", "bool"),
        ("OrtMemType", -2, "OrtMemTypeCPUInput", ""),
        ("OrtMemType", -1, "OrtMemTypeCPUOutput", ""),
        ("OrtMemType", -1, "OrtMemTypeCPU", ""),
        ("typedef", 0, "RegisterCustomOpsFn", "OrtStatus*(OrtSessionOptions*, const OrtApiBase*)"),
    ]


def test_a_table_keeps_each_form_of_a_member_and_refuses_one_that_is_gone() -> None:
    older = abi.by_name([abi.Member("OrtApi", "Run", 0, "void()"), abi.Member("OrtApi", "Stop", 1, "void()")])
    newer = abi.by_name([abi.Member("OrtApi", "Run", 0, "void(int)"), abi.Member("OrtApi", "Stop", 1, "void()")])
    text = abi.written_table({30: older, 31: newer})
    assert text.splitlines()[2:] == [
        "OrtApi\t0\tRun\tvoid()\t1.30",
        "OrtApi\t0\tRun\tvoid(int)\t1.31",
        "OrtApi\t1\tStop\tvoid()\t1.30",
    ]
    assert abi.read_table(text) == {30: older, 31: newer}
    with pytest.raises(ValueError, match=r"1\.32 has no OrtApi\.Stop"):
        abi.written_table({31: newer, 32: abi.by_name([newer["OrtApi", "Run"]])})
