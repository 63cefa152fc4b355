"""Which rows of the tests `make test` leaves to `make thorough`: slow ones that run nothing that others do not run.

A row is left out where at least OTHERS of the tests that stay run each block that it runs, and a quarter of the rows of
its function stay. The slowest rows go first. What a test starts as a program is not recorded, so PROGRAMS names such
rows: those beside which another row starts nearly the same program. A row that noticed a fault of a measure stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from tools.mutants.record import Record

OTHERS = 3
"""So many tests that stay run each block of one that goes."""
QUICK_S = 0.03
"""A row that takes less stays: the list would be long and save little."""
PROGRAMS = (
    "tests/face/test_cli.py::test_an_interrupt_that_comes_out_as_another_error[SIGTERM-OSError]",
    "tests/face/test_cli.py::test_output_to_standard_output[ab-/dev/fd/1]",
    "tests/face/test_cli.py::test_output_to_standard_output[wb-/proc/self/fd/1]",
    "tests/face/test_cli.py::test_closed_streams[2>&-]",
    "tests/face/test_cli.py::test_closed_streams[>&-]",
    "tests/face/test_cli.py::test_completion[fa-compiler docs run]",
    "tests/face/test_cli.py::test_completion[fa-compiler inspect model.onnx --runtime tens]",
    "tests/face/test_cli.py::test_completion[fa-compiler op]",
    "tests/face/test_cli.py::test_completion[fa-compiler optimize model.onnx --assume binary]",
    "tests/face/test_cli.py::test_signals[SIGTERM]",
    "tests/face/test_everywhere.py::test_a_process_that_does_not_end_normally_reports[a signal]",
    "tests/face/test_everywhere.py::test_a_program_whose_stderr_cannot_be_written[open(os.devnull)]",
    "tests/face/test_everywhere.py::test_one_import[import fa_compiler.everywhere; import onnxruntime as ort-]",
    "tests/face/test_everywhere.py::test_values_of_the_variable[on-FaCompilerExecutionProvider-]",
    "tests/face/test_everywhere.py::test_what_is_counted[a fused file in memory]",
    "tests/face/test_everywhere.py::test_what_is_counted[a plan in a release that does not tell who has taken nodes]",
    "tests/face/test_everywhere.py::test_what_is_counted[a plan without attention]",
    "tests/face/test_everywhere.py::test_what_is_counted[other providers afterwards]",
    "tests/face/test_everywhere.py::test_what_is_counted[the script adds it and names others]",
    "tests/face/test_provider.py::test_a_script_with_the_provider[module]",
    "tests/face/test_python.py::test_a_result_comes_back_from_another_process[ir]",
    "tests/face/test_windows.py::test_tables_in_a_pipe[cp1252--]",
)


def thinned(record: Record, noticed: Collection[str] = ()) -> list[str]:
    """The rows that `make test` may leave out, by their identifiers, sorted. `noticed` are those that stay."""
    counts = np.zeros(record.ran.shape[1] * 8, np.int64)
    for ran in record.ran:
        counts += np.unpackbits(ran)
    rows = Counter(map(_function, record.tests))
    kept = Counter(rows)
    gone = []
    by_seconds = np.argsort(-record.seconds).tolist()
    for place in sorted(by_seconds, key=lambda each: record.tests[each] not in PROGRAMS):
        test, blocks = record.tests[place], np.flatnonzero(np.unpackbits(record.ran[place]))
        function = _function(test)
        if test not in PROGRAMS:
            if record.seconds[place] < QUICK_S:
                break
            if "[" not in test or test in noticed or kept[function] - 1 < rows[function] / 4:
                continue
            if not blocks.size or not (counts[blocks] > OTHERS).all():
                continue
        counts[blocks] -= 1
        kept[function] -= 1
        gone.append(test)
    return sorted(gone)


def _function(test: str) -> str:
    return test.split("[")[0]
