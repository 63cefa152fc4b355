"""Keys in parts (PEGASUS-X, BigBird): one product takes the place of several. The scores of the
parts are joined by Concat, and the products of parts of the probabilities with parts of the values
are added.

    scores = torch.cat([q @ global_k.T, q @ block_k.T], -1) * c
    p = scores.softmax(-1)
    output = p[..., :g] @ global_v + p[..., g:] @ block_v

Grammar; the code cites the numbers of the cases:

    scores := above
      1     | any(scores, ...)                         a step of ABOVE: whatever it does, it is done
                                        to all scores
    above :=
      2     Concat(part, part, ...)                    along the last axis, the keys
    part :=
      3     scaled | Add(scaled, t)
    scaled :=
      4     product(query, keys) | Mul(product, c) | Div(product, c)
                                        the same query and c in all parts
    emitted
      5     Add(Mul(product(query, Concat(keys)), c), Concat(t))             0 for a part without t

    output :=
      6     product(cut, values) | Add(output, output)
    cut :=
      7     Slice(probabilities) | Split(probabilities)         the cuts follow each other and leave
                                        out no key
    emitted
      8     product(probabilities, Concat(values))

A product with joined keys holds the products with its parts side by side, and a product with joined
values is the sum of those with its parts. So only the order of additions changes, as in every
fusion. No sum of some of the keys may overflow, because probabilities weight the values. A t is
added to the same scores as before, and where it lacks dimensions, or has size 1 along them, it is
repeated, as Add repeats it. Keys and values are repeated in the same way, such as global keys that
every block of PEGASUS-X attends.

Repeating and joining copies keys and values, once for all rows of a batch entry. Its time beside
that of the parts, on one core, with heads of 64:

    16 rows, 64 keys                    1.2
    32 rows, 64 keys                    0.9
    64 rows, 512 keys (BigBird)         0.8
    512 rows, 640 keys (PEGASUS-X)      0.4

So parts of fewer rows than FEW_ROWS stay as they are.

Refused: queries that are not the same value. LUKE has four products, by the kinds of query and key.
One product of all needs [q1, q2] [k, 0] and [q1, q2] [0, k], heads of twice the size. For 12 heads
of 64, and 64 to 512 words beside 8 to 32 entities, this took 1.1 to 1.6 times as long as the four.

The change is a trial: it is kept if the ordinary matcher then takes the attention
(substitutions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    all_known,
    all_ops,
    certain,
    data_readers,
    first,
    inputs_of,
    is_op,
    only_reader,
    operand_at,
    operand_orders,
    operands,
    outputs_of,
    sole,
    without_none,
)
from fa_compiler.passes.layout.contraction import Contraction, contraction
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.factors import factorings
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.parts import concat_of, start_along
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match_at
from fa_compiler.passes.values.shapes import ShapeInfo

ABOVE = (*FOUR_OPERATIONS, "Where", "Cast", "Identity", "Max", "Clip")
"""Case 1: element-wise steps between the joined scores and the softmax."""
MAX_STEPS = 8
FEW_ROWS = 32
FEW = "keys in parts: keys and values would be joined for each {} rows, which takes longer than to compute the parts"
ONE = Dim(1)


@dataclass(frozen=True)
class Operand:
    """An operand of a product: its dimensions in the order `wanted` are those at `places`, None
    where it has none."""

    value: ir.Value
    places: tuple[int | None, ...]

    @staticmethod
    def of(product: Contraction, side: int, wanted: Sequence[str]) -> Operand:
        """The operand of a product by its labels."""
        labels = product.labels[side]
        places = {label: labels.index(label) for label in labels}
        return Operand(product.operands[side], tuple(map(places.get, wanted)))

    @staticmethod
    def behind(value: ir.Value, rank: int, info: ShapeInfo) -> Operand:
        """A value whose dimensions are the last ones of so many."""
        missing = rank - len(info.sizes(value))
        return Operand(value, (*[None] * missing, *range(rank - missing)))

    def sizes(self, info: ShapeInfo) -> Shape:
        """The sizes in the wanted order, 1 where it has no dimension."""
        shape = info.sizes(self.value)
        return tuple(ONE if place is None else shape[place] for place in self.places)

    def arranged(self, builder: Builder) -> ir.Value:
        """The value with its dimensions in the wanted order, with size 1 where it has none."""
        own = tuple(without_none(self.places))
        value = self.value
        if own != tuple(range(len(own))):
            value = builder.transpose(value, own)
        return builder.unsqueeze(
            value, [at for at, place in enumerate(self.places) if place is None]
        )


@dataclass(frozen=True)
class Joined:
    """Operands that are joined along one dimension, after each of them is repeated to `sizes` along
    the others.

    `lengths` are their sizes along the joined dimension. An operand that is shorter is repeated
    there, too.
    """

    operands: tuple[Operand, ...]
    along: int
    sizes: Shape
    lengths: Shape

    @staticmethod
    def of(
        operands: Sequence[Operand], along: int, info: ShapeInfo, lengths: Shape | None = None
    ) -> Joined | None:
        """None where sizes are not proven to fit."""
        given = [operand.sizes(info) for operand in operands]
        longest = lengths or tuple(sizes[along] for sizes in given)
        if any(
            sizes[along] not in (length, ONE) for sizes, length in zip(given, longest, strict=True)
        ):
            return None
        common: list[Dim] = []
        for place, sizes in enumerate(zip(*given, strict=True)):
            larger = set(sizes) - {ONE}
            if place == along:
                larger.clear()
            if len(larger) > 1:
                return None
            common.append(next(iter(larger), ONE))
        return Joined(tuple(operands), along, tuple(common), longest)

    def emitted(self, measured: Sequence[Operand], builder: Builder) -> ir.Value:
        """The joined value. Sizes of the run are those of these operands, too, which may stand
        beside them."""
        parts: list[ir.Value] = []
        for operand, length in zip(self.operands, self.lengths, strict=True):
            wanted = (*self.sizes[: self.along], length, *self.sizes[self.along + 1 :])
            parts.append(self._repeated(operand, wanted, measured, builder))
        return builder.concat(parts, self.along)

    def _repeated(
        self, operand: Operand, wanted: Shape, measured: Sequence[Operand], builder: Builder
    ) -> ir.Value:
        value, own = operand.arranged(builder), operand.sizes(builder.info)
        if own == wanted:
            return value
        repeats = (ONE if size == have else size for have, size in zip(own, wanted, strict=True))
        vector = [_size(size, [*self.operands, *measured], builder) for size in repeats]
        target = builder.concat(vector, 0)
        return builder.expand(value, target)


@dataclass(frozen=True)
class JoinedScores:
    """Cases 2 to 5: `whole` is the Concat; `number` multiplies all products."""

    whole: ir.Value
    query: Operand
    keys: Joined
    number: float
    terms: Joined | None
    code: ClassVar[Code] = Code.SCORE_TERM

    def emitted(self, builder: Builder) -> ir.Value:
        """Case 5."""
        dtype, rank = certain(builder.info.dtype(self.whole)), len(self.query.places)
        keys = self.keys.emitted((), builder)
        turned = builder.transpose(keys, (*range(rank - 2), rank - 1, rank - 2))
        scores = builder.matmul(self.query.arranged(builder), turned)
        if self.number != 1.0:
            scores = builder.mul(
                scores, builder.constant(np.array(self.number, dtype.numpy()), "scale")
            )
        if self.terms is not None:
            last = [
                Operand(key.value, (*key.places[:-2], None, key.places[-2]))
                for key in self.keys.operands
            ]
            scores = builder.add(scores, self.terms.emitted(last, builder))
        return scores


@dataclass(frozen=True)
class JoinedValues:
    """Cases 6 to 8: `whole` is the sum of the products."""

    whole: ir.Value
    probabilities: ir.Value
    values: Joined
    code: ClassVar[Code] = Code.PROBABILITY_TERM

    def emitted(self, builder: Builder) -> ir.Value:
        """Case 8."""
        values = self.values.emitted((), builder)
        return builder.matmul(self.probabilities, values)


def join_keys(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Join the keys and the values of softmaxes whose keys are in parts, where the attention then
    matches. An attention of few rows is declined. The graph stays as it is where there are none."""
    result, info = Substitutions(), matcher.facts.info
    for anchor in softmaxes:
        with Trial(new_builder()) as trial:
            values, scores = (
                _joined_values(anchor, info),
                _joined_scores(anchor, trial.builder, info),
            )
            joined: list[JoinedValues | JoinedScores] = without_none((values, scores))
            if not joined:
                continue
            trial.replace(*((side.whole, side.emitted(trial.builder)) for side in joined))
            if not is_match_at(anchor.node, matcher):
                continue
            if (few := _why_too_few_rows(joined[0], anchor, info)) is not None:
                result.declined[anchor.node] = few
            elif (change := trial.keep()) is not None:
                result.add(Substitution(change), anchor.node)
    return result


