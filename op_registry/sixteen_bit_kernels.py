"""What ONNX Runtime's CPU kernels do with numbers of float16 and bfloat16 (measured, ONNX Runtime
1.32).

Most operators have kernels of float32 alone. Where their types are of 16 bits, ONNX Runtime casts
their operands to float32 and their results back, and leaves out the casts between two such
operators. So the second one reads numbers that were never rounded. An operator that has a kernel of
16 bits rounds what it reads.

The operators that only move elements have such kernels, too, but for those of `MOVED_AS_FLOAT32`.
passes/ops/movers.py lists them.

Whether others have one depends on the machine or on the type: Log, Relu and Tanh read float32 on
x86-64, and Mod, Sign and LayerNormalization round numbers of float16. They are in neither of the
lists of what is read.
"""

from __future__ import annotations

GIVE_FLOAT32 = ("Add", "Sub", "Sum", "Mul", "Div", "Neg", "Max", "Min", "Clip", "Where")
"""Operators that are computed in float32. The next operator rounds their result if it has a kernel
of 16 bits."""
READ_FLOAT32 = (
    *(
        "Add",
        "Sub",
        "Sum",
        "Mul",
        "Div",
        "Neg",
        "Where",
        "Exp",
        "Abs",
        "Sqrt",
        "Reciprocal",
        "Pow",
        "Floor",
    ),
    *(
        "Erf",
        "Sigmoid",
        "Softmax",
        "LogSoftmax",
        "ReduceMax",
        "ReduceMin",
        "ReduceSum",
        "ReduceMean",
        "CumSum",
    ),
    *("ArgMax", "MatMul", "Equal", "Less"),
)
"""Operators that read numbers of 16 bits as float32, unrounded."""
READ_16_BITS = ("Concat", "Cast", "Round", "IsNaN", "Max", "Min", "Clip", "Shape")
"""Operators with a kernel of 16 bits, which rounds what it reads."""
MOVED_AS_FLOAT32 = ("Tile", "DepthToSpace", "SpaceToDepth")
"""Operators that only move elements and have kernels of float32 alone. A move in front of one, or
behind it, stands between two operators of float32 and may round nothing."""
