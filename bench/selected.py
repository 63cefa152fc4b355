"""Measures time and memory of attention to selected keys by sequence length, before and after it is fused.

    python bench/selected.py --out build/bench/selected
    python bench/selected.py --lengths 1024,2048,4096,8192,16384 --selected 512

The layer is that of models with a lightning indexer: index scores of a few heads, a causal mask, TopK, ScatterElements
into a mask, and attention with this mask. It is made for each length and runs unchanged, fused, and fused with the
assumption close-ranks. Each run is a process with one thread. The figures are the processor time of one run, and the
peak memory of loading and running the model, with inputs and result. selected.md and selected.svg are written to --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

import fa_compiler

HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 2, 64, 2, 32
WAYS = {"as exported": None, "fused": (), "fused, close-ranks": ("close-ranks",)}
COLOURS = ("#9aa5b1", "#7c9cbf", "#0b6e4f")


def layer(length: int, selected: int) -> onnx.ModelProto:
    """One layer of the given length."""
    inputs = {
        "q": (1, HEADS, length, WIDTH),
        "k": (1, HEADS, length, WIDTH),
        "v": (1, HEADS, length, WIDTH),
        "iq": (1, length, INDEX_HEADS, INDEX_WIDTH),
        "ik": (1, 1, INDEX_WIDTH, length),
        "iw": (1, length, 1, INDEX_HEADS),
    }
    declared = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in inputs.items())
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        layer ({declared}) => (float[1,{HEADS},{length},{WIDTH}] y) {{
          first = Constant<value=int64 {{0}}>() end = Constant<value=int64 {{{length}}}>()
          one = Constant<value=int64 {{1}}>() count = Constant<value=int64[1] {{{selected}}}>()
          heads = Constant<value=int64[1] {{1}}>() unit = Constant<value=int64[1] {{2}}>()
          low = Constant<value=float {{-inf}}>() zero = Constant<value=float {{0.0}}>()
          scale = Constant<value=float {{{WIDTH**-0.5}}}>()
          keys = Range(first, end, one) rows = Unsqueeze(keys, heads)
          later = Greater(keys, rows) mask = Where(later, low, zero)
          dots = MatMul(iq, ik) relu = Relu(dots) weighed = MatMul(iw, relu) index = Squeeze(weighed, unit)
          ranked = Add(index, mask)
          best, listed = TopK<axis=-1>(ranked, count)
          whole = Shape(ranked) of_list = Shape(listed)
          lows = ConstantOfShape<value=float[1] {{-inf}}>(whole)
          zeros = ConstantOfShape<value=float[1] {{0.0}}>(of_list)
          hidden3 = ScatterElements<axis=-1>(lows, listed, zeros) hidden = Unsqueeze(hidden3, heads)
          both = Add(hidden, mask)
          turned = Transpose<perm=[0,1,3,2]>(k) products = MatMul(q, turned) scores = Mul(products, scale)
          masked = Add(scores, both) p = Softmax<axis=-1>(masked) y = MatMul(p, v)
        }}""")


def run_one(path: str) -> dict[str, float]:
    """The processor seconds of one run of a model, and the peak bytes of loading and running it."""
    before = _memory("VmRSS")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.standard_normal(each.shape).astype(np.float32) for each in session.get_inputs()}
    start = time.process_time()
    (result,) = session.run(None, feeds)
    seconds = time.process_time() - start
    np.save(f"{path}.npy", result)
    return {"seconds": seconds, "bytes": _memory("VmHWM") - before}