def _why_too_few_rows(
    joined: JoinedScores | JoinedValues, anchor: SoftmaxAnchor, info: ShapeInfo
) -> Decline | None:
    rows = (info.shape(anchor.output) or (ONE, ONE))[-2].const
    if rows is None or rows >= FEW_ROWS:
        return None
    return Decline(joined.code, FEW.format(rows), joined.whole.producer(), "")


def _joined_scores(anchor: SoftmaxAnchor, builder: Builder, info: ShapeInfo) -> JoinedScores | None:
    """Cases 1 to 4."""
    whole = _concat_above(anchor.scores, info, MAX_STEPS)
    if whole is None:
        return None
    rank, parts = len(info.sizes(whole)), _parts_of(whole, info)
    if not parts or anchor.axes != (rank - 1,):
        return None
    keys = Joined.of([part.keys for part in parts], rank - 2, info)
    if keys is None:
        return None
    terms = None
    if any(part.term for part in parts):
        terms = _joined_terms(parts, keys, rank, builder, info)
        if terms is None:
            return None
    return JoinedScores(whole, parts[0].query, keys, parts[0].number, terms)


def _parts_of(whole: ir.Value, info: ShapeInfo) -> list[_Part]:
    """Cases 3 and 4: the parts that are joined, all of one query and one number; none where there
    are other parts."""
    parts = all_known(_score_part(value, info) for value in operands(whole.producer())) or []
    return parts if len({(part.query, part.number) for part in parts}) == 1 else []


