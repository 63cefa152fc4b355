"""Convert exported models with the tools that people use before they deploy.

    python -m tools.sweep.convert --state build/sweep [--converters REGEX] [--only REGEX] [--timeout 240]

The interpreter needs what requirements-convert.txt lists. The models are those of `MODELS`, in the folder `exports` of
the state (export.py). The folder `converted` gets CONVERTER__MODEL.onnx and its .json. What has a .json is not
converted again.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers import float16, optimizer

from tools.sweep.child import attempt

MODELS = (
    "transformers__electra__torchscript",
    "transformers__electra__dynamo",
    "transformers__ernie__dynamo",
    "transformers__mpnet__torchscript",
    "transformers__deberta__torchscript",
    "transformers__qwen2__torchscript",
    "transformers__qwen2__dynamo",
    "transformers__gemma3_text__dynamo",
    "transformers__gpt_neox__torchscript",
    "transformers__olmo2__dynamo",
    "transformers__codegen__torchscript",
    "transformers__marian__torchscript",
    "transformers__pegasus__dynamo",
    "transformers__mt5__torchscript",
    "transformers__mbart__dynamo",
    "transformers__deit__torchscript",
    "transformers__dinov2_with_registers__dynamo",
    "transformers__swinv2__torchscript",
    "transformers__hubert__torchscript",
    "timm__eva02__dynamo",
    "timm__twins_svt__torchscript",
    "diffusers__sd3__dynamo",
    "diffusers__unet2d_condition__torchscript",
    "vit_pytorch__simple_vit__torchscript",
    "x_transformers__decoder__torchscript",
    "x_transformers__encoder_flash__dynamo",
)
"""Encoders and decoders, with and without masks, of both exporters."""


class Calibration(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not typed
    """Gives one set of inputs."""

    def __init__(self, inputs: Path) -> None:
        with np.load(inputs) as archive:
            self._left = iter([{name: archive[name] for name in archive.files}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The inputs, once."""
        return next(self._left, None)


def to_float16(source: Path, _: Path, target: Path) -> None:
    """onnxruntime.transformers.float16, with inputs and outputs as they are."""
    onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def softmax_in_float32(source: Path, _: Path, target: Path) -> None:
    """The same, with each Softmax in float32."""
    blocked = [*float16.DEFAULT_OP_BLOCK_LIST, "Softmax"]
    converted = float16.convert_float_to_float16(onnx.load(source), keep_io_types=True, op_block_list=blocked)
    onnx.save(converted, target)


def common_float16(source: Path, _: Path, target: Path) -> None:
    """onnxconverter_common.float16."""
    from onnxconverter_common import float16 as common  # type: ignore[import-not-found,unused-ignore]

    onnx.save(common.convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def dynamic(source: Path, _: Path, target: Path) -> None:
    """quantize_dynamic."""
    quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8)


def static(form: QuantFormat) -> Callable[[Path, Path, Path], None]:
    """quantize_static after its preprocessing, in one of the two formats."""

    def convert(source: Path, inputs: Path, target: Path) -> None:
        prepared = target.with_suffix(".prepared")
        quant_pre_process(str(source), str(prepared), auto_merge=True)
        quantize_static(str(prepared), str(target), Calibration(inputs), quant_format=form)
        prepared.unlink()

    return convert


def four_bits(source: Path, _: Path, target: Path) -> None:
    """MatMulNBitsQuantizer: the weights of products in 4 bits."""
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=False)


def simplified(source: Path, _: Path, target: Path) -> None:
    """onnxsim."""
    import onnxsim  # type: ignore[import-not-found,unused-ignore]

    model, is_checked = onnxsim.simplify(str(source))
    assert is_checked
    onnx.save(model, target)


def simplified_static(source: Path, inputs: Path, target: Path) -> None:
    """onnxsim with the sizes of the inputs fixed."""
    import onnxsim  # type: ignore[import-not-found,unused-ignore]

    with np.load(inputs) as archive:
        shapes = {name: list(archive[name].shape) for name in archive.files}
    model = onnx.load(source)
    own = {value.name for value in model.graph.input}
    model, is_checked = onnxsim.simplify(
        model, overwrite_input_shapes={name: shape for name, shape in shapes.items() if name in own}
    )
    assert is_checked
    onnx.save(model, target)


def slimmed(source: Path, _: Path, target: Path) -> None:
    """onnxslim."""
    import onnxslim  # type: ignore[import-not-found,unused-ignore]

    onnx.save(onnxslim.slim(str(source)), target)


def runtime(level: ort.GraphOptimizationLevel) -> Callable[[Path, Path, Path], None]:
    """What ONNX Runtime saves at a level of its optimisations."""

    def convert(source: Path, _: Path, target: Path) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(target)
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return convert


def transformers(source: Path, _: Path, target: Path) -> None:
    """onnxruntime.transformers.optimizer, without ONNX Runtime's own optimisations, for which it needs torch."""
    optimizer.optimize_model(str(source), model_type="bert", opt_level=0).save_model_to_file(str(target))


CONVERTERS: dict[str, Callable[[Path, Path, Path], None]] = {
    "float16": to_float16,
    "float16 but Softmax": softmax_in_float32,
    "float16 of onnxconverter-common": common_float16,
    "quantize_dynamic": dynamic,
    "quantize_static QDQ": static(QuantFormat.QDQ),
    "quantize_static QOperator": static(QuantFormat.QOperator),
    "MatMul 4 bits": four_bits,
    "onnxsim": simplified,
    "onnxsim, static": simplified_static,
    "onnxslim": slimmed,
    "ONNX Runtime, basic": runtime(ort.GraphOptimizationLevel.ORT_ENABLE_BASIC),
    "ONNX Runtime, extended": runtime(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
    "transformers.optimizer": transformers,
}
"""Each writes a model: of a file, with its inputs, to another file."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--converters", default="", metavar="REGEX", help="only converters whose name matches")
    parser.add_argument("--only", default="", metavar="REGEX", help="only models whose name matches")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one conversion (240)")
    arguments = parser.parse_args()
    exports, folder = arguments.state / "exports", arguments.state / "converted"
    folder.mkdir(parents=True, exist_ok=True)
    for name, convert in CONVERTERS.items():
        for model in MODELS:
            source, inputs = exports / f"{model}.onnx", exports / f"{model}.npz"
            target = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}__{model}.onnx"
            answer = target.with_suffix(".json")
            chosen = re.search(arguments.converters, name) and re.search(arguments.only, model)
            if not chosen or not inputs.exists() or answer.exists():
                continue
            start = time.monotonic()
            problem = attempt(lambda: convert(source, inputs, target), target.with_suffix(".log"), arguments.timeout)  # noqa: B023
            seconds = round(time.monotonic() - start, 1)
            collection, architecture, exporter = model.split("__")
            entry: dict[str, Any] = {"converter": name, "collection": collection, "architecture": architecture}
            entry |= {"exporter": exporter, "inputs": str(Path("..") / "exports" / inputs.name)}
            answer.write_text(json.dumps({**entry, "problem": problem, "seconds": seconds}) + "\n")
            print(f"{target.stem:80} {seconds:6.1f} s {problem or 'ok'}", flush=True)


if __name__ == "__main__":
    main()
