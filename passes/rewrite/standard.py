"""Turns an attention into an operator of ONNX (target "onnx") or ONNX Runtime (target "contrib").

| what the attention has | Attention | MultiHeadAttention | GroupQueryAttention |
| --- | --- | --- | --- |
| query, key and value | BNSD, or BSH | BSH, key and value also BNSD | BSH |
| fewer key heads | as they are, or repeated | repeated | as they are |
| scale | scale | scale | scale |
| causal | is_causal | unidirectional | always |
| causal to the last key | is_causal with a past (grown.py) | no | no |
| one row behind a past | as without a past | as without a past | past_key and past_value (grown.py) |
| window that ends at the row | left_window_size from opset 25 on | no | local_window_size |
| other window | also right_window_size | no | no |
| mask alone | attn_mask, true where kept | key_padding_mask if it has no rows, else attention_bias | attention_bias |
| mask and bias | attn_mask, added | attention_bias | attention_bias |
| soft cap | softcap | no | softcap |
| sinks | no | no | head_sink |

A mask that is added holds -inf where a key is excluded. Where a row without a key gives the mean of
all values, it holds a number in which every score is lost, and which no kernel takes for -inf.
attn_mask and attention_bias have all rows and keys, because the kernels of ONNX Runtime take no
mask that is 1 along them.

Attention gives 0 for a row without a key. The operators of ONNX Runtime give NaN for it, on CUDA 0
in 16 bits. A Where behind them makes such a row 0 where the model has 0. A row that holds only the
lowest float32 number is a mean in the model, and NaN on CUDA. So a mask that may hold this number
is refused there.

Query, key and value whose sizes are not proven to agree are repeated to the largest of the run.

Which operator is taken is decided by the table of runtimes (op_registry/runtimes.py): the first one
of the target that takes every feature that the attention needs. Refused: a feature that none of
them takes; rows without a key whose result no mask can express; for Attention a bias that may
exclude every key of a row, because the row would be 0 and not what it was; a scale that is not
positive, because kernels take its square root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain

import onnx_ir as ir

from fa_compiler.op_registry.runtimes import (
    ATTENTION,
    GROUP_QUERY,
    MULTI_HEAD,
    OPERATORS,
    RUNTIMES,
    SCHEMA_SINCE,
    Answer,
    Feature,
    Kernel,
    Runtime,
    answer,
    first_version,
    has_operator,
    target_for,
)
from fa_compiler.passes.answer.decline import POSITIVE_SCALE, Decline, attempt, label
from fa_compiler.passes.answer.options import (
    DECODE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    ONE_TOKEN_HINT,
    Options,
)
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import instances
from fa_compiler.passes.masks.band import FIRST_CAUSAL, LAST_CAUSAL, WINDOW
from fa_compiler.passes.masks.expressible import is_single_row
from fa_compiler.passes.masks.mask import COARSE
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import MAX_HEAD_SIZE
from fa_compiler.passes.rewrite.grown import Grown, grown_operands
from fa_compiler.passes.values.shapes import ShapeInfo

LAYOUTS = {
    ATTENTION: (("BNSD", "BNSD"), ("BSH", "BSH")),
    MULTI_HEAD: (("BSH", "BSH"), ("BSH", "BNSD")),
    GROUP_QUERY: (("BSH", "BSH"),),
}
"""The layouts of each operator: that of query and result, and that of key and value."""


class MaskForm(Enum):
    """How a mask is given to an operator."""

    NONE = "none"
    BOOLEAN = "boolean"
    KEY_PADDING = "key padding"
    ADDED = "added"


FORMS = {
    MaskForm.BOOLEAN: Feature.BOOLEAN_MASK,
    MaskForm.KEY_PADDING: Feature.KEY_PADDING,
    MaskForm.ADDED: Feature.FLOAT_MASK,
}
"""What an operator has to take for a form of mask."""
TYPES = {
    ir.DataType.FLOAT: Feature.FLOAT32,
    ir.DataType.FLOAT16: Feature.FLOAT16,
    ir.DataType.BFLOAT16: Feature.BFLOAT16,
}
ROWS = frozenset(
    {
        Feature.ZERO_ROWS,
        Feature.NAN_ROWS,
        Feature.NAN_ROWS_HALF,
        Feature.NAN_ROWS_PADDING,
        Feature.NAN_OR_ZERO_ROWS,
    }
)
"""What an operator has to take for rows without a key only: nothing of it if the user vouches that
there are none."""
FIXED_SIZES = (
    "give the inputs fixed sizes: export again, or onnxruntime.tools.make_dynamic_shape_fixed"
)
"""What the user can do for a runtime that takes no sizes that are open before the run."""
EXPANDED_SINCE = 25
"""From this opset on no runtime is known to have a kernel of Attention."""


@dataclass(frozen=True)
class StandardAttention:
    """An attention and the operator that it becomes."""

    match: AttentionMatch
    operator: str
    mask: MaskForm
    whole_mask: bool
    """Does the mask need all heads and batch entries?"""
    grown: tuple[Grown, ...] = ()
    """Key and value, where the operator takes a past and new ones; else empty."""
    missed: tuple[Missed, ...] = ()

    @property
    def layouts(self) -> tuple[tuple[str, str], ...]:
        """The layouts that the operator takes for this attention."""
        if self.grown:
            return LAYOUTS[self.operator][:1]
        space, roles = self.match.space, self.match.roles
        if (
            space.size(roles.head_dim) == space.size(roles.value_head_dim)
            or self.operator == ATTENTION
        ):
            return LAYOUTS[self.operator]
        return tuple(pair for pair in LAYOUTS[self.operator] if pair[0] == pair[1])


@dataclass(frozen=True)
class Needs:
    """What an attention needs of an operator that gets its mask in a form, and a past if `past`."""

    match: AttentionMatch
    operator: str
    form: MaskForm
    past: bool
    info: ShapeInfo
    options: Options

    def features(self) -> Iterator[Feature]:
        """The features that the operator has to take, in the order in which users read of them."""
        if (kind := TYPES.get(self.match.dtype)) is not None:
            yield kind
        for table in (self._score_features(), self._size_features(), self._band_features()):
            yield from (feature for feature, needed in table.items() if needed)
        yield from self._row_features()
        if self.form in FORMS:
            yield FORMS[self.form]

    @property
    def is_masked(self) -> bool:
        """Does the operator get a mask beside its attributes?"""
        return self.form is not MaskForm.NONE

    def _score_features(self) -> dict[Feature, bool]:
        """What is done to the scores and their exponentials."""
        sink, softcap = self.match.sink is not None, self.match.softcap != 0.0
        return {
            Feature.DROPOUT: self.match.dropout is not None,
            Feature.SINK: sink and not self.is_masked,
            Feature.SINK_MASK: sink and self.is_masked,
            Feature.SOFTCAP: softcap and not self.is_masked,
            Feature.SOFTCAP_MASK: softcap and self.is_masked,
        }

    def _size_features(self) -> dict[Feature, bool]:
        """Sizes that are not those of the plainest attention."""
        space, roles = self.match.space, self.match.roles
        depth, value_depth = space.size(roles.head_dim), space.size(roles.value_head_dim)
        shapes = (self.info.sizes(view.base) for view in self.match.views)
        crossed = space.size(roles.q_seq) != space.size(roles.kv_seq)
        return {
            Feature.GROUPED: roles.kv_heads != roles.heads,
            Feature.VALUE_SIZE: depth != value_depth,
            Feature.ANY_HEAD_SIZE: (depth.const or 1) % 8 != 0,
            Feature.WIDE_HEADS: max(depth.const or 1, value_depth.const or 1) > MAX_HEAD_SIZE,
            Feature.CROSS: crossed and not (self.operator == GROUP_QUERY and self.past),
            Feature.OPEN_SIZES: any(size.const is None for size in chain(*shapes)),
        }

    def _band_features(self) -> dict[Feature, bool]:
        """A band that is an attribute, and what stands beside it."""
        if not is_band(self.match, self.options) and not self.past:
            return {Feature.FULL: True}
        window = _is_window(self.match)
        return {
            Feature.WINDOW: window,
            Feature.CAUSAL: not window,
            Feature.PAST: self.past,
            Feature.CAUSAL_MASK: self.is_masked,
        }

    def _row_features(self) -> Iterator[Feature]:
        """What a row without a key gives."""
        mask = self.match.mask
        if not self.is_masked and _sparse_mode(self.match) in (None, FIRST_CAUSAL):
            return  # every row has the first key; a guard for other NaN rests on finite-scores
        if self.operator == ATTENTION and (mask.nan_rows or mask.empty_rows == "zero"):
            yield Feature.ZERO_ROWS
        elif mask.empty_rows == "nan":
            yield self._nan_rows()
        elif mask.nan_rows == RowGuard.NAN.nan_rows:
            yield Feature.NAN_OR_ZERO_ROWS

    def _nan_rows(self) -> Feature:
        """What it is called that a row without a key gives NaN."""
        if self.form is MaskForm.KEY_PADDING:
            return Feature.NAN_ROWS_PADDING
        return Feature.NAN_ROWS if self.match.dtype == ir.DataType.FLOAT else Feature.NAN_ROWS_HALF


def standard_attentions(
    match: AttentionMatch, builder: Builder, options: Options
) -> list[StandardAttention]:
    """The operators that take everything the attention needs, the best one first: those that are
    computed in its type, then those in float32. Raises Decline where there is none."""
    if options.target == "onnx" and builder.opset >= EXPANDED_SINCE and options.runtime is not None:
        reason = (
            f"the model is of opset {builder.opset}, and from {EXPANDED_SINCE} on runtimes expand "
            "Attention into parts"
        )
        raise Decline(
            Code.RUNTIME, reason, match.node, f"export again with opset 23 or {EXPANDED_SINCE - 1}"
        )
    if match.scale <= 0.0:
        reason = f"the scale {match.scale:g} is not positive, and kernels take its root"
        raise Decline(Code.SCALE, reason, match.node, POSITIVE_SCALE)
    tried = [
        attempt(
            partial(
                _as_operator,
                replace(match, dtype=dtype),
                operator,
                match.dtype,
                builder.info,
                options,
            )
        )
        for dtype in dict.fromkeys((match.dtype, ir.DataType.FLOAT))
        for operator in _preferred(match, options)
    ]
    taken = instances(tried, StandardAttention)
    if not taken:
        raise instances(tried, Decline)[0]
    return taken


def _as_operator(
    match: AttentionMatch, operator: str, given: ir.DataType, info: ShapeInfo, options: Options
) -> StandardAttention:
    """The attention as this operator, in the type of the match. Raises Decline."""
    _check_rows(match, operator)
    takes_given = why_not_taken(TYPES[given], operator, options) is None
    if match.mask.coarse is not None and (match.dtype != ir.DataType.FLOAT or takes_given):
        raise Decline(Code.EMPTY_ROWS, COARSE, match.mask.coarse, NO_EMPTY_ROWS_HINT)
    missed: list[Missed] = []
    if match.roles.kv_heads != match.roles.heads and _repeats_heads(operator, options):
        reason = f"{_of(operator, options)} does not take {Feature.GROUPED.meaning}, so key and value are repeated"
        missed.append(
            Missed(
                MissedCode.REPEATED_HEADS,
                reason,
                label(match.node),
                _step_hint(match, info, options),
            )
        )
        match = replace(match, roles=replace(match.roles, kv_heads=match.roles.heads))
    if not has_operator(options.runtime, operator):
        raise _refused(
            f"{options.runtime} has no kernel of {operator}", operator, None, match, options
        )
    grown = _past(match, operator, info, options)
    mask = _mask_form(match, operator, bool(grown), info, options)
    if match.dtype != given:
        reason = f"{_of(operator, options)} does not take it in {TYPES[given].meaning}, so operands are cast to float32"
        missed.append(Missed(MissedCode.WIDE, reason, label(match.node)))
    whole = answer(options.runtime, operator, Feature.SHARED_MASK) is not Answer.YES
    return StandardAttention(match, operator, mask, whole, grown, tuple(missed))


def _past(
    match: AttentionMatch, operator: str, info: ShapeInfo, options: Options
) -> tuple[Grown, ...]:
    """Key and value that the operator takes as a past and new ones; empty where it takes them in
    one piece. Raises Decline where they have to be a past, and are not proven to be."""
    behind = needs_past(match, options)
    if not behind and not (operator == GROUP_QUERY and is_step(match, options)):
        return ()
    grown = grown_operands(match, info)
    if behind and not grown:
        rows, keys = (match.space.size(axes) for axes in (match.roles.q_seq, match.roles.kv_seq))
        reason = (
            f"the {keys} keys are not proven to be a past and {rows} new ones, one for each row"
        )
        raise Decline(Code.RUNTIME, reason, match.node)
    return grown


def _mask_form(
    match: AttentionMatch, operator: str, past: bool, info: ShapeInfo, options: Options
) -> MaskForm:
    """The first form of the mask with which the operator takes the attention. Raises Decline where
    there is none."""
    forms = _mask_forms(match, operator, options)
    refusals = [_refusal(Needs(match, operator, form, past, info, options)) for form in forms]
    if None in refusals:
        return forms[refusals.index(None)]
    raise next(filter(None, refusals))


def _refusal(needs: Needs) -> Decline | None:
    """The decline for the first need of an attention that the operator does not serve; None where
    it serves all."""
    match, operator, options = needs.match, needs.operator, needs.options
    kernel = kernel_for(match, operator, needs.past, options)
    whys = (
        (feature, why_not_taken(feature, operator, options, kernel)) for feature in needs.features()
    )
    reasons = {feature: reason for feature, reason in whys if reason is not None}
    if not reasons:
        return None
    feature, reason = next(iter(reasons.items()))
    if (newer := _newer(needs, reasons, kernel)) is not None:
        return Decline(Code.RUNTIME, reason, match.node, newer)
    if ROWS.issuperset(reasons) and not match.mask.nan_rows and NO_EMPTY_ROWS not in options.assume:
        return Decline(Code.RUNTIME, reason, match.node, NO_EMPTY_ROWS_HINT)
    return _refused(reason, operator, feature, match, options)


def _newer(needs: Needs, refused: Iterable[Feature], kernel: Kernel) -> str | None:
    """The option for the first version of the user's runtime that serves all needs; None where
    there is none."""
    runtime = needs.options.runtime
    if runtime is None or not runtime.version:
        return None
    versions = [first_version(runtime, needs.operator, feature, kernel) for feature in refused]
    newest = Runtime(runtime.name, max(versions))
    if not all(versions) or newest.version <= runtime.version:
        return None
    if _refusal(replace(needs, options=replace(needs.options, runtime=newest))) is not None:
        return None
    number = ".".join(map(str, newest.version))
    return f"{runtime.name} takes it from {number} on: --runtime {runtime.name}={number}"


def _preferred(match: AttentionMatch, options: Options) -> tuple[str, ...]:
    """The operators of the target, the one that suits the attention best in front."""
    operators = OPERATORS[options.target]
    grouped = match.roles.kv_heads != match.roles.heads
    if grouped or match.softcap != 0.0 or match.sink is not None or _is_window(match):
        return operators[::-1]
    return operators


def _is_window(match: AttentionMatch) -> bool:
    """Is a part of the mask a window?"""
    return _sparse_mode(match) == WINDOW


def _sparse_mode(match: AttentionMatch) -> int | None:
    """The mode of the band that is a part of the mask; None where there is no band."""
    mode = match.mask.mode
    return None if mode is None else mode.sparse_mode


def _step_hint(match: AttentionMatch, info: ShapeInfo, options: Options) -> str | None:
    """What the user can say to have GroupQueryAttention behind a past."""
    is_open = match.space.size(match.roles.q_seq).const is None
    if options.target != "contrib" or not is_open or DECODE in options.assume:
        return None
    if why_not_taken(Feature.PAST, GROUP_QUERY, options) is not None or not grown_operands(
        match, info
    ):
        return None
    return ONE_TOKEN_HINT


def _repeats_heads(operator: str, options: Options) -> bool:
    """Are key and value repeated for each query head? MultiHeadAttention needs that, and some
    runtimes' Attention."""
    takes = answer(options.runtime, operator, Feature.GROUPED) is Answer.YES
    return operator != GROUP_QUERY and not takes