def _concat_above(value: ir.Value, info: ShapeInfo, steps: int) -> ir.Value | None:
    """Cases 1 and 2: the joined scores."""
    node, shape = value.producer(), info.sizes(value)
    if node is None or len(shape) < 2 or only_reader(value) is None:
        return None
    if (joined := concat_of(node, info)) is not None:
        return value if joined.is_last and len(joined.parts) > 1 else None
    if not is_op(node, *ABOVE) or steps == 0:
        return None
    return first([_concat_above(operand, info, steps - 1) for operand in inputs_of(node)])


@dataclass(frozen=True)
class _Part:
    """Cases 3 and 4."""

    query: Operand
    keys: Operand
    number: float
    term: ir.Value | None


def _score_part(value: ir.Value, info: ShapeInfo) -> _Part | None:
    """A part of the scores, which nothing else reads."""
    if only_reader(value) is None:
        return None
    node = value.producer()
    summands = operand_orders(node, "Add")
    for scaled, term in ((value, None), *summands):
        product = _scaled_product(scaled, info)
        if product is not None:
            return _query_and_keys(*product, term, info.sizes(value), info)
    return None


def _scaled_product(value: ir.Value, info: ShapeInfo) -> tuple[Contraction, float] | None:
    """Case 4: the product, and what multiplies it."""
    node = value.producer()
    if only_reader(value) is None:
        return None
    if (product := contraction(node, info)) is not None:
        return product, product.factor
    for inner, number, divides in factorings(node):
        scalar = info.scalar(number)
        product = contraction(_sole_maker(inner), info)
        if product is None or scalar is None or info.shape(product.output) != info.shape(value):
            continue
        if not divides:
            return product, product.factor * scalar
        return (product, product.factor / scalar) if scalar != 0.0 else None
    return None


def _sole_maker(value: ir.Value) -> ir.Node | None:
    """The node that makes a value which only one node reads; None for other values."""
    return None if only_reader(value) is None else value.producer()


def _query_and_keys(
    product: Contraction, number: float, term: ir.Value | None, shape: Shape, info: ShapeInfo
) -> _Part | None:
    """A product of a query with keys along the last dimension, and its term."""
    if not 2 <= len(product.out) == len(shape):
        return None
    row, key = product.out[-2:]
    side = int(key not in product.labels[1])
    if (
        key in product.labels[side]
        or row in product.labels[1 - side]
        or row not in product.labels[side]
    ):
        return None
    (summed,) = product.summed
    query = Operand.of(product, side, (*product.out[:-1], summed))
    keys = Operand.of(product, 1 - side, (*product.out[:-2], key, summed))
    if term is not None and not 0 < len(info.sizes(term)) <= len(shape):
        return None
    return _Part(query, keys, number, term)


