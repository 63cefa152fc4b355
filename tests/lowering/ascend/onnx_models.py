"""Small models for the ONNX route, written as text, and running them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

from fa_compiler.lowering.ascend.onnx_route import lower

Arrays = dict[str, np.ndarray]


def parsed(body: str, opset: int, ir_version: int = 10, domains: str = "") -> onnx.ModelProto:
    """The model with this graph (and these functions behind it), and the shapes of outputs where they are left out."""
    model = onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : {opset}{domains}]> {body}')
    return onnx.shape_inference.infer_shapes(model)


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """What `lower` makes of it, as ONNX's checker takes it."""
    intermediate = ir.from_proto(model)
    lower(intermediate)
    result = ir.to_proto(intermediate)
    onnx.checker.check_model(result, full_check=True)
    return result


def run(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    """The outputs in ONNX Runtime, nothing optimised."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def drawn(model: onnx.ModelProto, seed: int = 0, size: int = 6) -> Arrays:
    """Numbers for the inputs of a model; open dimensions are `size`."""
    random = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [dim.dim_value or size for dim in kind.shape.dim]
        whole = dtype.kind in "iub"
        numbers = random.integers(0, 2, shape) if whole else random.normal(size=shape)
        feeds[value.name] = numbers.astype(dtype)
    return feeds


def opset(model: onnx.ModelProto) -> int:
    """The standard opset of a model."""
    return next(entry.version for entry in model.opset_import if not entry.domain)
