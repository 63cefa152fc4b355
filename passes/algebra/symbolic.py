"""Symbolic sizes: polynomials with integer coefficients over named symbols.

A `Dim` stands for an integer that is fixed in one run of a model. `a == b` means "equal in every
run that succeeds": two dims that agree only in some runs compare unequal, so equality may be relied
upon.

An operation whose result is no polynomial makes an opaque *atom*, keyed by its expression: the same
quotient of the same dims is the same atom, so it cancels and compares like any symbol.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import all_known, without_none

_SERIAL = itertools.count()
_DEPTH = 4
"""How many minimum atoms a sign proof splits into cases before it gives up."""
_SHALLOW = ((4, _DEPTH), (8, 2), (64, 1))
"""Pairs (count, depth): for a sum of at most `count` minimum atoms, a sign proof splits at most
`depth` of them. Splitting all of them in any order would make too many cases."""
_WORK = 2048
"""The most terms that a proof looks at. Those of real models need 24."""
_PARTS = 32
"""The most sizes whose broadcast is a known size. Those of real models are up to 4."""
_MINIMA = 16
"""The most minima in a size that is simplified, each by proofs of its own. Those of real models are
up to 2."""

_LONGEST_NAME = 100
_TERMS, _PRODUCTS, _DEGREE = 256, 1024, 64
"""The most terms of a sum, the most terms of a product before equal ones are added up, and the most
atoms in a term. A result beyond these limits is an unknown size: a product of thirty sums has a
billion terms."""


class Atom:
    """A symbol, or an operation on dims that is no polynomial. Compared by identity; made by `Dim`.

    `op` is "symbol", "fresh", or one of "floor", "trunc", "mod", "fmod", "min0" (min(x, 0)) and
    "broadcast". `lower` is a proven lower bound (0 for sizes), None when the sign is unknown.
    """

    __slots__ = ("__weakref__", "args", "is_known", "lower", "name", "op", "serial")

    def __init__(self, op: str, name: str, args: tuple[Dim, ...], lower: int | None) -> None:
        self.op = op
        self.args = args
        self.lower = lower
        self.serial = next(_SERIAL)
        # Without a limit, quotients of quotients would double the name with every layer of a model.
        self.name = name
        if op != "symbol" and not 0 < len(name) <= _LONGEST_NAME:
            self.name = f"{op.removeprefix('fresh')}?{self.serial}"
        self.is_known = op != "fresh" and all(arg.is_known for arg in args)

    def __repr__(self) -> str:
        return f"Atom({self.name!r})"

    def __deepcopy__(self, memo: object) -> Atom:
        return self


_INTERNED: weakref.WeakValueDictionary[tuple[Any, ...], Atom] = weakref.WeakValueDictionary()


def _intern(op: str, key: Any, make: Callable[[], Atom]) -> Atom:
    atom = _INTERNED.get((op, key))
    if atom is None:
        atom = make()
        _INTERNED[(op, key)] = atom
    return atom


Monomial: TypeAlias = tuple[Atom, ...]


def _serial(atom: Atom) -> int:
    return atom.serial


def _order(monomial: Monomial) -> tuple[int, tuple[int, ...]]:
    """The key of a graded order of monomials. Multiplication keeps this order, as exact division
    requires."""
    return len(monomial), tuple(atom.serial for atom in monomial)


class Dim:
    """An immutable polynomial. `Dim(3)` is a constant, `Dim.symbol("B")` a size of that name."""

    __slots__ = ("_hash", "_terms")
    _terms: dict[Monomial, int]
    _hash: int | None

    def __init__(self, value: int = 0) -> None:
        self._terms = {(): int(value)} if value else {}
        self._hash = None

    @staticmethod
    def _of(terms: dict[Monomial, int]) -> Dim:
        made = Dim.__new__(Dim)
        made._terms = terms
        made._hash = None
        return made

    @staticmethod
    def _from_atom(atom: Atom) -> Dim:
        return Dim._of({(atom,): 1})

    @staticmethod
    def symbol(name: str, lower: int = 0) -> Dim:
        """The size called `name`: one symbol everywhere, for each lower bound. It is never
        negative."""
        shown = f"'{name}'" if name.startswith("?") else name
        return Dim._from_atom(
            _intern("symbol", (name, lower), lambda: Atom("symbol", shown, (), lower))
        )

    @staticmethod
    def fresh(lower: int | None = 0) -> Dim:
        """An unknown integer, equal to nothing but itself. `lower=None`: it may be negative."""
        return Dim._from_atom(Atom("fresh", "", (), lower))

    # -- inspection ---------------------------------------------------------------------------

    @property
    def const(self) -> int | None:
        """The value when it is the same in every run, else None."""
        terms = self._terms
        if not terms:
            return 0
        if len(terms) == 1:
            return terms.get(())
        return None

    @property
    def is_const(self) -> bool:
        """Whether the value is the same in every run."""
        return self.const is not None

    @property
    def atoms(self) -> frozenset[Atom]:
        """The atoms the polynomial is written in; the atoms inside an opaque atom are not
        listed."""
        return frozenset(itertools.chain.from_iterable(self._terms))

    @property
    def terms(self) -> tuple[tuple[Monomial, int], ...]:
        """The terms of the sum: each is a product of atoms, and its coefficient."""
        return tuple(self._terms.items())

    @property
    def addend(self) -> int:
        """The constant term."""
        return self._terms.get((), 0)

    @property
    def factors(self) -> tuple[int, ...]:
        """The coefficients of all terms but the constant one."""
        return tuple(factor for monomial, factor in self._terms.items() if monomial)

    @property
    def products(self) -> tuple[tuple[int, tuple[Dim, ...]], ...]:
        """The dim as a sum of products: each factor with the atoms, as dims, by which it is
        multiplied."""
        return tuple(
            (factor, tuple(map(Dim._from_atom, monomial)))
            for monomial, factor in self._terms.items()
        )

    @property
    def single_atom(self) -> Atom | None:
        """The atom when the dim is just that atom, else None."""
        if len(self._terms) == 1:
            (monomial, factor), *_ = self._terms.items()
            if factor == 1 and len(monomial) == 1:
                return monomial[0]
        return None

    @property
    def minima(self) -> list[Atom]:
        """The minima among the atoms."""
        return [atom for atom in self.atoms if atom.op == "min0"]

    @property
    def minima_alone(self) -> list[Atom]:
        """The minima that are terms of the sum by themselves, but for a coefficient."""
        return [
            monomial[0]
            for monomial in self._terms
            if len(monomial) == 1 and monomial[0].op == "min0"
        ]

    @property
    def is_known(self) -> bool:
        """Whether it is built only from constants and named sizes, nothing unknown inside."""
        return all(atom.is_known for atom in self.atoms)

    @property
    def lower(self) -> int | None:
        """A lower bound that holds in every run, or None when none is proven."""
        total = 0
        for monomial, factor in self._terms.items():
            least = 1
            for atom in monomial:
                if factor < 0 or atom.lower is None or (atom.lower < 0 and len(monomial) > 1):
                    return None
                least *= atom.lower
            total += factor * least
        return total

    @property
    def upper(self) -> int | None:
        """An upper bound that holds in every run, or None when none is proven. One is known for a
        constant and for the minimum of a constant and another size."""
        if self.const is not None:
            return self.const
        for atom in self.minima:
            other = self - Dim._from_atom(atom)
            return other.const if other.const is not None else (other + atom.args[0]).const
        return None

    def is_at_least(self, bound: int) -> bool:
        """Whether the dim is proven to be `bound` or more in every run."""
        return _proven(self, bound)

    @property
    def never_one(self) -> bool:
        """Whether the value is proven never to be 1 (so that it cannot be a broadcast axis)."""
        value = self.const
        if value is not None:
            return value != 1
        return math.gcd(*self._terms.values()) > 1 or self.is_at_least(2)

    def evaluate(self, bindings: Mapping[str, int]) -> int | None:
        """The value when every symbol has the value of its name in `bindings`; None if one is
        missing.

        Opaque atoms are computed from their operands unless `bindings` holds their printed name.
        """
        number: int | None = self._evaluated(bindings, _VALUE_OF)
        return number

    def evaluate_all(self, bindings: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """`evaluate` at several points at once: `bindings` hold the values at each. None where one
        is missing, or where a divisor is 0 at one of the points."""
        return if_known(np.asarray, self._evaluated(bindings, _VALUES_OF))

    def _evaluated(
        self, bindings: Mapping[str, Any], value_of: Mapping[str, Callable[..., Any]]
    ) -> Any:
        """The value, by the numbers or the arrays in `bindings` and by what computes with them."""
        total = 0
        for monomial, factor in self._terms.items():
            values = all_known(_evaluated_atom(atom, bindings, value_of) for atom in monomial)
            if values is None:
                return None
            total = total + functools.reduce(operator.mul, values, factor)
        return total

    def substitute(self, values: Mapping[Atom, Dim]) -> Dim:
        """The dim with atoms replaced (top level only, not inside opaque atoms)."""
        is_free = values.keys().isdisjoint
        replaced = [monomial for monomial in self._terms if not is_free(monomial)]
        if not replaced:
            return self
        total = Dim._of({m: f for m, f in self._terms.items() if is_free(m)})
        for monomial in replaced:
            term = Dim(1)
            for atom in monomial:
                by = values[atom] if atom in values else Dim._from_atom(atom)
                term = by if term == 1 else term * by
            total = total + term * self._terms[monomial]
        return total

    # -- arithmetic ---------------------------------------------------------------------------

    def __add__(self, other: Dim | int) -> Dim:
        right = _coerce(other)
        if right is None:
            return NotImplemented
        if not right._terms:
            return self
        terms = dict(self._terms)
        for monomial, factor in right._terms.items():
            total = terms.get(monomial, 0) + factor
            if total:
                terms[monomial] = total
            else:
                del terms[monomial]
        if len(terms) > _TERMS:
            return _unknown_result(self, right)
        return Dim._of(terms)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return Dim._of({monomial: -factor for monomial, factor in self._terms.items()})

    def __sub__(self, other: Dim | int) -> Dim:
        right = _coerce(other)
        return NotImplemented if right is None else self + -right

    def __rsub__(self, other: int) -> Dim:
        return -self + other

    def __mul__(self, other: Dim | int) -> Dim:
        right = _coerce(other)
        if right is None:
            return NotImplemented
        factor = right.const
        if factor is not None:
            return self._times(factor)
        degree = max(map(len, self._terms), default=0) + max(map(len, right._terms), default=0)
        if len(self._terms) * len(right._terms) > _PRODUCTS or degree > _DEGREE:
            return _unknown_result(self, right)
        terms: dict[Monomial, int] = {}
        for left_monomial, left in self._terms.items():
            for right_monomial, factor in right._terms.items():
                monomial = tuple(sorted(left_monomial + right_monomial, key=_serial))
                terms[monomial] = terms.get(monomial, 0) + left * factor
        return Dim._of({monomial: factor for monomial, factor in terms.items() if factor})

    __rmul__ = __mul__

    def _times(self, factor: int) -> Dim:
        if factor == 0:
            return Dim()
        if factor == 1:
            return self
        return Dim._of({monomial: own * factor for monomial, own in self._terms.items()})

    def exact_div(self, other: Dim | int) -> Dim | None:
        """The quotient when `self == other * quotient` holds identically, else None.

        It equals the runtime quotient in every run where `other` is not 0.
        """
        divisor = _coerce(other)
        if divisor is None or not divisor._terms:
            return None
        lead = max(divisor._terms, key=_order)
        lead_factor = divisor._terms[lead]
        rest = self
        quotient: dict[Monomial, int] = {}
        while rest._terms:
            top = max(rest._terms, key=_order)
            monomial = _divide_monomial(top, lead)
            if monomial is None or rest._terms[top] % lead_factor:
                return None
            factor = rest._terms[top] // lead_factor
            quotient[monomial] = factor
            rest = rest - divisor * Dim._of({monomial: factor})
        return Dim._of(quotient)

    @staticmethod
    def floordiv(a: Dim | int, b: Dim | int) -> Dim:
        """floor(a / b), for runs where b is not 0; an unknown integer where b is 0 in every run."""
        left, right = _need(a), _need(b)
        if right == 0:
            return Dim.fresh(None)
        exact = _exact_quotient(left, right)
        if exact is not None:
            return exact
        if right.const is not None and right.const < 0:
            left, right = -left, -right
        by = right.const
        whole = Dim(0)
        if by is not None and by > 0:
            # floor((by*q + r) / by) = q + floor(r / by) whatever the signs.
            whole, left = _split(left, by)
            inner = (left - left.addend).single_atom
            if (
                inner is not None
                and inner.op == "floor"
                and (factor := inner.args[1].const or 0) > 0
            ):
                # floor((floor(x / m) + c) / n) = floor((x + c*m) / (m*n)) for all x and c, and m
                # and n above 0.
                return whole + Dim.floordiv(inner.args[0] + left.addend * factor, by * factor)
        left, right = _reduced(left, right)
        return whole + _opaque("floor", left, right, _least_quotient(left, right))

    @staticmethod
    def ceildiv(a: Dim | int, b: Dim | int) -> Dim:
        """ceil(a / b), for runs where b is not 0."""
        return -Dim.floordiv(-_need(a), b)

    @staticmethod
    def truncdiv(a: Dim | int, b: Dim | int) -> Dim:
        """a / b rounded toward zero, as ONNX's integer Div does, for runs where b is not 0."""
        left, right = _need(a), _need(b)
        exact = _exact_quotient(left, right)
        if exact is not None:
            return exact
        if _sign(left) and _sign(right):
            return Dim.floordiv(left, right)
        return _opaque("trunc", left, right, None)

    @staticmethod
    def mod(a: Dim | int, b: Dim | int) -> Dim:
        """a modulo b with the sign of b, as ONNX's Mod (fmod=0), for runs where b is not 0."""
        left, right = _need(a), _need(b)
        if _exact_quotient(left, right) is not None:
            return Dim(0)
        by = right.const
        if by:
            left = _residue(left, abs(by))
        return _opaque("mod", left, right, 0 if _sign(right) else None)

    @staticmethod
    def fmod(a: Dim | int, b: Dim | int) -> Dim:
        """a modulo b with the sign of a, as C's % and ONNX's Mod with fmod=1."""
        left, right = _need(a), _need(b)
        if _sign(left) and _sign(right):
            return Dim.mod(left, right)
        if _exact_quotient(left, right) is not None:
            return Dim(0)
        return _opaque("fmod", left, right, None)

    @staticmethod
    def min(a: Dim | int, b: Dim | int) -> Dim:
        """The smaller of two dims, written b + min(a - b, 0) so that equal ones compare equal."""
        left, right = _need(a), _need(b)
        return right + _min0(left - right)

    @staticmethod
    def max(a: Dim | int, b: Dim | int) -> Dim:
        """The larger of two dims, written a - min(a - b, 0)."""
        left, right = _need(a), _need(b)
        return left - _min0(left - right)

    @staticmethod
    def broadcast(a: Dim | int, b: Dim | int) -> Dim:
        """The size of an axis on which sizes a and b are broadcast together.

        It is right in every run in which they can be broadcast: they are equal, or one of them
        is 1. So a constant other than 1, or any dim proven never to be 1, is the result whatever
        the other one is.
        """
        return _broadcast(_need(a), _need(b))

    @property
    def broadcast_parts(self) -> tuple[Dim, ...]:
        """The sizes whose broadcast this one is, in a fixed order; this one alone where it is no
        broadcast."""
        atom = self.single_atom
        if atom is None or atom.op != "broadcast":
            return (self,)
        return atom.args

    # -- comparison, printing -----------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            return self is other or self._terms == other._terms
        if isinstance(other, int):
            return self.const == other
        return NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            value = self.const
            self._hash = hash(frozenset(self._terms.items())) if value is None else hash(value)
        return self._hash

    def __str__(self) -> str:
        def place(monomial: Monomial) -> tuple[int, list[str]]:
            return -len(monomial), [atom.name for atom in monomial]

        text = "".join(
            _signed_text(monomial, self._terms[monomial])
            for monomial in sorted(self._terms, key=place)
        )
        if text.startswith(" - "):
            return f"-{text[3:]}"
        return text.removeprefix(" + ") or "0"

    def __repr__(self) -> str:
        return f"Dim({self})"

    def __copy__(self) -> Dim:
        return self

    def __deepcopy__(self, memo: object) -> Dim:
        return self


