"""The declared part of ONNX Runtime's C interface against a real header, for whoever has one.

    FA_COMPILER_ORT_HEADER=/path/to/onnxruntime_c_api.h pytest tests/lowering/test_abi.py

The onnxruntime wheels carry no header; the wheel of amd-quark has one. Without the variable the test is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fa_compiler.lowering.ort import descriptors

HEADER = os.environ.get("FA_COMPILER_ORT_HEADER", "")
ABI = descriptors.PATH.with_name("ort_abi.hpp")

FIELDS = {
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
    "create_v2": "CreateKernelV2",
    "compute_v2": "KernelComputeV2",
    "infer_shapes": "InferOutputShapeFn",
    "last_version": "GetEndVersion",
    "release_alias_map": "ReleaseAliasMap",
}


@pytest.mark.skipif(not HEADER, reason="FA_COMPILER_ORT_HEADER names no header")
def test_slots_fields_and_numbers(tmp_path: Path) -> None:
    text = Path(HEADER).read_text()
    slots = re.findall(r"Slot<.*> (\w+)\{(\d+)\};", ABI.read_text())
    assert len(slots) > 25
    # KernelInfoGetAllocator is written KernelInfoGetAllocator in the header, too; all names are the header's.
    checks = [
        f"static_assert(offsetof(OrtApi, {name}) == {index} * sizeof(void*));"
        for name, index in slots
        if re.search(rf"\b{name}\b", text)
    ]
    checks += [
        f"static_assert(offsetof(ort::CustomOp, {own}) == offsetof(OrtCustomOp, {theirs}));"
        for own, theirs in FIELDS.items()
        if re.search(rf"\b{theirs}\b", text)
    ]
    checks += [
        f"static_assert(int(ort::Element::{own}) == ONNX_TENSOR_ELEMENT_DATA_TYPE_{theirs});"
        for own, theirs in {
            "float32": "FLOAT",
            "uint8": "UINT8",
            "int64": "INT64",
            "boolean": "BOOL",
            "float16": "FLOAT16",
            "bfloat16": "BFLOAT16",
        }.items()
    ]
    checks += [
        "static_assert(int(ort::ErrorCode::fail) == ORT_FAIL);",
        "static_assert(int(ort::ErrorCode::invalid_argument) == ORT_INVALID_ARGUMENT);",
        "static_assert(int(ort::ErrorCode::not_implemented) == ORT_NOT_IMPLEMENTED);",
        "static_assert(int(ort::Characteristic::optional) == INPUT_OUTPUT_OPTIONAL);",
    ]
    source = tmp_path / "abi.cc"
    source.write_text(f'#include "{HEADER}"\n#include "{ABI}"\n' + "\n".join(checks) + "\n")
    subprocess.run(["g++", "-std=c++20", "-Wno-invalid-offsetof", "-fsyntax-only", str(source)], check=True)
