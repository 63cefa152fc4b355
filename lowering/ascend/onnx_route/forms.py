"""Rewrites nodes into forms that ATC's own plugins read correctly; `plugin_reads` tells what the
plugins do not read.

There is one rule for each operator. The modules of the rules have tables of the forms:

    forms_shapes    operators that move or reduce elements, or compute shapes
    forms_windows   convolutions and pooling
    forms_numbers   elementwise operators and products
    forms_random    random numbers
    forms_scatter   ScatterND
    forms_several   operators with several inputs and outputs
    forms_resize    Resize and Upsample

In addition, for every operator:

| operator | becomes | where |
| --- | --- | --- |
| Split with num_outputs | sizes as input | as in `changes` |
| a reduction with another noop_with_empty_axes than 0 and 1 | refused | as in `changes` |
| any node with absent inputs at the end | the node without them | always |
| Clip, Slice, Resize with another absent input | Min; axes and empty regions are written | in a branch of an If |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route import (
    forms_numbers,
    forms_random,
    forms_resize,
    forms_scatter,
    forms_several,
    forms_shapes,
    forms_windows,
)
from fa_compiler.lowering.ascend.onnx_route.changes import defined_noop, split_sizes
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite, RewriteRule


def trim(node: ir.Node) -> None:
    """Leave out absent inputs at the end."""
    count = len(node.inputs)
    while count and node.inputs[count - 1] is None:
        count -= 1
    if count < len(node.inputs):
        node.resize_inputs(count)


def without_gaps(rewrite: Rewrite) -> None:
    """A node in a branch of an If: ATC would connect its absent input to an input of the branch."""
    node, builder = rewrite.node, rewrite.builder
    if None not in node.inputs:
        return
    if node.op_type == "Clip" and len(node.inputs) == 3:
        data, bound = rewrite.needed(0), rewrite.needed(2)
        rewrite.replace(rewrite.op("Min", [data, bound], data))
    elif (
        node.op_type == "Slice" and (count := rewrite.shape(rewrite.needed(1))[0].const) is not None
    ):
        node.replace_input_with(3, builder.ints(range(count)))
    elif node.op_type == "Resize":
        for index in (1, 2):
            if rewrite.given(index) is None:
                node.replace_input_with(index, builder.constant(np.zeros(0, np.float32), "none"))
    else:
        places = ", ".join(str(index) for index, value in enumerate(node.inputs) if value is None)
        rewrite.fail(
            f"input {places} is absent, which ATC does not take in a branch of an If (E11019); give it"
        )


FORMS: Mapping[str, RewriteRule] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), forms_shapes.last_index),
    **dict.fromkeys(("AveragePool", "Conv", "LpPool", "MaxPool"), forms_windows.window),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), forms_shapes.one_axis),
    **dict.fromkeys(("Mean", "Sum"), forms_numbers.sums),
    **dict.fromkeys(
        ("ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
        defined_noop,
    ),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike"), forms_random.type_of_input),
    **dict.fromkeys(("Resize", "Upsample"), forms_resize.resize),
    "BatchNormalization": forms_numbers.no_statistics,
    "Bernoulli": forms_random.no_zero_seed,
    "Clip": forms_numbers.clip,
    "Col2Im": forms_windows.no_columns,
    "ConstantOfShape": forms_shapes.fill_bytes,
    "ConvTranspose": forms_windows.transposed_window,
    "DepthToSpace": forms_shapes.block_of_one,
    "Dropout": forms_numbers.dropout,
    "EyeLike": forms_shapes.eye,
    "GRU": forms_several.batch_first,
    "GatherND": forms_shapes.batch_indices,
    "Gemm": forms_numbers.scaled_product,
    "GlobalMaxPool": forms_windows.global_maximum,
    "GridSample": forms_numbers.grid_defaults,
    "IsInf": forms_numbers.one_sign,
    "LayerNormalization": forms_numbers.zero_bias,
    "Mod": forms_numbers.floored,
    "Multinomial": forms_random.counted_in_int32,
    "NonMaxSuppression": forms_several.suppression_defaults,
    "Pad": forms_shapes.pad,
    "ReduceLogSum": forms_shapes.all_axes,
    "ReduceSumSquare": forms_shapes.squares,
    "ScatterND": forms_scatter.flat_indices,
    "Selu": forms_numbers.selu,
    "Shape": forms_shapes.shape_bounds,
    "Size": forms_shapes.size,
    "SoftmaxCrossEntropyLoss": forms_several.cross_entropy,
    "Split": split_sizes,
    "Transpose": forms_shapes.transpose_perm,
    "Unique": forms_shapes.flat,
}
"""The rule of each operator."""


def write_out(rewrite: Rewrite, is_branch: bool) -> None:
    """Rewrite a node into a form that its plugin reads correctly. `is_branch`: the node is in a
    branch of an If."""
    trim(rewrite.node)
    rule = FORMS.get(rewrite.node.op_type)
    if rule is not None:
        rule(rewrite)
    if is_branch and rewrite.node.graph is not None:
        without_gaps(rewrite)
