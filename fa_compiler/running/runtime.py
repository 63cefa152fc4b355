"""One session of ONNX Runtime, whose inputs and outputs are arrays by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from fa_compiler import op_registry
from fa_compiler.errors import InputError, one_line
from fa_compiler.lowering.ort import LibraryUnusable, register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS, from_ort, leave_cores, to_ort
from fa_compiler.lowering.ort.own_session import OwnSession

Array = npt.NDArray[Any]


class Session:
    """A session that raises InputError with the name of the model, whatever fails.

    Args:
        model: a path, or the bytes of a model.
        name: the name of the model for messages.
        domains: the domains that the model imports. They tell whether it needs the custom-op
            library.
        folder: the folder of the external data of a model given as bytes.
        threads: the number of threads that run an operator; 0 for ONNX Runtime's default.
        takes_turns: whether other sessions run between its runs, on the same cores.

    Raises:
        InputError: ONNX Runtime cannot load the model, or the library that it needs was not built.
    """

    def __init__(
        self,
        model: Path | bytes,
        name: str,
        domains: Iterable[str],
        folder: Path | None = None,
        threads: int = 0,
        takes_turns: bool = False,
    ) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions
        options.intra_op_num_threads = threads
        if takes_turns:
            leave_cores(options)
        if folder is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(folder)
            )
        self._name = name
        try:
            if not set(op_registry.DOMAINS).isdisjoint(domains):
                register_custom_ops(options)
            source = model if isinstance(model, bytes) else str(model)
            self._session = OwnSession(source, options, providers=["CPUExecutionProvider"])
        except LibraryUnusable as error:
            raise InputError(f"{name}: {one_line(error)}") from None
        except ORT_ERRORS as error:
            raise InputError(
                f"{name} cannot be loaded by ONNX Runtime: {one_line(error)}"
            ) from None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(output.name for output in self._session.get_outputs())

    def run(
        self, feeds: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """The outputs by name, all of them if `wanted` is None. bfloat16 is `ml_dtypes.bfloat16`.

        Raises:
            InputError: ONNX Runtime refuses the inputs or fails, or an output is no tensor of
                numbers.
        """
        names = list(self.outputs if wanted is None else wanted)
        for output in self._session.get_outputs():
            if output.name in names and not (
                output.type.startswith("tensor(") and output.type != "tensor(string)"
            ):
                raise InputError(
                    f"{self._name}: output '{output.name}' is {output.type}, which is no array of numbers"
                )
        try:
            values = self._session.run_with_ort_values(
                names, {key: to_ort(array) for key, array in feeds.items()}
            )
        except ORT_ERRORS as error:
            raise InputError(f"{self._name} fails in ONNX Runtime: {one_line(error)}") from None
        return dict(zip(names, map(from_ort, values), strict=True))
