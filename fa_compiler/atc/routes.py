"""The routes from an optimised model to ATC, by the word of --route. **Add a route**: one function, one row."""

from __future__ import annotations

from fa_compiler.atc import route_air, route_onnx
from fa_compiler.atc.job import Route

ROUTES: dict[str, Route] = {
    "air": route_air.build,
    "onnx": route_onnx.build,
    "npu": route_onnx.build_npu,
}
"""The first is the default."""
