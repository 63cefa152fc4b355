"""The command bench."""

from __future__ import annotations

import argparse
import json

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.command_line.models import progress_bar, wrote
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_measures
from fa_compiler.comparison.benchmark import bench
from fa_compiler.comparison.options import BenchOptions
from fa_compiler.model_files.reading import load
from fa_compiler.model_files.writing import check_place, staging, write
from fa_compiler.page.provenance import Provenance
from fa_compiler.passes import Options


def run(args: argparse.Namespace) -> int:
    """Measure a model and its fused form, and print the table."""
    options = given(args, BenchOptions, Options)
    if args.html is not None:
        check_place(args.html, load(args.model))
    with staging() as stage:
        page_file = None if args.html is None else stage.reserve(args.html)
        with progress_bar(args.quiet or args.json) as progress:
            measured = bench(args.model, progress=progress, **options)
        if page_file is not None:
            from fa_compiler.page.gain_page import gain_page

            text = gain_page(measured, Provenance.of(args.words), args.html)
            write(page_file, [text.encode(errors="backslashreplace")], args.html)
        stage.commit()
    if args.json:
        print(json.dumps(measured.to_json(), indent=2, ensure_ascii=False))
    else:
        print_measures(measured)
        if args.html is not None:
            print(wrote(args.html))
    return OK
