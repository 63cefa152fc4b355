"""The references, one file for each operator. Importing this package registers all of them, by
`operator` (call.py)."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