def _joined_terms(
    parts: Sequence[_Part], keys: Joined, rank: int, builder: Builder, info: ShapeInfo
) -> Joined | None:
    """Case 5: the terms of all parts, 0 where one has none."""
    dtype, zero = info.dtype(parts[0].keys.value), ABSENT
    if dtype is None:
        return None
    if not all(part.term for part in parts):
        zero = builder.constant(np.zeros((1,), dtype.numpy()), "zero")
    operands = [Operand.behind(part.term or zero, rank, info) for part in parts]
    return Joined.of(operands, rank - 1, info, keys.lengths)


def _joined_values(anchor: SoftmaxAnchor, info: ShapeInfo) -> JoinedValues | None:
    """Cases 6 and 7."""
    probabilities, shape = anchor.output, info.shape(anchor.output)
    readers = data_readers(probabilities)
    cuts = outputs_of(readers)
    if not shape or len(cuts) < 2 or not all_ops(readers, "Slice", "Split"):
        return None
    products = _products(_in_order(cuts, probabilities, shape, info), info)
    whole = _sum_of([product.output for product in products])
    operands = all_known(_values_beside(product, cuts) for product in products)
    values = None if operands is None else Joined.of(operands, len(shape) - 2, info)
    return None if whole is None or values is None else JoinedValues(whole, probabilities, values)


def _products(cuts: Sequence[ir.Value], info: ShapeInfo) -> list[Contraction]:
    """Case 6: the products that read these cuts, one for each; none where one is missing."""
    products = all_known(contraction(only_reader(cut), info) for cut in cuts) or []
    ranks = [len(info.sizes(cut)) for cut in cuts]
    alone = len({product.node for product in products}) == len(cuts)
    return products if alone and [len(product.out) for product in products] == ranks else []


def _values_beside(product: Contraction, cuts: Sequence[ir.Value]) -> Operand | None:
    """Case 6: the values of a product with one of these cuts of the probabilities; None where the
    product is scaled, or has its rows or keys elsewhere."""
    side = int(product.operands[0] not in cuts)
    (summed,) = product.summed
    if product.labels[side] != (*product.out[:-1], summed) or product.factor != 1.0:
        return None
    if (
        product.out[-1] not in product.labels[1 - side]
        or product.out[-2] in product.labels[1 - side]
    ):
        return None
    return Operand.of(product, 1 - side, (*product.out[:-2], summed, product.out[-1]))


def _in_order(
    cuts: Sequence[ir.Value], probabilities: ir.Value, shape: Shape, info: ShapeInfo
) -> list[ir.Value]:
    """Case 7: the cuts in the order of the keys, if each follows the one before, and none is left
    out; else none."""
    pending = [(cut, _cut_start(cut, probabilities, shape, info)) for cut in cuts]
    ordered: list[ir.Value] = []
    end = Dim(0)
    while pending:
        following = next(((cut, start) for cut, start in pending if start == end), None)
        if following is None:
            return []
        pending.remove(following)
        ordered.append(following[0])
        end = end + (info.shape(following[0]) or shape)[-1]
    return ordered if end == shape[-1] else []


def _cut_start(cut: ir.Value, whole: ir.Value, shape: Shape, info: ShapeInfo) -> Dim | None:
    """Where a cut of the last dimension begins. None where it cuts something else, or where that is
    unknown."""
    own = info.shape(cut)
    if own is None or own[:-1] != shape[:-1] or operand_at(cut.producer(), 0) is not whole:
        return None
    return start_along(cut, len(shape) - 1, info)


def _sum_of(values: Sequence[ir.Value]) -> ir.Value | None:
    """Case 6: the sum of all these values, each of which nothing else reads; None where there are
    no values."""
    pending = list(values)
    while len(pending) > 1:
        readers = [only_reader(value) for value in pending]
        node = next(
            (reader for reader in readers if is_op(reader, "Add") and readers.count(reader) == 2),
            None,
        )
        if node is None:
            return None
        pending = [
            value for value, reader in zip(pending, readers, strict=True) if reader is not node
        ]
        pending.append(node.outputs[0])
    return sole(pending)


def _size(size: Dim, operands: Sequence[Operand], builder: Builder) -> ir.Value:
    """A size of the run, int64 [1]."""
    if size.const is not None:
        return builder.ints([size.const])
    return next(
        builder.dimension(operand.value, place)
        for operand in operands
        for place, own in zip(operand.places, operand.sizes(builder.info), strict=True)
        if place is not None and own == size
    )
