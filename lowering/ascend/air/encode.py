"""From a graph in memory to the message of an `.air` file.

The message holds only the fields that the loader needs: name maps on every operator, a kind on
every list, "" for an absent input, descriptors with layout and shape. The fields that GE computes
itself (ids, origin shapes, `_ir_*` names) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fa_compiler.lowering.ascend.air.schema import DATA_TYPE, LISTS, AttrDef, ModelDef, Proto
from fa_compiler.lowering.ascend.air.slots import PARENT_INDEX, first_passed, slot_names
from fa_compiler.lowering.ascend.diagnostic import AirError
from fa_compiler.lowering.ascend.dtypes import attr_number
from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Opaque, TensorDesc, Weight
from fa_compiler.op_registry.dtypes import canonical

UNKNOWN_RANK = -2
_TYPES = DATA_TYPE.values_by_name

Places = Mapping[int, str]
"""The files of the weights whose data are not in the message, by id() of the Weight."""


def encode(model: Model, places: Places | None = None) -> Proto:
    """The ModelDef of a graph. All weights are loaded except those that `places` puts into files.

    Raises:
        AirError: the message cannot hold an unknown type, a value that does not have its
            attribute's kind, or a number out of range. The text names the operator.
    """
    proto = ModelDef(name=model.name)
    parents = {
        name: op.type
        for graph in model.graphs
        for op in graph.ops
        for name in op.subgraphs.values()
    }
    for graph in model.graphs:
        _graph(proto.graph.add(), graph, parents.get(graph.name), places or {})
    return proto


def _graph(proto: Proto, graph: Graph, parent: str | None, places: Places) -> None:
    proto.name = graph.name
    for op in graph.ops:
        try:
            _op(proto.op.add(), op, places)
            if parent is not None:
                _parent_index(proto.op[-1], parent)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            detail = error.args[0] if isinstance(error, KeyError) else error
            raise AirError(f"{op.name} ({op.type}) cannot be written: {detail}") from error


def _op(proto: Proto, op: Op, places: Places) -> None:
    proto.name, proto.type = op.name, op.type
    linked = [("" if source is None else f"{source.op}:{source.index}") for source in op.inputs]
    while linked and not linked[-1]:
        linked.pop()
    proto.input.extend([*linked, *(f"{name}:-1" for name in op.controls)])
    for side, descs, protos in (
        ("input", op.input_descs, proto.input_desc),
        ("output", op.output_descs, proto.output_desc),
    ):
        for desc in descs:
            _desc(protos.add(), desc)
        _set_list(proto.attr[f"_{side}_name_key"], "ListString", [desc.name for desc in descs])
        _set_list(proto.attr[f"_{side}_name_value"], "ListInt", range(len(descs)))
    for name, attr in op.attrs.items():
        try:
            _attr(proto.attr[name], attr, places)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ValueError(
                f"its attribute {name} is {attr.value!r}, which is not a {attr.kind}"
            ) from error
        if isinstance(attr.value, Weight) and id(attr.value) in places:
            proto.attr["location"].s = places[id(attr.value)].encode()
            proto.attr["length"].i = attr.value.size
    wanted = slot_names(op.type, len(op.subgraphs))
    proto.subgraph_name.extend(
        op.subgraphs[name] for name in (wanted if set(wanted) == {*op.subgraphs} else op.subgraphs)
    )


def _desc(proto: Proto, desc: TensorDesc) -> None:
    if canonical(desc.dtype) not in _TYPES:
        raise ValueError(f"{desc.name} has the type {desc.dtype}, which GE does not have")
    proto.name, proto.layout = desc.name, desc.layout
    proto.dtype = _TYPES[canonical(desc.dtype)].number
    proto.shape.dim.extend([UNKNOWN_RANK] if desc.shape is None else desc.shape)
    if desc.ranges is not None:
        _attr(proto.attr["shape_range"], Attr("ListListInt", desc.ranges), {})


def _parent_index(proto: Proto, parent: str) -> None:
    """Set the index of the parent operator's input for a Data, or of its outputs for the inputs of
    a NetOutput."""
    if proto.type == "Data" and PARENT_INDEX not in proto.attr and "index" in proto.attr:
        proto.attr[PARENT_INDEX].i = first_passed(parent) + proto.attr["index"].i
    if proto.type == "NetOutput":
        for number, desc in enumerate(proto.input_desc):
            desc.attr[PARENT_INDEX].i = number


def _attr(proto: Proto, attr: Attr, places: Places) -> None:
    value = attr.value
    if isinstance(value, Opaque):
        proto.CopyFrom(AttrDef.FromString(value.data))
    elif isinstance(value, Weight):
        _tensor(proto.t, value, load=id(value) not in places)
    elif attr.kind in _SCALARS:
        field, convert = _SCALARS[attr.kind]
        setattr(proto, field, convert(value))
    elif attr.kind == "ListListInt":
        proto.list_list_int.SetInParent()
        for row in value:  # type: ignore[union-attr]
            proto.list_list_int.list_list_i.add().list_i.extend(row)
    elif attr.kind == "ListListFloat":
        proto.list_list_float.SetInParent()
        for row in value:  # type: ignore[union-attr]
            proto.list_list_float.list_list_f.add().list_f.extend(row)
    else:
        _set_list(proto, attr.kind, value)


def _set_list(proto: Proto, kind: str, values: object) -> None:
    field, number = _LISTS[kind]
    _, convert = _SCALARS[kind.removeprefix("List")]
    if isinstance(values, str):
        raise TypeError("a string is not a list")
    getattr(proto.list, field).extend(convert(value) for value in values)  # type: ignore[attr-defined]
    proto.list.val_type = number


def _tensor(proto: Proto, weight: Weight, load: bool) -> None:
    _desc(proto.desc, TensorDesc("", weight.dtype, weight.shape))
    if load:
        proto.data = weight.load()


def _exactly(kind: type) -> Callable[[object], object]:
    """A converter that accepts only values of exactly this type: True is not an Int, 1 is not a
    Bool."""

    def convert(value: object) -> object:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value

    return convert


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _bytes(value: object) -> bytes:
    return str(_exactly(str)(value)).encode(errors="surrogateescape")


def _type(value: object) -> int:
    return attr_number(str(_exactly(str)(value)))


_SCALARS: dict[str, tuple[str, Callable[[object], object]]] = {
    "Int": ("i", _exactly(int)),
    "Float": ("f", _float),
    "Bool": ("b", _exactly(bool)),
    "String": ("s", _bytes),
    "Type": ("dt", _type),
}
_LISTS = {name: (field, number) for number, (field, name) in LISTS.items()}
