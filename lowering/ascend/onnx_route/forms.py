"""How to say what the stock plugins miss in forms that they read; `reads.py` has what they miss.

One rule an operator; the tables are in the files of the rules:

    forms_shapes    what moves elements, reduces them or tells of shapes
    forms_windows   convolutions and pools
    forms_numbers   element by element, products
    forms_several   several inputs and outputs
    forms_resize    Resize and Upsample

Beside them, for every operator:

| operator | becomes | where |
| --- | --- | --- |
| Pad with axes | pads for all axes | as in `changes` |
| any node with absent inputs at the end | the same without | always |
| Clip, Slice, Resize with another absent input | Min; axes and empty regions written | in a branch of an If |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route import (
    forms_numbers,
    forms_resize,
    forms_several,
    forms_shapes,
    forms_windows,
)
from fa_compiler.lowering.ascend.onnx_route.changes import pads_of_all_axes
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite, Rule


def trim(node: ir.Node) -> None:
    """Leave out absent inputs at the end."""
    count = len(node.inputs)
    while count and node.inputs[count - 1] is None:
        count -= 1
    if count < len(node.inputs):
        node.resize_inputs(count)


def without_gaps(rewrite: Rewrite) -> None:
    """A node in a branch of an If, which would take an absent input for one of its own."""
    node, builder = rewrite.node, rewrite.builder
    if None not in node.inputs:
        return
    if node.op_type == "Clip" and len(node.inputs) == 3:
        data, bound = rewrite.needed(0), rewrite.needed(2)
        rewrite.replace(rewrite.op("Min", [data, bound], data))
    elif node.op_type == "Slice" and (count := rewrite.shape(rewrite.needed(1))[0].const) is not None:
        node.replace_input_with(3, builder.ints(range(count)))
    elif node.op_type == "Resize":
        for index in (1, 2):
            if rewrite.given(index) is None:
                node.replace_input_with(index, builder.constant(np.zeros(0, np.float32), "none"))
    else:
        places = ", ".join(str(index) for index, value in enumerate(node.inputs) if value is None)
        rewrite.fail(f"input {places} is absent, which ATC does not take in a branch of an If (E11019); give it")


FORMS: Mapping[str, Rule] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), forms_shapes.last_index),
    **dict.fromkeys(("AveragePool", "Conv", "LpPool", "MaxPool"), forms_windows.window),
    **dict.fromkeys(("GRU", "LSTM"), forms_several.batch_first),
    **dict.fromkeys(("Hardmax", "LogSoftmax"), forms_shapes.one_axis),
    **dict.fromkeys(("Mean", "Sum"), forms_numbers.sums),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp"), forms_shapes.all_axes),
    **dict.fromkeys(("Resize", "Upsample"), forms_resize.resize),
    "Clip": forms_numbers.clip,
    "ConstantOfShape": forms_shapes.fill_bytes,
    "ConvTranspose": forms_windows.transposed_window,
    "DepthToSpace": forms_shapes.block_of_one,
    "Dropout": forms_numbers.dropout,
    "EyeLike": forms_shapes.eye,
    "GatherND": forms_shapes.batch_indices,
    "Gemm": forms_numbers.scaled_product,
    "GridSample": forms_numbers.grid_defaults,
    "IsInf": forms_numbers.one_sign,
    "Mod": forms_numbers.floored,
    "NonMaxSuppression": forms_several.suppression_defaults,
    "Pad": pads_of_all_axes,
    "ReduceSumSquare": forms_shapes.squares,
    "Selu": forms_numbers.selu,
    "Shape": forms_shapes.shape_bounds,
    "SoftmaxCrossEntropyLoss": forms_several.cross_entropy,
    "Transpose": forms_shapes.transpose_perm,
    "Unique": forms_shapes.flat,
}
"""The rule of each operator."""


def write_out(rewrite: Rewrite, is_branch: bool) -> None:
    """Bring a node into a form that its plugin reads as ONNX means it; `is_branch`: it lies in a branch of an If."""
    trim(rewrite.node)
    rule = FORMS.get(rewrite.node.op_type)
    if rule is not None:
        rule(rewrite)
    if is_branch and rewrite.node.graph is not None:
        without_gaps(rewrite)
