"""The table of ONNX Runtime's own operators against the installed onnxruntime."""

from __future__ import annotations

import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from fa_compiler.op_registry.runtime_schemas import is_runtime_operator


@pytest.mark.skipif(not ort.__version__.startswith("1.32"), reason="the table is of onnxruntime 1.32")
def test_the_table_is_what_the_installed_runtime_has() -> None:
    since: dict[tuple[str, str], int] = {}
    for schema in ort_state.get_all_operator_schema():
        key = schema.domain, schema.name
        since[key] = min(schema.since_version, since.get(key, schema.since_version))
    assert ("com.microsoft", "Gelu") in since
    for (domain, name), version in since.items():
        assert is_runtime_operator(domain, name, version), (domain, name)
        assert not is_runtime_operator(domain, name, version - 1), (domain, name)


def test_other_names_and_older_versions_are_none() -> None:
    assert is_runtime_operator("", "Gelu", 20) and is_runtime_operator("ai.onnx", "Gelu", 21)
    assert not is_runtime_operator("", "Gelu", 19)
    assert not is_runtime_operator("com.microsoft", "Nope", 1)
    assert not is_runtime_operator("own", "Gelu", 1)
