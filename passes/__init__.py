"""The fusion passes: attention of any spelling becomes FlashAttentionScore, or is declined with a reason."""

from fa_compiler.passes.fusion import fuse
from fa_compiler.passes.node_view import node_view
from fa_compiler.passes.options import ASSUMPTIONS, Options
from fa_compiler.passes.report import Block, Code, Report
from fa_compiler.passes.shapes import ShapeInfo, analyse

__all__ = ["ASSUMPTIONS", "Block", "Code", "Options", "Report", "ShapeInfo", "analyse", "fuse", "node_view"]