def _signed_text(monomial: Monomial, factor: int) -> str:
    """A term of a sum with its sign."""
    names = sorted(atom.name for atom in monomial)
    if abs(factor) != 1 or not names:
        names.insert(0, str(abs(factor)))
    sign = "-" if factor < 0 else "+"
    return f" {sign} {'*'.join(names)}"


def named(text: str) -> Dim:
    """The dim that a declared name stands for: a size of that name, or a sum, difference or product
    of names and integers as torch's exporter writes them ("s15 + 1"). Any other text is a name."""
    try:
        return _parsed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Dim.symbol(text)


_WRITTEN: Mapping[type[ast.operator], Callable[[Dim, Dim], Dim]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
"""The operators in the names of sizes."""


def _parsed(tree: ast.expr) -> Dim:
    if isinstance(tree, ast.Name):
        return Dim.symbol(tree.id)
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return Dim(tree.value)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _WRITTEN:
        return _WRITTEN[type(tree.op)](_parsed(tree.left), _parsed(tree.right))
    raise ValueError("not a polynomial of names")


@functools.lru_cache(1 << 12)
def integer(value: int) -> Dim:
    """`Dim(value)`, the same object for the same value where it can be."""
    return Dim(value)


def consts(sizes: Iterable[Dim]) -> list[int | None]:
    """The sizes as numbers, None for those that are not known before the run."""
    return [size.const for size in sizes]


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dims: the element count of a shape."""
    total = Dim(1)
    for dim in dims:
        total = total * dim
    return total


def _unknown_result(*dims: Dim) -> Dim:
    """An unknown integer. It is not negative if none of the dims is from which it is computed."""
    lowers = [dim.lower for dim in dims]
    never_negative = all(lower is not None and lower >= 0 for lower in lowers)
    return Dim.fresh(0 if never_negative else None)


def _coerce(value: object) -> Dim | None:
    if isinstance(value, Dim):
        return value
    if not isinstance(value, int):
        return None
    return Dim(value)


def _need(value: Dim | int) -> Dim:
    return value if isinstance(value, Dim) else Dim(value)


def _sign(dim: Dim) -> bool:
    return dim.is_at_least(0)


@functools.lru_cache(1 << 12)
def _proven(dim: Dim, bound: int) -> bool:
    return _Proof().at_least(dim, bound, _DEPTH)


class _Proof:
    """One proof that a dim is at least a number.

    Minima may be split in any order, and different orders lead to the same dims, so the proof
    remembers its answers. A proof that looks at more than `_WORK` terms is given up.
    """

    __slots__ = ("answers", "work")

    def __init__(self) -> None:
        self.answers: dict[tuple[Dim, int, int], bool] = {}
        self.work = 0

    def at_least(self, dim: Dim, bound: int, depth: int) -> bool:
        """Whether the dim is proven to be `bound` or more, if at most `depth` minima are split into
        cases."""
        lower = dim.lower
        if lower is not None and lower >= bound:
            return True
        if depth == 0:
            return False
        minima = dim.minima_alone
        depth = min(depth, next((splits for count, splits in _SHALLOW if len(minima) <= count), 0))
        if depth == 0 or not minima:
            return False
        key = (dim, bound, depth)
        if key not in self.answers:
            self.answers[key] = any(self._splits(dim, atom, bound, depth - 1) for atom in minima)
        return self.answers[key]

    def _splits(self, dim: Dim, atom: Atom, bound: int, depth: int) -> bool:
        """Whether the two cases of a minimum prove the bound.

        min(x, 0) is x or 0, so the dim is one of two cases; both must prove the bound. One of them
        is enough where the dim falls as the minimum grows: the minimum is at most x and at most 0,
        so the dim is at least each case.
        """
        self.work += len(dim._terms) + len(atom.args[0]._terms)
        if self.work > _WORK:
            return False
        cases = (
            self.at_least(dim.substitute({atom: value}), bound, depth)
            for value in (Dim(0), atom.args[0])
        )
        return any(cases) if self._falls(dim, atom, depth) else all(cases)

    def _falls(self, dim: Dim, atom: Atom, depth: int) -> bool:
        """Whether the dim is linear in the atom, with a coefficient that is proven never to be
        positive.

        The coefficient is all that the atom is multiplied by, other atoms included: that of u in
        s*u - u is s - 1.
        """
        coefficient: dict[Monomial, int] = {}
        for monomial, factor in dim._terms.items():
            rest = _divide_monomial(monomial, (atom,))
            if rest is not None:
                if atom in rest:
                    return False
                coefficient[rest] = -factor
        return self.at_least(Dim._of(coefficient), 0, depth)


def _divide_monomial(top: Monomial, by: Monomial) -> Monomial | None:
    rest = list(top)
    for atom in by:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _least_quotient(a: Dim, b: Dim) -> int | None:
    """A lower bound of floor(a / b), None when none is proven."""
    least, by = a.lower, b.const
    if least is not None and by is not None and by > 0:
        return least // by
    if _sign(a) and _sign(b):
        return 0
    return None


def _reduced(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """a and b without their common factors, which are not 0 where b is not."""
    factor = math.gcd(*a._terms.values(), *b._terms.values())
    monomials = [*a._terms, *b._terms]
    common = functools.reduce(operator.and_, map(Counter, monomials), Counter(*monomials[:1]))
    if factor in (0, 1) and not common:
        return a, b
    by = Dim._of({tuple(common.elements()): factor})
    return a.exact_div(by) or a, b.exact_div(by) or b


def _split(dim: Dim, by: int) -> tuple[Dim, Dim]:
    """(q, r) with dim = by*q + r and the coefficients of r in 0..by-1."""
    whole = {m: f // by for m, f in dim._terms.items() if f // by}
    rest = {m: f % by for m, f in dim._terms.items() if f % by}
    return Dim._of(whole), Dim._of(rest)


def _residue(dim: Dim, by: int) -> Dim:
    """A dim that is equal modulo `by`, its coefficients in 0..by-1. A remainder of a division by a
    multiple of `by` is equal to what was divided."""
    while remainders := {atom: atom.args[0] for atom in dim.atoms if _divides_remainder(atom, by)}:
        dim = _split(dim.substitute(remainders), by)[1]
    return _split(dim, by)[1]


def _divides_remainder(atom: Atom, by: int) -> bool:
    """Is the atom a remainder of a division by a multiple of `by`?"""
    return (
        atom.op in ("mod", "fmod")
        and atom.args[1].const is not None
        and atom.args[1].const % by == 0
    )


def _exact_quotient(left: Dim, right: Dim) -> Dim | None:
    """The quotient in every run where `right` is not 0; None where none is exact.

    A floor(x / n) is x / n where n divides x: padded // (padded // 4) is 4 where `padded` is a
    multiple of 4.
    """
    exact = left.exact_div(right)
    floors = [atom for atom in right.atoms if atom.op == "floor" and right._terms.get((atom,)) == 1]
    if exact is not None or len(floors) != 1:
        return exact
    x, by = floors[0].args
    if not by.const or Dim.mod(x, by) != 0:
        return None
    multiple = (right - Dim._from_atom(floors[0])) * by + x
    times = left.exact_div(multiple)
    return None if times is None else times * by


_TEXT = {
    "floor": "({})//({})",
    "trunc": "trunc(({})/({}))",
    "mod": "({}) % ({})",
    "fmod": "fmod({}, {})",
}
"""How divisions are written."""


def _opaque(op: str, left: Dim, right: Dim, lower: int | None) -> Dim:
    """A division: its number where the operands are numbers, else an atom."""
    dividend, divisor = left.const, right.const
    if dividend is not None and divisor:
        return Dim(_VALUE_OF[op](dividend, divisor))

    def make() -> Atom:
        return Atom(op, "(" + _TEXT[op].format(left, right) + ")", (left, right), lower)

    return Dim._from_atom(_intern(op, (left, right), make))


def _min0(x: Dim) -> Dim:
    """min(x, 0). One of x and -x is the canonical operand: min(-x, 0) = min(x, 0) - x."""
    if x.is_at_least(0):
        return Dim(0)
    if (-x).is_at_least(0):
        return x
    if x._terms[max(x._terms, key=_order)] < 0:
        return (_min0_of_unit(-x) or _min0_atom(-x)) + x
    return _min0_of_unit(x) or _min0_atom(x)


def _min0_of_unit(x: Dim) -> Dim | None:
    """min(x, 0) of an x that holds u = min(s - 1, 0) for a size s, or None. This u is -1 if s is 0,
    and else 0.

    Let x not be negative for s >= 1, and be the constant c < 0 for s = 0. Then min(x, 0) is -c*u.
    Such lengths come from slices like x[:, :1] beside x[:, 1:].
    """
    for unit in x.atoms:
        size = _size_of_unit(unit)
        if size is not None:
            one_or_more = x.substitute({size: Dim._from_atom(size) + 1, unit: Dim(0)})
            none = x.substitute({size: Dim(0), unit: Dim(-1)}).const
            if one_or_more.is_at_least(0) and none is not None and size not in _inside(x, unit):
                return Dim._from_atom(unit) * max(-none, 0)
    return None


def _size_of_unit(unit: Atom) -> Atom | None:
    """The size s of min(s - 1, 0); None for other atoms."""
    if unit.op != "min0":
        return None
    size = (unit.args[0] + 1).single_atom
    if size is not None and size.lower is not None and size.lower >= 0:
        return size
    return None


def _inside(x: Dim, besides: Atom) -> frozenset[Atom]:
    """The atoms that occur inside opaque atoms of x other than `besides`."""
    inside: set[Atom] = set()
    waiting = [atom for atom in x.atoms if atom is not besides]
    while waiting:
        new = {atom for arg in waiting.pop().args for atom in arg.atoms} - inside
        inside |= new
        waiting.extend(new)
    return frozenset(inside)


def _min0_atom(x: Dim) -> Dim:
    lower = x.lower
    atom = _intern("min0", x, lambda: Atom("min0", f"min({x}, 0)", (x,), lower))
    return Dim._from_atom(atom)


def _broadcast(a: Dim, b: Dim) -> Dim:
    # Both are sizes of tensors of the run, so neither is negative.
    a, b = simplify_given(a, (b,)), simplify_given(b, (a,))
    if a == b or b == 1:
        return a
    if a == 1 or b.never_one:
        # A constant is preferred: it says more than an expression that must equal it.
        return a if a.is_const and a != 1 else b
    if a.never_one or _is_least_of(b, a):
        return a
    if _is_least_of(a, b):
        return b
    parts = frozenset((*a.broadcast_parts, *b.broadcast_parts))
    if len(parts) == 1:
        return next(iter(parts))
    if len(parts) > _PARTS:
        return Dim.fresh()

    def make() -> Atom:
        ordered = tuple(sorted(parts, key=str))
        return Atom("broadcast", f"broadcast({', '.join(map(str, ordered))})", ordered, 0)

    return Dim._from_atom(_intern("broadcast", parts, make))


def _is_least_of(least: Dim, dim: Dim) -> bool:
    """Whether `least` is min(dim, t) for a t that is 1 or more, or a size.

    Then `least` and `dim` broadcast together give dim: if t < dim, then t is 1, or dim is 1 and t
    is 0 (such runs are left out). A mask of declared length t sliced to the key length is such a
    size.
    """
    # The operand of the minimum is dim - t or t - dim.
    others = [other for atom in least.minima for other in (dim - atom.args[0], dim + atom.args[0])]
    return any(
        other.is_at_least(0) and other != 0 and least == Dim.min(dim, other) for other in others
    )


def cap_of(capped: Dim, dim: Dim) -> int | None:
    """The constant c >= 2 when `capped` is min(dim, c), else None.

    min(dim, c) broadcasts with dim only in runs where dim <= c. In other runs c meets a larger
    size, and neither of them is 1. A window sliced from a constant triangle is such a size.
    """
    caps = without_none(consts(dim - atom.args[0] for atom in capped.minima))
    return next((cap for cap in caps if cap >= 2 and capped == Dim.min(dim, cap)), None)


def simplify_given(size: Dim, known: Iterable[Dim]) -> Dim:
    """The size in runs in which none of `known` is negative. In such runs min(x, 0) may be known to
    be 0 or x."""
    known = tuple(known)
    minima = size.minima
    if len(minima) > _MINIMA:
        return size
    for atom in minima:
        x = atom.args[0]
        if any((x - least).is_at_least(0) for least in known):
            size = size.substitute({atom: Dim(0)})
        elif any((-x - least).is_at_least(0) for least in known):
            size = size.substitute({atom: x})
    return size


def zero_minimum(dim: Dim) -> dict[Atom, Dim]:
    """The value of a minimum in runs in which a multiple of it, the dim, is 0; empty for other
    dims.

    Where a multiple of min(x, 0) is 0, min(x, 0) is 0. A multiple of min(-x, 0) is written with
    min(x, 0) - x: where this is 0, min(x, 0) is x.
    """
    for atom in dim.minima_alone:
        factor = dim._terms[(atom,)]
        rest = dim - Dim._from_atom(atom) * factor
        for value in (Dim(0), atom.args[0]):
            if rest == value * -factor:
                return {atom: value}
    return {}


def _evaluated_atom(
    atom: Atom, bindings: Mapping[str, Any], value_of: Mapping[str, Callable[..., Any]]
) -> Any:
    """The value of an atom; None where an operand is missing, or a divisor is 0."""
    if atom.name in bindings:
        return bindings[atom.name]
    values = all_known(arg._evaluated(bindings, value_of) for arg in atom.args)
    if not values or (atom.op in _TEXT and not np.all(values[1])):
        return None
    return value_of[atom.op](*values)


def _truncated(left: int, right: int) -> int:
    """left / right rounded toward zero; `right` is not 0."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    """What is left of `left`, with its sign, after division by `right`, which is not 0."""
    return left - right * _truncated(left, right)


_VALUE_OF: Mapping[str, Callable[..., int]] = {
    "min0": lambda value: min(value, 0),
    "broadcast": lambda *sizes: next((size for size in sizes if size != 1), 1),
    "floor": operator.floordiv,
    "mod": operator.mod,
    "trunc": _truncated,
    "fmod": _remainder,
}
"""The value of an atom, given those of its operands. No divisor is 0."""


_VALUES_OF: Mapping[str, Callable[..., np.ndarray]] = {
    "min0": lambda values: np.minimum(values, 0),
    "broadcast": lambda *sizes: functools.reduce(
        lambda one, other: np.where(one == 1, other, one), sizes
    ),
    "floor": np.floor_divide,
    "mod": np.mod,
    "trunc": lambda left, right: (left - np.fmod(left, right)) // right,
    "fmod": np.fmod,
}
"""`_VALUE_OF` of arrays."""