def _of(operator: str, options: Options) -> str:
    return operator if options.runtime is None else f"{operator} of {options.runtime}"


def kernel_for(match: AttentionMatch, operator: str, past: bool, options: Options) -> Kernel:
    """The kernel that a runtime takes for the attention, where it has several
    (runtimes.KERNELS)."""
    presents = past or why_not_taken(Feature.LONE_RESULT, operator, options) is not None
    plain = match.dtype == ir.DataType.FLOAT and match.softcap == 0.0 and match.sink is None
    if operator == GROUP_QUERY and presents and plain:
        return Kernel.FLASH
    return Kernel.WHOLE


def why_not_taken(
    feature: Feature, operator: str, options: Options, kernel: Kernel = Kernel.WHOLE
) -> str | None:
    """Why the operator of the runtime may not be given a feature, in this kernel; None if it takes
    it."""
    if options.runtime is None and options.opset < SCHEMA_SINCE.get((operator, feature), 0):
        return f"{operator} of opset {options.opset} does not take {feature.meaning}"
    known = answer(options.runtime, operator, feature, kernel)
    if known is Answer.UNKNOWN:
        return f"whether {_of(operator, options)} takes {feature.meaning} is not known"
    if known is Answer.YES:
        return None
    where = _of(operator, options)
    if kernel is not Kernel.WHOLE and answer(options.runtime, operator, feature) is not known:
        where += " behind a past"
    return f"{where} does not take {feature.meaning}"


