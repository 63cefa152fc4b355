"""Measures causal convolutions as exporters write them beside what they are fused to, in one process.

    python -m bench.convolution --channels 4096,8192 --tokens 1,256,2048 --threads 1

A prompt is transposed, convolved with zeros in front, cut to its tokens, activated by SiLU and transposed back; its
last columns are the state. One token is joined with a state of `--columns` columns. The two models run in turns with
all optimisations of ONNX Runtime and bound inputs and outputs, and the least time of each is shown in milliseconds. It
is the processor's time with one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime as ort
from onnx import parser

import fa_compiler
from bench.linear import least, timed
from bench.sparse import ort_value

WIDTH = 4
CONV = "c = Conv<group={channels}, pads=[{pads},{pads}]>({window}, w) "
SILU = "g = Sigmoid(k) a = Mul(k, g) y = Transpose<perm=[0,2,1]>(a) "
TURN = (
    "e = Constant<value_ints=[4611686018427387904]>() axis = Constant<value_ints=[2]>() "
    "last = Constant<value_ints=[-{columns}]>() xt = Transpose<perm=[0,2,1]>(x) "
)
PROMPT = TURN + CONV + "zero = Constant<value_ints=[0]>() n = Shape<start=2>(xt) k = Slice(c, zero, n, axis) " + SILU
TOKEN = (
    TURN
    + "window = Concat<axis=2>(s, xt) "
    + CONV
    + "one = Constant<value_ints=[-1]>() k = Slice(c, one, e, axis) "
    + SILU
)
STATE = "t = Slice({window}, last, e, axis)"


def exported(channels: int, tokens: int, columns: int) -> onnx.ModelProto:
    """The model of a prompt, or of one token and a state."""
    step = tokens == 1
    body = TOKEN if step else PROMPT
    text = (body + STATE).format(
        channels=channels, pads=0 if step else WIDTH - 1, columns=columns, window="window" if step else "xt"
    )
    state = f", float[1,{channels},{columns}] s" if step else ""
    inputs = f"float[1,{tokens},{channels}] x, float[{channels},1,{WIDTH}] w{state}"
    outputs = f"float[1,{tokens},{channels}] y, float[1,{channels},{columns}] t"
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> conv ({inputs}) => ({outputs}) {{ {text} }}')


def bound(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], threads: int) -> Callable[[], None]:
    """A run with bound inputs and outputs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {name: ort_value(array) for name, array in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    results = [ort_value(result) for result in session.run(None, dict(feeds))]
    for output, result in zip(session.get_outputs(), results, strict=True):
        binding.bind_ortvalue_output(output.name, result)
    return lambda: session.run_with_iobinding(binding)


def measured(channels: int, tokens: int, columns: int, threads: int, seconds: float) -> dict[str, float]:
    """The least seconds of a run of each model."""
    rng, model = np.random.default_rng(0), exported(channels, tokens, columns)
    fused = fa_compiler.optimize(model).model
    assert isinstance(fused, onnx.ModelProto)
    feeds = {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32)
        for value in model.graph.input
    }
    runs = {"as exported": bound(model, feeds, threads), "fused": bound(fused, feeds, threads)}
    return least({name: timed(run, threads) for name, run in runs.items()}, seconds)


def main() -> None:
    """Prints a line for each number of channels and tokens."""

    def listed(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--channels", type=listed, default=[4096, 8192], help="separated by commas")
    arguments.add_argument("--tokens", type=listed, default=[1, 256, 2048], help="separated by commas")
    arguments.add_argument("--columns", type=listed, default=[3, 4], help="of the state: 3 or 4, separated by commas")
    arguments.add_argument("--threads", type=listed, default=[1], help="separated by commas")
    arguments.add_argument("--seconds", type=float, default=3.0, help="for each line")
    options = arguments.parse_args()
    print("threads  channels  tokens  columns  as exported      fused")
    for threads in options.threads:
        for channels in options.channels:
            for tokens in options.tokens:
                for columns in options.columns:
                    times = measured(channels, tokens, columns, threads, options.seconds)
                    row = f"{threads:7}  {channels:8}  {tokens:6}  {columns:7}"
                    print(f"{row}  {1e3 * times['as exported']:8.3f} ms  {1e3 * times['fused']:6.3f} ms", flush=True)


if __name__ == "__main__":
    main()
