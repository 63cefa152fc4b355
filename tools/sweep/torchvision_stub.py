"""Lets collections be imported that name torchvision, whose transforms of images no export reads.

torchvision has to fit torch's build exactly, so the sweep does without it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Attributes(type):
    """Gives a class every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything(metaclass=_Attributes):
    """Stands for each class, function and constant. It is a class itself, so it can be a base."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> _Anything:
        return self


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Finder:
    """Finds torchvision and everything below it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder, is_package=True) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def install() -> None:
    """From now on `import torchvision` gives the stand-in."""
    sys.meta_path.append(_Finder)  # type: ignore[arg-type]
