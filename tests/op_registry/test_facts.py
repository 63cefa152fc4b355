"""The operators' facts, their variants, and how one is chosen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fa_compiler.op_registry import Kind, OpSpec, UnknownOp, UnknownVariant, get, names, operator, variants
from fa_compiler.op_registry.commands import facts, list_ops, show
from fa_compiler.op_registry.dtypes import lookup
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.reg_op import print_op
from fa_compiler.op_registry.spec import ATTR_TYPES

EVERY = [variant for name in names() for variant in variants(name)]

SEED = """\
REG_OP(FlashAttentionScore)
    .INPUT(query, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .INPUT(key, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .INPUT(value, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .OPTIONAL_INPUT(real_shift, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .OPTIONAL_INPUT(drop_mask, TensorType({DT_UINT8}))
    .OPTIONAL_INPUT(padding_mask, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .OPTIONAL_INPUT(atten_mask, TensorType({DT_BOOL, DT_UINT8}))
    .OPTIONAL_INPUT(prefix, TensorType({DT_INT64}))
    .OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))
    .OPTIONAL_INPUT(actual_seq_kvlen, TensorType({DT_INT64}))
    .OPTIONAL_INPUT(q_start_idx, TensorType({DT_INT64}))
    .OPTIONAL_INPUT(kv_start_idx, TensorType({DT_INT64}))
    .OUTPUT(softmax_max, TensorType({DT_FLOAT32}))
    .OUTPUT(softmax_sum, TensorType({DT_FLOAT32}))
    .OUTPUT(softmax_out, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .OUTPUT(attention_out, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT32}))
    .ATTR(scale_value, Float, 1.0)
    .ATTR(keep_prob, Float, 1.0)
    .ATTR(pre_tockens, Int, 2147483647)
    .ATTR(next_tockens, Int, 2147483647)
    .REQUIRED_ATTR(head_num, Int)
    .REQUIRED_ATTR(input_layout, String)
    .ATTR(inner_precise, Int, 0)
    .ATTR(sparse_mode, Int, 0)
    .ATTR(pse_type, Int, 1)
    .OP_END_FACTORY_REG(FlashAttentionScore)"""


def test_the_operators_are_listed_by_name() -> None:
    assert names() == tuple(sorted(names()))
    assert [spec.name for spec in list_ops()] == list(names())


def test_show_prints_the_document_at_its_version_and_the_newest_without() -> None:
    assert show("FlashAttentionScore", cann="8.0") == SEED
    newest = show("FlashAttentionScore")
    assert newest == print_op(get("FlashAttentionScore"))
    assert ".OPTIONAL_INPUT(p_scale, TensorType({DT_FLOAT32}))\n    .OUTPUT" in newest
    assert '.ATTR(softmax_out_layout, String, "")\n' in newest


@pytest.mark.parametrize(
    ("cann", "variant", "inputs"),
    [
        ("8.0", "seed_v2_cann8", 12),
        ("8.0.RC2", "seed_v2_cann8", 12),
        ("8.0.RC3.alpha003", "seed_v2_cann8", 12),
        ("8.0.T13", "seed_v2_cann8", 12),
        ("CANN 8.2.RC1", "seed_v2_cann8", 12),
        ("8.5.0.alpha001", "opdef_2025_11", 17),
        ("8.5.0-beta.1", "opdef_2025_12", 18),
        ("8.5", "opdef_2025_12", 18),
        ("9.0.0", "proto_2026", 19),
        ("9.1.0-beta.2", "proto_2026", 19),
        (None, "proto_2026", 19),
        ("opdef_2025_11", "opdef_2025_11", 17),
        ("intermediate_proto_conflict", "intermediate_proto_conflict", 18),
        ("torchair_raw_ops", "torchair_raw_ops", 12),
        ("experiment_ops_oldest", "experiment_ops_oldest", 7),
    ],
)
def test_a_version_or_a_name_chooses_the_variant(cann: str | None, variant: str, inputs: int) -> None:
    spec = get("FlashAttentionScore", cann)
    assert (spec.variant, len(spec.inputs)) == (variant, inputs)


def test_unknown_operators_and_versions_are_refused_with_a_hint() -> None:
    with pytest.raises(UnknownOp, match="did you mean 'FlashAttentionScore'"):
        get("FlashAttention")
    with pytest.raises(UnknownOp, match="did you mean 'FlashAttentionScore'"):
        get("FlashAttentionScores")
    with pytest.raises(UnknownVariant, match=r"is known for CANN 7.0; the first is of CANN 8.0$"):
        get("FlashAttentionScore", "7.0")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("10", ", did you mean '10.0'?"),
        ("v9.0", ", did you mean '9.0'?"),
        ("8,5,0", ", did you mean '8.5.0'?"),
        ("8.5.0.1", ", did you mean '8.5.0'?"),
        ("proto_2025", ", did you mean 'proto_2026'?"),
        ("newest", "; `fa-compiler registry show FlashAttentionScore` lists them"),
        ("", "; `fa-compiler registry show FlashAttentionScore` lists them"),
    ],
)
def test_a_text_that_is_no_version_is_refused_with_what_was_meant(given: str, told: str) -> None:
    with pytest.raises(UnknownVariant) as refused:
        get("FlashAttentionScore", given)
    sentence = "is neither a CANN version such as 8.5.0 nor a variant of FlashAttentionScore"
    assert str(refused.value) == f"{given!r} {sentence}{told}"


def test_inputs_moved_between_variants_so_position_means_nothing() -> None:
    conflict, newest = get("FlashAttentionScore", "intermediate_proto_conflict"), get("FlashAttentionScore")
    assert conflict.input_names.index("query_rope") == 16
    assert newest.input_names.index("query_rope") == 15
    old, new = get("SparseFlashAttentionGrad"), get("SparseFlashAttentionGrad", "opdef_2026_reordered")
    assert old.input_names.index("value") == 2
    assert new.input_names.index("value") == 8
    assert new.input("value").kind is Kind.OPTIONAL


def test_since_tells_the_variant_an_input_came_with() -> None:
    spec = get("FlashAttentionScore")
    since = {entry.name: entry.since for entry in spec.inputs}
    assert since["query"] == "experiment_ops_oldest"
    assert since["actual_seq_qlen"] == "torchair_raw_ops"
    assert since["query_rope"] == "opdef_2025_11"
    assert since["sink"] == "opdef_2025_12"
    assert since["p_scale"] == "proto_2026"
    assert spec.attr("pse_type").since == "seed_v2_cann8"
    assert [entry.name for entry in spec.inputs if entry.value_depend] == [
        "prefix",
        "actual_seq_qlen",
        "actual_seq_kvlen",
        "q_start_idx",
        "kv_start_idx",
    ]


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{spec.name}-{spec.variant}")
def test_every_variant_is_complete(spec: OpSpec) -> None:
    assert spec.sources
    assert all(source.strip() and not source.startswith("/") for source in spec.sources)
    assert len(set(spec.input_names)) == len(spec.inputs) >= 1
    assert len(set(spec.output_names)) == len(spec.outputs) >= 1
    assert len(set(spec.attr_names)) == len(spec.attrs)
    for entry in (*spec.inputs, *spec.outputs):
        assert entry.dtypes
        assert all(lookup(dtype).ge == dtype for dtype in entry.dtypes)
    for attr in spec.attrs:
        assert attr.type in ATTR_TYPES
        assert attr.required == (attr.default is None) == (attr.written is None)


OWN = ("FlashLinearAttention", "ShortConvolution")
"""The operators that Ascend does not have."""


@pytest.mark.parametrize("name", names())
def test_products_restrict_known_tensors_to_known_types(name: str) -> None:
    spec = get(name)
    assert bool(spec.products) == operator(name).of_ascend == (name not in OWN)
    for product in spec.products:
        for row in product.combinations():
            assert set(row) <= {*spec.input_names, *spec.output_names}
            assert all(lookup(dtype).ge == dtype for dtype in row.values())
        assert len({tuple(row.items()) for row in product.combinations()}) == len(product.rows)


def test_the_combinations_of_flash_attention_score_on_a2() -> None:
    product = get("FlashAttentionScore").product("ascend910b")
    assert product is not None
    rows = {(row["query"], row["real_shift"], row["atten_mask"]) for row in product.combinations()}
    halves = {(q, s, m) for q in ("DT_FLOAT16", "DT_BF16") for s in (q, "DT_FLOAT") for m in ("DT_BOOL", "DT_UINT8")}
    assert rows == halves | {("DT_FLOAT", "DT_FLOAT", m) for m in ("DT_BOOL", "DT_UINT8")}
    assert product.types_of("attention_out") == ("DT_FLOAT16", "DT_BF16", "DT_FLOAT")
    assert product.types_of("drop_mask") is None
    assert get("FlashAttentionScore").product("ascend310p") is None


def test_a_default_the_header_and_the_definition_disagree_about() -> None:
    heads = get("IncreFlashAttention").attr("num_key_value_heads")
    assert (heads.default, heads.value_if_absent) == (1, 0)
    assert get("PromptFlashAttention").attr("pre_tokens").default == 214748647
    assert get("FlashAttentionScoreGrad").attr("seed").default == 0
    assert get("FlashAttentionScoreGrad", "8.5").attr("seed").default == 2
    assert get("LightningIndexerGrad").attr_names[-1] == "determinstic"


def test_facts_name_variant_sources_and_products() -> None:
    labels = [label for label, _ in facts("FlashAttentionScore")]
    assert labels == ["variant", *["source"] * 3, "read while compiling", *["registered for"] * 2, "variants"]
    assert ("variant", "seed_v2_cann8, from CANN 8.0") in facts("FlashAttentionScore", "8.0")
    alone = ("registered for", "ascend910b, ascend910_93: 1 combination of types")
    assert alone in facts("ChunkGatedDeltaRule", "9.1.0-beta.1")


def test_a_mistake_in_an_operator_file_is_noticed() -> None:
    draft = REG_OP("Op", "v1", source="here").INPUT("x", "DT_FLOAT").OUTPUT("y", "DT_FLOAT")
    with pytest.raises(ValueError, match="unknown GE data type 'DT_FLAOT'"):
        draft.INPUT("z", "DT_FLAOT")
    with pytest.raises(ValueError, match="nothing to drop"):
        draft.DROP("z")
    with pytest.raises(ValueError, match="name each input once"):
        draft.INPUT_ORDER("x x")
    with pytest.raises(ValueError, match="has the wrong length"):
        draft.PRODUCT("ascend910b", "x y\nFLOAT")
    with pytest.raises(ValueError, match="no output 'z'"):
        draft.PRODUCT("ascend910b", "x=z\nFLOAT")


def test_the_registry_stays_light() -> None:
    heavy = "onnxruntime onnx_ir fa_compiler.passes fa_compiler.lowering"
    code = f"import sys, fa_compiler.op_registry; print([m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_python_without_docstrings() -> None:
    """`python -OO` keeps none, and images of containers may set PYTHONOPTIMIZE=2. A rule then has its name only."""
    program = "from fa_compiler.op_registry.documentation import constraints; print(*constraints('RmsNorm')[0])"
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("RN.1 types.", "")