def _memory(field: str) -> float:
    """One of Linux's memory counts for this process, in bytes; getrusage would include the parent's memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024.0 * int(line.split()[1])


def measure(length: int, selected: int, folder: Path) -> dict[str, dict[str, float]]:
    """The figures of all variants for one length. Results that differ in more than close ranks are an error."""
    original = folder / "original.onnx"
    onnx.save(layer(length, selected), original)
    found: dict[str, dict[str, float]] = {}
    wanted: Any = None
    for way, assume in WAYS.items():
        path = original
        if assume is not None:
            path = folder / "fused.onnx"
            fa_compiler.optimize(original, path, assume=assume)
        done = subprocess.run([sys.executable, __file__, "--one", str(path)], capture_output=True, text=True)
        if done.returncode:
            found[way] = {}
            continue
        found[way] = json.loads(done.stdout.splitlines()[-1])
        result = np.load(f"{path}.npy")
        if wanted is None:
            wanted = result
        rows = np.abs(result - wanted).max(axis=(0, 1, 3)) > 1e-4
        found[way]["other_rows"] = float(rows.sum())
        if not assume and rows.any():
            raise SystemExit(f"length {length}, {way}: {rows.sum()} rows differ from the original's")
    return found


def svg(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Two plots with logarithmic axes: seconds and bytes over the length."""
    width, height, left, top = 360, 260, 70, 50
    body = []
    for number, (what, title) in enumerate((("seconds", "processor seconds"), ("bytes", "memory in MB"))):
        factor = 1e-6 if what == "bytes" else 1.0
        points = {
            way: [(n, factor * max(found[way][what], 1e-9)) for n, found in results.items() if found.get(way)]
            for way in WAYS
        }
        values = [value for line in points.values() for _, value in line]
        low, high = np.log10(min(values)), np.log10(max(values)) + 0.05
        span = np.log2(min(results)), np.log2(max(results))
        x0, y0 = left + number * (width + left + 20), top
        body.append(f'<rect x="{x0}" y="{y0}" width="{width}" height="{height}" fill="none" stroke="#444"/>')
        body.append(f'<text x="{x0}" y="{y0 - 8}">{title}</text>')

        def place(
            n: float, value: float, x0: int = x0, y0: int = y0, span: Any = span, low: float = low, high: float = high
        ) -> str:
            x = x0 + width * (np.log2(n) - span[0]) / max(span[1] - span[0], 1e-9)
            return f"{x:.1f},{y0 + height * (high - np.log10(value)) / max(high - low, 1e-9):.1f}"

        for exponent in range(int(np.ceil(low)), int(np.floor(high)) + 1):
            y = place(2 ** span[0], 10.0**exponent).split(",")[1]
            body.append(f'<text x="{x0 - 6}" y="{y}" text-anchor="end">{10.0**exponent:g}</text>')
        for n in results:
            x = place(n, 10**high).split(",")[0]
            body.append(f'<text x="{x}" y="{y0 + height + 16}" text-anchor="middle">{n}</text>')
        for line, colour in zip(points.values(), COLOURS, strict=True):
            path = " ".join(place(*point) for point in line)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for index, (way, colour) in enumerate(zip(WAYS, COLOURS, strict=True)):
        body.append(f'<text x="{left + 150 * index}" y="18" fill="{colour}">{escape(way)}</text>')
    size = f'width="{2 * (width + left) + 60}" height="{height + top + 40}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([frame, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def table(results: dict[int, dict[str, dict[str, float]]], selected: int) -> str:
    """The figures as Markdown."""
    lines = [f"Attention to {selected} selected keys of each row, one thread.", ""]
    lines += ["| length | way | processor seconds | MB | rows that differ |", "| --- | --- | --- | --- | --- |"]
    for length, found in results.items():
        for way, one in found.items():
            cells = "out of memory | | "
            if one:
                cells = f"{one['seconds']:.2f} | {1e-6 * one['bytes']:.0f} | {one['other_rows']:.0f}"
            lines.append(f"| {length} | {way} | {cells} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--selected", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("build/bench/selected"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(run_one(options.one)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    results = {int(n): measure(int(n), options.selected, options.out) for n in options.lengths.split(",")}
    text = table(results, options.selected)
    (options.out / "selected.md").write_text(text)
    (options.out / "selected.svg").write_text(svg(results))
    print(text)


if __name__ == "__main__":
    main()
