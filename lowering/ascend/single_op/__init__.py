"""The JSON that `atc --singleop` compiles one operator from: written, read, checked."""

from fa_compiler.lowering.ascend.single_op.form import from_json, to_json
from fa_compiler.lowering.ascend.single_op.rules import check, check_text

__all__ = ["check", "check_text", "from_json", "to_json"]
