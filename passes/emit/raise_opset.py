"""Raises the standard opset of a model to that of an operator that a target needs.

    same         the operator means the same in both opsets: only types, optional inputs or
                 attributes were added
    rewritten    axes of a reduction (an attribute before 18), Split without sizes (num_outputs from
                 18 on), the modes of GridSample (renamed in 20)
    refused      every other operator whose definition has changed; operators that ONNX Runtime runs
                 only as they were before, in the type of the node (op_registry/lost_kernels.tsv);
                 pooling with `ceil_mode`, whose window at the border has changed;
                 BatchNormalization with statistics as outputs; models of an opset below 13, and
                 models with functions that could not be inlined

That an operator means the same does not say that it has a kernel: both are asked for. The operators
of other domains do not change. A model is looked through before anything in it is changed.

ONNX Runtime's copies of a quantisation (dequantised.py) fail in newer opsets only. So in a model
that was raised the operators behind a DequantizeLinear are put in front of it (survival.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnx import defs

from fa_compiler.op_registry.lost_kernels import lost_types
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import (
    all_nodes,
    graph_opset,
    input_of,
    int_attr,
    operand_at,
    text_attr,
)
from fa_compiler.passes.values.shapes import analyse

OLDEST = 13
"""The oldest opset that is raised: before it, Softmax and its like flatten axes."""
SAME = frozenset(
    re.findall(
        r"\w+",
        """
    Acos Acosh Add Asin Asinh Atan Atanh Cast CastLike Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
    DequantizeLinear Det Div Dropout Elu Equal EyeLike Flatten GRU GlobalAveragePool GlobalMaxPool GreaterOrEqual
    HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN LSTM LeakyRelu LessOrEqual Loop
    LpNormalization MaxPool MaxUnpool Mish Mul NegativeLogLikelihoodLoss OptionalGetElement OptionalHasElement PRelu
    Pad Pow QLinearMatMul QuantizeLinear RNN Relu Reshape Resize Round Scan ScatterElements ScatterND Selu Shape Sin
    Sinh Size Softplus Softsign Squeeze Sub Tan ThresholdedRelu Transpose Unsqueeze Where
    """,
    )
)
"""The operators that mean the same in all opsets from 13 on."""
WORDS = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
"""The types whose words in lost_kernels.tsv are not their names."""
REDUCED = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
REDUCTIONS = frozenset(f"Reduce{kind}" for kind in REDUCED)
"""The reductions whose axes are an attribute before opset 18. ReduceSum has them as an input from
13 on."""
SAMPLING_MODES = {"bilinear": "linear", "bicubic": "cubic"}
"""The modes of GridSample that were renamed in opset 20."""


def raise_opset(model: ir.Model, least: int) -> None:
    """Raise the opset of a model to `least` where it is older. Raises Decline, and leaves the model
    as it was."""
    given = graph_opset(model.graph)
    if given >= least:
        return
    if given < OLDEST:
        reason = (
            f"the model is of opset {given}, and an opset below {OLDEST} is not raised to {least}"
        )
        raise Decline(Code.OPSET, reason, None, f"export again with opset {least}")
    if model.functions:
        reason = f"the model is of opset {given}, the target needs {least}, and it holds functions of its own"
        raise Decline(Code.OPSET, reason, None, f"export again with opset {least}")
    nodes = [node for node in all_nodes(model.graph) if node.domain in ("", "ai.onnx")]
    _check_kernels(model, nodes, given, least)
    changes = [
        (node, change) for node in nodes if (change := _change(node, given, least)) is not None
    ]
    names = Names.of([model.graph])
    for node, change in changes:
        change(node, names)
    for domain in ("", "ai.onnx"):
        if domain in model.graph.opset_imports:
            model.graph.opset_imports[domain] = least
    for node in nodes:
        if node.version is not None:
            node.version = least


def _change(node: ir.Node, given: int, least: int) -> Callable[[ir.Node, Names], None] | None:
    """What has to be done to a node; None where it means the same in both opsets. Raises
    Decline."""
    kind = node.op_type
    if not has_changed(kind, given, least) or kind in SAME:
        return None
    if kind in REDUCTIONS and given < 18:
        return _axes_as_input
    if kind == "Split" and input_of(node, 1) is None:
        return _count_outputs
    if kind == "GridSample" and given < 20:
        return _rename_mode
    same = {
        **dict.fromkeys(("Split", "GridSample", *REDUCTIONS), True),
        **dict.fromkeys(("AveragePool", "LpPool"), int_attr(node, "ceil_mode", 0) == 0),
        "BatchNormalization": given >= 14 or len(node.outputs) == 1,
    }
    if same.get(kind, False):
        return None
    raise _refused(f"{kind} may mean something else there", node, given, least)


def _check_kernels(model: ir.Model, nodes: Sequence[ir.Node], given: int, least: int) -> None:
    """Decline an operator that ONNX Runtime runs in the opset `given`, and not in `least`, in the
    type of the node."""
    lost = {node: kinds for node in nodes if (kinds := lost_types(node.op_type, given, least))}
    if not lost:
        return
    info = analyse(model)
    for node, kinds in lost.items():
        dtype = info.dtype(operand_at(node, 0) if node.inputs else node.outputs[0])
        if dtype is not None and WORDS.get(dtype, dtype.name.lower()) in kinds:
            why = f"ONNX Runtime has no kernel of {node.op_type} for {dtype.name} there"
            raise _refused(why, node, given, least)


def _refused(why: str, node: ir.Node, given: int, least: int) -> Decline:
    reason = f"the model is of opset {given}, the target needs {least}, and {why}"
    return Decline(Code.OPSET, reason, node, f"export again with opset {least}")


def has_changed(kind: str, given: int, least: int) -> bool:
    """Is the operator defined anew between two opsets? An unknown one counts as changed."""
    try:
        return bool(
            defs.get_schema(kind, given, "").since_version
            != defs.get_schema(kind, least, "").since_version
        )
    except defs.SchemaError:
        return True


def _axes_as_input(node: ir.Node, names: Names) -> None:
    attr = node.attributes.get("axes")
    if attr is None:
        return
    node.attributes.pop("axes")
    value = ir.node(
        "Constant", [], {"value_ints": tuple(attr.as_ints())}, name=names.new("fa_axes")
    )
    output = value.outputs[0]
    output.name = names.new("fa_axes_output")
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, value)
    node.resize_inputs(2)
    node.replace_input_with(1, output)


def _count_outputs(node: ir.Node, names: Names) -> None:
    node.attributes.add(ir.AttrInt64("num_outputs", len(node.outputs)))


def _rename_mode(node: ir.Node, names: Names) -> None:
    word = text_attr(node, "mode", "bilinear")
    node.attributes.add(ir.AttrString("mode", SAMPLING_MODES.get(word, word)))
