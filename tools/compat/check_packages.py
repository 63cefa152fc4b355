"""Packages that make sessions of their own, run unchanged with the execution provider and without it.

    python -m tools.compat.check_packages

needs rapidocr and arabic-name-romanizer, which ship their models. For each the two results have to be the same, and
some attention has to be fused. The times and the peak memory of both runs are printed; those with the provider include
the matcher and its imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = {
    "rapidocr": """
import numpy
from PIL import Image, ImageDraw, ImageFont
image = Image.new("RGB", (640, 160), "white")
draw = ImageDraw.Draw(image)
for line, text in enumerate(["Attention is all you need 2017", "Hello provider, 12345"]):
    draw.text((20, 20 + 70 * line), text, fill="black", font=ImageFont.load_default(28))
from rapidocr import RapidOCR
engine = RapidOCR()
def work():
    found = engine(numpy.array(image))
    return found.txts, [round(float(score), 4) for score in found.scores]
""",
    "arabic-name-romanizer": """
import arabic_name_romanizer
names = ["خوارزمشاهيان", "قنديلخان زغبور", "شكربلطيم"]
def work():
    return [arabic_name_romanizer.transliterate(name) for name in names]
""",
}
MEASURED = """
import resource, sys, time
result = work()
start = time.perf_counter()
work()
seconds = time.perf_counter() - start
print("RESULT", result)
print("MEASURED", f"{seconds:.3f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")
"""


def run(script: Path, *words: str) -> tuple[str, str, str]:
    """The result, the measures and stderr of a script."""
    done = subprocess.run([sys.executable, *words, str(script)], capture_output=True, text=True, check=False)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("RESULT", "MEASURED")))
    if done.returncode != 0:
        raise SystemExit(f"{script.stem}: {done.stderr[-2000:]}")
    return lines["RESULT"], lines["MEASURED"], done.stderr


def main() -> int:
    """Print one line for each package. The exit code is 1 if one of them gives another result, or fuses nothing."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, body in SCRIPTS.items():
            script = Path(folder) / f"use-{name}.py"
            script.write_text(body + MEASURED)
            plain, plain_measures, _ = run(script)
            fused, fused_measures, told = run(script, "-m", "fa_compiler.provider")
            count = re.search(r"(\d+) of \d+ attentions? fused", told)
            good = plain == fused and count is not None and int(count[1]) > 0
            failed |= not good
            print(f"{name}: {'the same' if plain == fused else f'{plain} became {fused}'}; {told.splitlines()[-1]}")
            print(f"    without {plain_measures}; with {fused_measures}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
