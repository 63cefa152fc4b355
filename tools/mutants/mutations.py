"""Small faults to put into the sources, one at a time.

    kind        what is changed
    compare     == and !=, < and <=, > and >=, in and not in, is and is not
    connect     and and or, any and all, min and max
    negate      the condition of an if, a conditional expression or a comprehension; a `not` is dropped
    number      a whole number is one more, a float twice as much and one more, True and False
    name        a string that is an identifier (an operator, an attribute, a dtype) gets one more letter
    arithmetic  + and -, * and //, / becomes *, % becomes //, & and |
    drop        a raise, continue, break, call, yield or augmented assignment is left out
    return      None is returned in place of a value
    swap        the first two positional arguments of a call change places

Only what runs inside functions is changed. Left out are annotations, decorators, default values, assertions, f-strings
and the words of exceptions.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

from tools.mutants.blocks import Block, all_blocks, blocks, bodies, sources

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CONNECTED = {"any": "all", "all": "any", "min": "max", "max": "min"}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_DROPPED = (ast.Raise, ast.Continue, ast.Break, ast.AugAssign)
_NO_CHECK = ("NotImplementedError", "AssertionError", "InternalError")

Change = tuple[str, Callable[[], object]]
"""Its kind, and what makes it in the tree."""


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, and how the statement reads with it."""

    file: str
    index: int
    """Among those of its file."""
    line: int
    function: str
    kind: str
    text: str
    block: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def _expressions(node: ast.AST) -> Iterator[ast.expr | ast.comprehension]:
    """The expressions of a statement that are its own, in order."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "decorator_list", "returns", "args"} and isinstance(
            node, ast.stmt | ast.arguments | ast.Lambda
        ):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.JoinedStr | ast.stmt | ast.excepthandler | ast.match_case):
                continue
            if isinstance(part, ast.expr | ast.comprehension):
                yield part
            if isinstance(part, ast.AST):
                yield from _expressions(part)


def _negate(owner: ast.AST, name: str, position: int | None = None) -> None:
    """Put `not` before an expression."""
    if position is None:
        setattr(owner, name, ast.UnaryOp(ast.Not(), getattr(owner, name)))
    else:
        getattr(owner, name)[position] = ast.UnaryOp(ast.Not(), getattr(owner, name)[position])


def _of_expression(node: ast.expr | ast.comprehension) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=ops):
            for position, op in enumerate(ops):
                yield "compare", partial(ops.__setitem__, position, _COMPARED[type(op)]())
        case ast.BoolOp(op=op):
            yield "connect", partial(setattr, node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Name(id=name) if name in _CONNECTED:
            yield "connect", partial(setattr, node, "id", _CONNECTED[name])
        case ast.UnaryOp(op=ast.Not()):
            yield "negate", partial(_negate, node, "operand")
        case ast.IfExp():
            yield "negate", partial(_negate, node, "test")
        case ast.comprehension(ifs=ifs):
            for position in range(len(ifs)):
                yield "negate", partial(_negate, node, "ifs", position)
        case ast.Constant(value=bool(value)):
            yield "number", partial(setattr, node, "value", not value)
        case ast.Constant(value=int(value)):
            yield "number", partial(setattr, node, "value", value + 1)
        case ast.Constant(value=float(value)):
            yield "number", partial(setattr, node, "value", 2 * value + 1)
        case ast.Constant(value=str(value)) if _IDENTIFIER.fullmatch(value):
            yield "name", partial(setattr, node, "value", f"{value}_")
        case ast.BinOp(op=op) if type(op) in _COMPUTED:
            yield "arithmetic", partial(setattr, node, "op", _COMPUTED[type(op)]())
        case ast.Call(args=[ast.expr() as first, ast.expr() as second, *_], func=func):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and not (isinstance(func, ast.Name) and func.id in {"isinstance", "max", "min", "cast"}):
                yield "swap", partial(node.args.__setitem__, slice(0, 2), [second, first])


def _of_statement(body: list[ast.stmt], position: int) -> Iterator[Change]:
    statement = body[position]
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return
    is_call = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Raise) and any(word in ast.unparse(statement) for word in _NO_CHECK):
        return
    if is_call or isinstance(statement, _DROPPED):
        yield "drop", partial(body.__setitem__, position, ast.copy_location(ast.Pass(), statement))
    if isinstance(statement, ast.Raise):
        return
    if isinstance(statement, ast.Return) and statement.value is not None and not _is_none(statement.value):
        yield "return", partial(setattr, statement, "value", ast.Constant(None))
    if isinstance(statement, ast.If):
        yield "negate", partial(_negate, statement, "test")
    for node in _expressions(statement):
        yield from _of_expression(node)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _functions(body: Sequence[ast.stmt], name: str = "") -> Iterator[tuple[int, str]]:
    """The functions and the lines at which their statements are."""
    for node in ast.walk(ast.Module(list(body), [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                yield line, node.name


def _changes(file: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, list[ast.stmt], int, int, Change]]:
    """All changes of a tree: the statement, its list and position in it, its block, and the change."""
    numbers = all_blocks()
    for body, positions in list(blocks(tree.body)):
        for position, statement in enumerate(body):
            before = [start for start in positions if start <= position]
            if before:
                block: Block = file, body[before[-1]].lineno
                for change in list(_of_statement(body, position)):
                    yield statement, body, position, numbers[block], change


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file."""
    tree = ast.parse(sources()[file])
    functions = dict(_functions(tree.body))  # the innermost comes last
    texts: dict[ast.stmt, str] = {}
    made = []
    for index, (statement, _, _, block, (kind, _)) in enumerate(_changes(file, tree)):
        if statement not in texts:
            texts[statement] = _head(statement)
        line = statement.lineno
        made.append(Mutant(file, index, line, functions.get(line, ""), kind, texts[statement], block))
    return made


def _head(statement: ast.stmt) -> str:
    """Its first line, without the statements below it."""
    if any(True for _ in bodies(statement)):
        fields = dict(ast.iter_fields(statement))
        empty = {name: [] for name in ("orelse", "finalbody", "handlers", "cases") if name in fields}
        statement = type(statement)(**fields | empty | ({"body": [ast.Pass()]} if "body" in fields else {}))
    return ast.unparse(ast.fix_missing_locations(statement)).splitlines()[0][:120]


def mutated(mutant: Mutant) -> tuple[ast.Module, str]:
    """The tree of its file with the fault in it, and how the statement reads then."""
    tree = ast.parse(sources()[mutant.file])
    for index, (_, body, position, _, (_, change)) in enumerate(_changes(mutant.file, tree)):
        if index == mutant.index:
            change()
            return ast.fix_missing_locations(tree), _head(body[position])
    raise AssertionError("the mutant is of other sources")


def drawn(seed: int, covered: Set[int], count: int, only: str = "") -> list[Mutant]:
    """A sample of the mutants of covered blocks, at most one of a block, in an order that depends on the seed and on
    their texts only. `only` is a part of the paths of files."""
    files = [file for file in sources() if only in file]
    candidates = [mutant for file in files for mutant in mutants(file) if mutant.block in covered]
    twins: dict[str, int] = {}
    placed = []
    for mutant in candidates:
        text = f"{seed} {mutant.function} {mutant.kind} {mutant.text}"
        twins[text] = twins.get(text, 0) + 1
        placed.append((hashlib.sha256(f"{text} {twins[text]}".encode()).digest(), mutant))
    sample: dict[int, Mutant] = {}
    for _, mutant in sorted(placed, key=lambda pair: pair[0]):
        sample.setdefault(mutant.block, mutant)
    return list(sample.values())[:count]
