"""What makes GE's loader reject a ModelDef, before anything else is asked of it."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.lowering.ascend.air import check_edges, check_ends, check_names
from fa_compiler.lowering.ascend.air.finding import Finding
from fa_compiler.lowering.ascend.air.schema import Proto


def rejections(proto: Proto) -> Iterator[Finding]:
    """Every reason the loader has, those of edges first."""
    yield from check_edges.rejections(proto)
    yield from check_ends.rejections(proto)
    yield from check_names.rejections(proto)
