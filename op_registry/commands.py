"""What `fa-compiler registry` prints. The functions return text or records; the caller prints
them."""

from __future__ import annotations

from fa_compiler.op_registry.diff import Difference, diff_paths
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.op_registry.reg_op import print_op
from fa_compiler.op_registry.registry import get, names, variants
from fa_compiler.op_registry.runtimes import SCHEMAS
from fa_compiler.op_registry.spec import OpSpec

__all__ = ["Difference", "OpSpec", "diff_paths", "facts", "list_ops", "show"]


def list_ops() -> list[OpSpec]:
    """The newest variant of every operator, sorted by name."""
    return [get(name) for name in names()]


def show(op_type: str, cann: str | None = None) -> str:
    """The REG_OP text of an operator's newest variant, or of the variant that `cann` (a CANN
    version or a variant name) chooses.

    Raises UnknownOp, UnknownVariant. Raises RegistryError for an attention operator of other
    runtimes.
    """
    if op_type in SCHEMAS:
        raise RegistryError(
            f"{op_type} is no operator of Ascend; `fa-compiler registry runtimes` prints what other runtimes take of it"
        )
    return print_op(get(op_type, cann))


def facts(op_type: str, cann: str | None = None) -> list[tuple[str, str]]:
    """What the registry knows in addition to the REG_OP text, as pairs (label, text): variant,
    sources, notes, products and the names of all variants."""
    spec = get(op_type, cann)
    lines = [
        (
            "variant",
            spec.variant
            + (f", from CANN {spec.cann}" if spec.cann else ", CANN release not known"),
        )
    ]
    lines += [("source", source) for source in spec.sources]
    lines += [("note", spec.note)] if spec.note else []
    lines += [("note", f"{attr.name}: {attr.note}") for attr in spec.attrs if attr.note]
    read = [entry.name for entry in spec.inputs if entry.value_depend]
    lines += [("read while compiling", ", ".join(read))] if read else []
    for product in spec.products:
        note = f" ({product.note})" if product.note else ""
        rows = (
            f"{len(product.rows)} combination{'s' * (len(product.rows) > 1)} of types"
            if product.rows
            else "types"
        )
        lines.append(("registered for", f"{', '.join(product.socs)}: {rows}{note}"))
    others = [
        other.variant + (f" (CANN {other.cann})" if other.cann else "")
        for other in variants(op_type)
    ]
    return [*lines, ("variants", ", ".join(others))]
