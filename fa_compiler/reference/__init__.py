"""The float64 NumPy reference of the Ascend attention operators: the oracle of the project.

It is plain and slow on purpose: every kernel and every fusion is compared with it. `run` executes
one operator by its REG_OP names. `onnx_ops` and `evaluator` execute ONNX models with nodes of the
domain `ascend`.

To add an operator, add one file to `reference/ops/` with one function that is marked
`@operator("OpType")`.
"""

from fa_compiler.reference.call import ReferenceInputError
from fa_compiler.reference.op_runs import evaluator, onnx_ops
from fa_compiler.reference.runner import run

__all__ = ["ReferenceInputError", "evaluator", "onnx_ops", "run"]
