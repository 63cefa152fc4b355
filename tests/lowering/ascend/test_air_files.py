"""Writing and reading `.air` files: what is read is what was written, and the bytes are what the loader wants."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fa_compiler.lowering.ascend.air import AirError, parse, read, serialise, write
from fa_compiler.lowering.ascend.air.check import check
from fa_compiler.lowering.ascend.air.schema import ListValue, ModelDef
from fa_compiler.lowering.ascend.graph import Attr, Model, Op, Output, TensorDesc, Weight
from tests.lowering.ascend.graphs import attention, branches, const, data


def same(left: Model, right: Model) -> bool:
    """Equal graphs, and equal bytes of every weight."""
    if left != right:
        return False
    pairs = [
        (a.attrs[name].value, b.attrs[name].value)
        for one, other in zip(left.graphs, right.graphs, strict=True)
        for a, b in zip(one.ops, other.ops, strict=True)
        for name in a.attrs
    ]
    return all(a.load() == b.load() for a, b in pairs if isinstance(a, Weight) and isinstance(b, Weight))


def padded(model: Model) -> Model:
    """Inputs as the reader gives them: one entry for every descriptor."""
    for graph in model.graphs:
        for op in graph.ops:
            op.inputs += [None] * (len(op.input_descs) - len(op.inputs))
    return model


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    for model in (attention(), branches()):
        place = tmp_path / f"{model.name}.air"
        assert write(model, place) == [place]
        again = read(place)
        for graph in again.graphs:
            for op in graph.of_type("Data"):
                op.attrs.pop("_parent_node_index", None)
        assert same(padded(model), again)
        assert check(place) == []


def test_the_bytes_of_an_operator() -> None:
    proto = ModelDef.FromString(serialise(attention())[0])
    fused = next(op for op in proto.graph[0].op if op.name == "attn")
    assert list(fused.input) == ["q:0", "k:0", "v:0", "", "", "", "mask:0"]
    names = fused.attr["_input_name_key"].list
    assert [name.decode() for name in names.s][3:] == ["real_shift", "drop_mask", "padding_mask", "atten_mask"]
    assert names.val_type == ListValue.VT_LIST_STRING
    places = fused.attr["_input_name_value"].list
    assert (list(places.i), places.val_type) == ([*range(7)], ListValue.VT_LIST_INT)
    assert [(desc.dtype, desc.layout) for desc in fused.input_desc] == [(2, "ND")] * 3 + [(0, "")] * 3 + [(11, "ND")]
    assert fused.attr["head_num"].i == 12
    assert fused.attr["input_layout"].s == b"BNSD"
    assert fused.attr["scale_value"].WhichOneof("value") == "f"
    # What GE computes by itself is left out.
    assert not fused.id
    assert not fused.is_input_const
    assert not [name for name in fused.attr if name.startswith("_ir_")]


def test_types_are_numbered_twice(tmp_path: Path) -> None:
    model = attention()
    model.root.ops.append(
        Op(
            "typed",
            "Cast",
            [Output("q")],
            [TensorDesc("x", "DT_FLOAT16", (1, 12, 128, 64))],
            [TensorDesc("y", "DT_INT32", (1, 12, 128, 64))],
            {"dst_type": Attr("Int", 3), "other": Attr("Type", "DT_INT32"), "more": Attr("ListType", ("DT_DOUBLE",))},
        )
    )
    proto = ModelDef.FromString(serialise(model)[0])
    cast = proto.graph[0].op[-1]
    assert (cast.output_desc[0].dtype, cast.attr["other"].dt, list(cast.attr["more"].list.dt)) == (7, 3, [11])


def test_every_list_has_its_kind() -> None:
    model = attention()
    lists = {
        "ListInt": (1, -2),
        "ListFloat": (0.5,),
        "ListBool": (True, False),
        "ListString": ("a", ""),
        "ListType": ("DT_BF16",),
        "ListListInt": ((1, 2), ()),
        "ListListFloat": ((0.5,),),
    }
    attrs = model.root.ops[-2].attrs
    for kind, value in lists.items():
        attrs[kind], attrs[f"{kind}_empty"] = Attr(kind, value), Attr(kind, ())
    again = next(op for op in parse(serialise(model)[0]).root.ops if op.name == "attn")
    assert again.attrs == attrs


def test_branches_say_what_they_stand_for() -> None:
    proto = ModelDef.FromString(serialise(branches())[0])
    choice = next(op for op in proto.graph[0].op if op.name == "choice")
    assert list(choice.subgraph_name) == ["negated", "kept"]
    for graph in proto.graph[1:]:
        assert graph.op[0].attr["_parent_node_index"].i == 1
        assert graph.op[-1].input_desc[0].attr["_parent_node_index"].i == 0


def test_open_shapes_and_their_ranges() -> None:
    model = attention()
    model.root.ops[0] = data("q", 0, shape=(-1, 12, -1, 64), ranges=((1, 8), (12, 12), (1, -1), (64, 64)))
    model.root.ops[1] = data("k", 1, shape=None)
    again = parse(serialise(model)[0]).root.ops
    assert [op.output_descs[0].shape for op in again[:2]] == [(-1, 12, -1, 64), None]
    assert again[0].output_descs[0].ranges == ((1, 8), (12, 12), (1, -1), (64, 64))


def test_large_weights_go_beside_the_file(tmp_path: Path) -> None:
    model = attention()
    model.root.ops += [
        const("layer/0", np.arange(4096, dtype=np.float32), "DT_FLOAT"),
        const("layer.0", np.arange(4096, dtype=np.float32)[::-1], "DT_FLOAT"),
        const("small", np.arange(4, dtype=np.int64), "DT_INT64"),
    ]
    place = tmp_path / "model.air"
    files = write(model, place, inline_limit=1000)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "model.air",
        "air_weight/fas/Const_fas_graph_mask_file",
        "air_weight/fas/Const_fas_graph_layer_0_file",
        "air_weight/fas/Const_fas_graph_layer.0_file",
    ]
    assert place.stat().st_size < 5000
    assert same(padded(model), read(place))
    assert check(place) == []


def test_two_constants_never_share_a_file(tmp_path: Path) -> None:
    model = attention()
    model.root.ops += [
        const("a/b", np.zeros(4096, np.float32), "DT_FLOAT"),
        const("a_b", np.ones(4096, np.float32), "DT_FLOAT"),
    ]
    write(model, tmp_path / "model.air", inline_limit=0)
    assert same(padded(model), read(tmp_path / "model.air"))


def test_a_missing_or_cut_weight_file_is_told(tmp_path: Path) -> None:
    place = tmp_path / "model.air"
    files = write(attention(), place, inline_limit=0)
    files[1].write_bytes(b"short")
    assert "has 5 bytes, the .air says 16384" in str(check(place)[0])
    weight = read(place).root.ops[3].attrs["value"].value
    assert isinstance(weight, Weight)
    with pytest.raises(AirError, match="has 5 bytes"):
        weight.load()
    files[1].unlink()
    with pytest.raises(AirError, match="mask: the file of its data"):
        read(place)
    assert [finding.rule for finding in check(place)] == ["weight-file"]


def test_a_graph_too_large_for_a_message_writes_nothing() -> None:
    with pytest.raises(AirError, match=r"fas takes \d+ bytes even without its weights.*split the model"):
        serialise(attention(), inline_limit=0, message_limit=500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda op: op.attrs.update(head_num=Attr("Int", 1 << 70)), "attn .* head_num"),
        (lambda op: op.attrs.update(head_num=Attr("Int", True)), "attn .* head_num is True, which is not a Int"),
        (lambda op: op.attrs.update(scale_value=Attr("Float", "x")), "scale_value is 'x', which is not a Float"),
        (lambda op: op.attrs.update(odd=Attr("ListInt", "12")), "odd is '12', which is not a ListInt"),
        (lambda op: op.attrs.update(odd=Attr("Type", "DT_NONE")), "odd is 'DT_NONE', which is not a Type"),
        (lambda op: op.output_descs.append(TensorDesc("more", "DT_NONE")), "more has the type DT_NONE"),
        (lambda op: op.inputs.__setitem__(0, Output("nobody")), "attn: input 'nobody:0' comes from an operator that"),
        (lambda op: op.subgraphs.update(body="nowhere"), "attn: its subgraph 'nowhere' is not in the file"),
    ],
)
def test_what_no_file_can_hold_is_one_clear_error(change, message: str) -> None:  # type: ignore[no-untyped-def]
    model = attention()
    change(next(op for op in model.root.ops if op.name == "attn"))
    with pytest.raises(AirError, match=message) as caught:
        serialise(model)
    assert "\n" not in str(caught.value)


def test_a_file_too_large_to_load_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "model.air"
    place.touch()
    os.truncate(place, (1 << 31) + 5)
    with pytest.raises(AirError, match="model.air has 2147483653 bytes, more than the 2 GiB that GE can load"):
        read(place)
    assert [finding.rule for finding in check(place)] == ["not-air"]
