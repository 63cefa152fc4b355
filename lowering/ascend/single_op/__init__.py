"""The JSON file of one operator for `atc --singleop`: `to_json` makes it, `from_json` reads it,
`check` checks it."""

from fa_compiler.lowering.ascend.single_op.constraints import broken_constraints
from fa_compiler.lowering.ascend.single_op.json_form import from_json, to_json
from fa_compiler.lowering.ascend.single_op.rules import check, check_text

__all__ = ["broken_constraints", "check", "check_text", "from_json", "to_json"]