def _refused(
    reason: str, operator: str, feature: Feature | None, match: AttentionMatch, options: Options
) -> Decline:
    """The decline, with what takes the feature: fixed sizes, a leaner mask, another runtime, or our
    own kernels."""
    hint = _other_runtime(operator, feature, options)
    lean = [missed.hint for missed in match.mask.missed if missed.hint]
    if feature is Feature.OPEN_SIZES:
        hint = FIXED_SIZES
    if feature is Feature.FULL and lean:
        hint = lean[0]
    return Decline(Code.RUNTIME, reason, match.node, hint)


def _other_runtime(operator: str, feature: Feature | None, options: Options) -> str | None:
    """The option for the target of which the user's runtime has kernels, if it has none of this
    one. Else the one for the first runtime beside it that has the operator, with the feature if one
    is named. None where there is none, or where the user named no runtime."""
    if options.runtime is None:
        return None
    target = target_for(options.runtime.name)
    if target is not None and not any(
        has_operator(options.runtime, each) for each in OPERATORS[options.target]
    ):
        return f"--target {target}, because {options.runtime.name} has kernels of its operators"
    for name in RUNTIMES:
        other = Runtime(name)
        if name == options.runtime.name or not has_operator(other, operator):
            continue
        if feature is None or answer(other, operator, feature) is Answer.YES:
            return f"--runtime {name}, which takes it"
    return None


def is_step(match: AttentionMatch, options: Options) -> bool:
    """Is there one row in every run, by its size or, for the target contrib, by the user's word?"""
    return is_single_row(match.space.size(match.roles.q_seq), options)


def is_band(match: AttentionMatch, options: Options) -> bool:
    """Is the mask, or a part of it, an attribute of the operator? A single row that ends at the
    last key sees all."""
    mode = _sparse_mode(match)
    return mode is not None and not (mode == LAST_CAUSAL and is_step(match, options))


def needs_past(match: AttentionMatch, options: Options) -> bool:
    """Is the mask causal to the last key, where there are more keys than rows?"""
    rows, keys = (match.space.size(axes) for axes in (match.roles.q_seq, match.roles.kv_seq))
    return is_band(match, options) and _sparse_mode(match) == LAST_CAUSAL and rows != keys


def _mask_forms(match: AttentionMatch, operator: str, options: Options) -> list[MaskForm]:
    """The forms of the mask that the operator may take, the leanest or fastest first."""
    mask = match.mask
    if not mask.masked and not mask.bias:
        return [MaskForm.NONE]
    boolean = operator == ATTENTION and not mask.bias and mask.empty_rows in ("", "zero")
    padding = operator == MULTI_HEAD and _is_padding(match)
    lean = [
        form
        for form, fits in ((MaskForm.BOOLEAN, boolean), (MaskForm.KEY_PADDING, padding))
        if fits and answer(options.runtime, operator, FORMS[form]) is Answer.YES
    ]
    if padding and answer(options.runtime, operator, Feature.FAST_PADDING) is Answer.NO:
        return [MaskForm.ADDED, *lean]
    return [*lean, MaskForm.ADDED]


def _is_padding(match: AttentionMatch) -> bool:
    """Is the mask one of keys alone, and nothing added to the scores?"""
    mask, roles = match.mask, match.roles
    own = set(chain(*(chain(*part.view.base_dims) for part in mask.masked)))
    return (
        bool(mask.masked) and not mask.bias and not own.intersection((*roles.heads, *roles.q_seq))
    )


def _check_rows(match: AttentionMatch, operator: str) -> None:
    """Decline a row without a key whose result no mask of the operator can express."""
    mask = match.mask
    words = {"unmasked": "what it is without a mask"}
    if operator == ATTENTION:
        words["nan"] = "NaN"
    if match.dtype == ir.DataType.FLOAT16:
        words["mean"] = "the mean of all values, which no float16 mask can express"
    if mask.mode is not None and mask.masked and mask.empty_rows:
        words[mask.empty_rows] = "something else than beside a causal attribute"
    if mask.empty_rows in words:
        raise Decline(
            Code.EMPTY_ROWS,
            f"a row without a key gives {words[mask.empty_rows]}, and {operator} has no such rows",
            match.node,
            NO_EMPTY_ROWS_HINT,
        )
