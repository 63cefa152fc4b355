"""Builds the node of ONNX or ONNX Runtime that an attention becomes (standard.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.op_registry.runtimes import (
    ATTENTION,
    DOMAINS,
    GROUP_QUERY,
    MULTI_HEAD,
    Feature,
)
from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import DECODE, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT, SAME_SIZES
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.emit.build import LayoutEmitter
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    certain,
    inputs_of,
    makers_of,
    operand_at,
    without_absent,
    without_none,
)
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.masks.band import WINDOW
from fa_compiler.passes.masks.magnitudes import LARGE_HALF, LOST_IN
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.layout_plan import LayoutPlan
from fa_compiler.passes.rewrite.standard import (
    MaskForm,
    StandardAttention,
    is_band,
    is_step,
    kernel_for,
    why_not_taken,
)
from fa_compiler.passes.values.facts import Facts

INT32 = ir.DataType.INT32
LOW = -1e38
"""A number in which a bias is lost that is below LOST_SHARE of the largest float32. The lowest
number becomes -inf in kernels that multiply it by log2(e)."""
KEY_PADDING_PLACE = 4
"""The input key_padding_mask of MultiHeadAttention."""
BIAS_PLACES = {MULTI_HEAD: 5, GROUP_QUERY: 10}
"""The input attention_bias."""
SINK_PLACE = 11
"""The input head_sink of GroupQueryAttention."""
_Parts = tuple[list[ir.Value | None], dict[str, AttrValue]]
"""The inputs and attributes of a node."""


@dataclass(frozen=True)
class StandardBuilder:
    """Builds the node of one attention. `inputs` has query, key and value in the layouts of the
    plan, and the parts of the mask as FlashAttentionScore takes them: atten_mask, real_shift,
    sink."""

    attention: StandardAttention
    plan: LayoutPlan
    inputs: Mapping[str, ir.Value | None]
    emitter: LayoutEmitter
    facts: Facts
    missed: list[Missed]
    """For the report: operands that are copied."""

    @property
    def match(self) -> AttentionMatch:
        """The attention."""
        return self.attention.match

    def node(self) -> tuple[ir.Node, tuple[str, ...]]:
        """The node, which is not in the graph yet, and what the user vouches for. Raises
        Decline."""
        query, key, value = self._operands()
        assumed = (*self._assumed(), *self._vouched_step())
        operator, builder = self.attention.operator, self.emitter.builder
        inputs, attrs = _BUILT[operator](self, query, key, value)
        attrs["scale"] = float(np.float32(self.match.scale))
        while inputs[-1] is None:
            inputs.pop()
        results = {"output": self.plan.output, **self._presents()}
        name = builder.fused_name(operator)
        made = ir.node(
            operator, inputs, attrs, domain=DOMAINS[operator], name=name, num_outputs=len(results)
        )
        node = builder.lone(made)
        for output, (word, dims) in zip(node.outputs, results.items(), strict=True):
            sizes = [self.match.space.size(dim) for dim in dims]
            output.name, output.dtype = builder.names.new(f"{name}_{word}"), self.match.dtype
            builder.info.set(output, sizes, output.dtype)
            output.shape = ir.Shape(consts(sizes))
        return node, assumed

    def _presents(self) -> dict[str, Arrangement]:
        """present_key and present_value, where the operator takes a past. Some kernels of
        GroupQueryAttention refuse to run without them."""
        operator, roles = self.attention.operator, self.match.roles
        unwanted = why_not_taken(Feature.LONE_RESULT, operator, self.facts.options) is None
        if not self.attention.grown and (operator != GROUP_QUERY or unwanted):
            return {}
        outer = roles.batch, roles.kv_heads, roles.kv_seq
        return {
            "present_key": (*outer, roles.head_dim),
            "present_value": (*outer, roles.value_head_dim),
        }

    def presents(self, node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
        """The results of the Concats that made key and value, each with the one of the node that
        takes its place; none if an input of the node needs one of them."""
        wholes = [grown.whole for grown in self.attention.grown]
        concats = makers_of(wholes)
        if any(depends(value, concat) for value in inputs_of(node) for concat in concats):
            return []
        return list(zip(wholes, node.outputs[1:], strict=False))

    def guarded(self, node: ir.Node) -> ir.Value:
        """The result of the node, 0 in the rows that the model makes 0: those without a key by its
        boolean mask or by its bias, or those whose softmax is NaN."""
        builder, mask, result = self.emitter.builder, self.match.mask, node.outputs[0]
        if self.attention.operator == ATTENTION or not (mask.nan_rows or mask.empty_rows == "zero"):
            return result
        if mask.nan_rows == RowGuard.NAN.nan_rows:
            empty = builder.op("IsNaN", [result])
        else:
            excluded = self._excluded(node)
            if excluded is None:
                return result  # no row can have scores that are all -inf
            least = builder.reduce("ReduceMin", builder.cast(excluded, INT32), [3])
            empty = self._like_result(builder.cast(least, ir.DataType.BOOL))
        nothing = builder.constant(np.array(0, self.match.dtype.numpy()), "number")
        return builder.where(empty, nothing, result)

    def _excluded(self, node: ir.Node) -> ir.Value | None:
        """True where the node's mask or bias gives a key no weight; None where neither can empty a
        row."""
        builder, mask = self.emitter.builder, self.match.mask
        if mask.nan_rows and self.inputs["real_shift"] is not None:
            added = operand_at(node, BIAS_PLACES[self.attention.operator])
            lowest = builder.constant(np.array(-math.inf, self.match.dtype.numpy()), "number")
            return builder.equal(added, lowest)
        if mask.empty_rows == "zero":
            return self.inputs["atten_mask"]
        return None

    def _like_result(self, rows: ir.Value) -> ir.Value:
        """A truth value for each row, [B|1, N|1, S|1, 1], as one that broadcasts to the result, [B,
        S, N * Dv]."""
        builder = self.emitter.builder
        if (builder.info.shape(rows) or (None, None))[1] == Dim(1):
            return builder.squeeze(rows, (1,))
        turned = builder.transpose(rows, (0, 2, 1, 3))
        # Roles.check_sizes
        width = certain(self.match.space.size(self.match.roles.value_head_dim).const)
        repeated = builder.expand(turned, [1, 1, 1, width])
        return builder.reshape(repeated, [0, 0, self._heads()[0] * width])

    def _operands(self) -> list[ir.Value]:
        """Query, key and value of one batch size, and a query of as many rows as the scores have.
        The operators repeat neither. Sizes that are not proven to agree are 1 or the largest one.
        Raises Decline where a band keeps one of them, whose tensor is not there to be asked, and
        where a size is a product of several.
        """
        roles = self.match.roles
        operands = self._present_inputs("query", "key", "value")
        if self.attention.grown:
            self._check_proven()
            new = [grown.new for grown in self.attention.grown]
            if self.attention.operator == GROUP_QUERY:
                new = list(map(self._rows_first, new))
            return [operands[0], *new]
        masks = self._present_inputs("atten_mask", "real_shift")
        row = self.plan.name.index("S")
        batch = self._largest(
            roles.batch, [*((value, 0) for value in operands), *((mask, -4) for mask in masks)]
        )
        rows = self._largest(roles.q_seq, [(operands[0], row), *((mask, -2) for mask in masks)])
        of_key, of_query = without_absent({0: batch}), without_absent({0: batch, row: rows})
        expanded = []
        for value, sizes in zip(operands, (of_query, of_key, of_key), strict=True):
            value = self._expanded(value, sizes)
            if value.producer() is not None and not value.is_graph_output():
                self._declare(value)
            expanded.append(value)
        return expanded

    def _present_inputs(self, *names: str) -> list[ir.Value]:
        """Those of these inputs that there are."""
        return without_none(self.inputs.get(name) for name in names)

    def _declare(self, value: ir.Value) -> None:
        """Give a value the sizes that are known, because ONNX's inference takes an unknown width
        for 0."""
        shape, dtype = (
            self.emitter.builder.info.sizes(value),
            self.emitter.builder.info.dtype(value),
        )
        if dtype is not None:
            value.shape, value.dtype = ir.Shape(consts(shape)), dtype

    def _rows_first(self, value: ir.Value) -> ir.Value:
        """New keys or values [B, N, S, D] as [B, S, N * D]."""
        builder, dtype, shape = (
            self.emitter.builder,
            self.match.dtype,
            self.emitter.builder.info.sizes(value),
        )
        batch, heads, rows, size = shape
        width = heads * size
        assert width.const is not None  # Roles.check_sizes
        turned = builder.transpose(value, (0, 2, 1, 3))
        made = builder.reshape(turned, [0, 0, width.const])
        builder.info.set(made, [batch, rows, width], dtype)
        self._declare(made)
        return made

    def _check_proven(self) -> None:
        """Decline sizes that are not proven to agree: a past cannot be repeated."""
        roles, space = self.match.roles, self.match.space
        sizes = [self.emitter.builder.info.sizes(view.base) for view in self.match.views]
        short = any(shape[:1] == (Dim(1),) for shape in sizes) and space.size(roles.batch) != 1
        if short or space.may_broadcast(roles.batch) or space.may_broadcast(roles.q_seq):
            raise Decline(
                Code.SHAPE,
                "a past is not proven to have the batch size of the query",
                self.match.node,
            )

    def _largest(self, axes: Axes, places: Sequence[tuple[ir.Value, int]]) -> ir.Value | None:
        """The largest of these dimensions, int64 [1]; None where all are proven to be equal, or
        vouched for. Raises Decline."""
        builder, space = self.emitter.builder, self.match.space
        shapes = [(value, axis, builder.info.sizes(value)) for value, axis in places]
        known = (
            (shape[axis], (value, axis)) for value, axis, shape in shapes if len(shape) >= abs(axis)
        )
        sizes = {size: place for size, place in known if size.const != 1}
        if not space.may_broadcast(axes) or SAME_SIZES in self.facts.options.assume:
            short = any(axis >= 0 and shape[axis] == Dim(1) for _, axis, shape in shapes)
            return builder.dimension(*next(iter(sizes.values()))) if short and sizes else None
        self._note_expanded(axes)
        counts = [builder.dimension(*place) for place in self._stated(axes, sizes)]
        if len(counts) == 1:
            return counts[0]
        return builder.reduce("ReduceMax", builder.concat(counts, 0), [0])

    def _stated(
        self, axes: Axes, sizes: Mapping[Dim, tuple[ir.Value, int]]
    ) -> list[tuple[ir.Value, int]]:
        """The sizes that operands may be repeated to.

        A Reshape that the result takes the place of may state the size of these axes, as that of
        the query. Beside a larger mask it then makes other rows of the numbers. So nothing is
        repeated to the size of such a mask, and the operator refuses it.
        """
        space, destination = self.match.space, self.plan.destination
        shape = self.emitter.builder.info.sizes(destination.value)
        own = set(space.resolve(axes))
        stated = [
            size
            for dim, size in zip(destination.dims, shape, strict=False)
            if own & set(space.resolve(dim))
        ]
        if any(atom.op == "broadcast" for size in stated for atom in size.atoms):
            return list(sizes.values())
        atoms = {atom for size in stated for atom in size.atoms}
        kept = [place for size, place in sizes.items() if size.atoms and size.atoms <= atoms]
        return kept or list(sizes.values())

    def _note_expanded(self, axes: Axes) -> None:
        """Note that operands are copied to the size of these axes. Raises Decline where they cannot
        be."""
        what = "numbers of rows"
        if axes is self.match.roles.batch:
            what = "batch sizes"
        reason = f"query, key, value and masks are not proven to have equal {what} in every run"
        hint = f"--assume {SAME_SIZES} if they have, and if masks have as many rows and keys as the scores"
        if self.match.mask.mode is not None or len(self.match.space.resolve(axes)) != 1:
            raise Decline(Code.SHAPE, reason, self.match.node, hint)
        missed = Missed(
            MissedCode.EXPANDED, f"{reason}, so they are copied", label(self.match.node), hint
        )
        self.missed.append(missed)

    def _expanded(self, value: ir.Value, sizes: Mapping[int, ir.Value]) -> ir.Value:
        """An operand whose dimensions at these places are repeated to these sizes where they are
        1."""
        builder, space, roles = self.emitter.builder, self.match.space, self.match.roles
        shape = list(builder.info.sizes(value))
        counted = {0: roles.batch}
        wanted = {place: space.size(counted.get(place, roles.q_seq)) for place in sizes}
        is_fixed = not space.may_broadcast(roles.batch) and not space.may_broadcast(roles.q_seq)
        if all(is_fixed and shape[place] == size for place, size in wanted.items()):
            return value
        target = [sizes.get(place) or builder.ints([1]) for place in range(len(shape))]
        dtype = builder.info.dtype(value)
        made = builder.expand(value, builder.concat(target, 0))
        builder.info.set(made, [wanted.get(place, size) for place, size in enumerate(shape)], dtype)
        return made

    def _assumed(self) -> tuple[str, ...]:
        """What the user vouches for. Raises Decline.

        A bias of an operator that the model holds may exclude every key of a row, which is 0 in
        Attention, or be so large that 16-bit scores are rounded to it. Other biases are checked
        with their terms (mask.py). Some kernels take a row of the lowest number for one of -inf.
        MultiHeadAttention gives the keys behind a causal attribute the lowest number, and adds
        their bias to it: they have weight where no key in front of them has a larger one.
        """
        bias = self.inputs.get("real_shift")
        if bias is None:
            return ()
        ends = self.facts.sets.of(bias) or self.facts.bounds.unless_nan(bias)
        limit, reason = self._lowest_bias(bias)
        if limit == -math.inf or (ends is not None and all(x > limit for x in ends)):
            return ()
        if NO_EMPTY_ROWS in self.facts.options.assume:
            return (NO_EMPTY_ROWS,)
        raise Decline(Code.EMPTY_ROWS, reason, self.match.node, NO_EMPTY_ROWS_HINT)

    def _vouched_step(self) -> tuple[str, ...]:
        """The user's word that there is one row in every run, where the node depends on it."""
        space, roles, mode = self.match.space, self.match.roles, self.match.mask.mode
        if space.size(roles.q_seq).const is not None or not is_step(self.match, self.facts.options):
            return ()
        hidden = mode is not None and not is_band(self.match, self.facts.options)
        behind = self.attention.operator == GROUP_QUERY and bool(self.attention.grown)
        if not hidden and not behind:
            return ()
        return (DECODE,)

    def _lowest_bias(self, bias: ir.Value) -> tuple[float, str]:
        """What a bias has to be above, -inf where it may be anything, and what it does
        otherwise."""
        operator, dtype = self.attention.operator, self.emitter.builder.info.dtype(bias)
        in_model = self.match.derivation is None
        limit = -math.inf
        if in_model and dtype in SIXTEEN_BITS:
            reason = (
                "16-bit scores are rounded to the large numbers that are added, which decides a row of "
                "such numbers"
            )
            return -LARGE_HALF, reason
        if operator == ATTENTION:
            if in_model:
                limit = LOST_IN
            reason = "what is added to the scores may exclude every key of a row"
            return limit, f"{reason}: the operator gives 0 then, and the model another number"
        if operator == MULTI_HEAD and is_band(self.match, self.facts.options):
            limit = LOW
            if self.match.dtype != ir.DataType.FLOAT:
                limit = -LARGE_HALF
            reason = f"a row that {operator} with a causal attribute has no key for, because of what is added to the"
            return limit, f"{reason} scores, would attend later keys"
        options = self.facts.options
        kernel = kernel_for(self.match, operator, bool(self.attention.grown), options)
        refused = why_not_taken(Feature.MEAN_ROWS, operator, options, kernel)
        if refused and self.match.dtype != ir.DataType.FLOAT16:
            limit = LOW
        return limit, refused or ""

    # -- the operators
    # ----------------------------------------------------------------------------------

    def _attention(self, query: ir.Value, key: ir.Value, value: ir.Value) -> _Parts:
        heads, kv_heads = self._heads()
        attrs: dict[str, AttrValue] = {}
        if self.plan.name == "BSH":
            attrs |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
        attrs |= self._band()
        attrs |= self._softcap
        if self.attention.mask is MaskForm.BOOLEAN:
            excluded = certain(self.inputs["atten_mask"])
            kept = self.emitter.builder.not_(excluded)
            mask: ir.Value | None = self._whole(kept, query, key)
        else:
            mask = self._added(query, key)
        past = [grown.past for grown in self.attention.grown]
        return [query, key, value, mask, *past], attrs

    def _band(self) -> dict[str, AttrValue]:
        """The attributes of Attention for a band that ends at the row, or for one that has keys
        behind it, too."""
        mode = self.match.mask.mode
        if mode is None or not is_band(self.match, self.facts.options):
            return {}
        attrs: dict[str, AttrValue] = {}
        if mode.sparse_mode != WINDOW or mode.next_tockens == 0:
            attrs["is_causal"] = 1
        elif mode.next_tockens < UNLIMITED:
            attrs["right_window_size"] = mode.next_tockens
        if mode.sparse_mode == WINDOW and mode.pre_tockens < UNLIMITED:
            attrs["left_window_size"] = mode.pre_tockens
        return attrs

    def _multi_head(self, query: ir.Value, key: ir.Value, value: ir.Value) -> _Parts:
        inputs: list[ir.Value | None] = [query, key, value, None, None, None]
        attrs: dict[str, AttrValue] = {"num_heads": self._heads()[0]}
        if is_band(self.match, self.facts.options):
            attrs["unidirectional"] = 1
        if self.attention.mask is MaskForm.KEY_PADDING:
            inputs[KEY_PADDING_PLACE] = self._key_padding(query, key)
            attrs["mask_filter_value"] = self._fill
        else:
            inputs[BIAS_PLACES[MULTI_HEAD]] = self._added(query, key)
        return inputs, attrs

    def _group_query(self, query: ir.Value, key: ir.Value, value: ir.Value) -> _Parts:
        heads, kv_heads = self._heads()
        attrs: dict[str, AttrValue] = {"num_heads": heads, "kv_num_heads": kv_heads}
        mode = self.match.mask.mode
        if mode is not None and mode.sparse_mode == WINDOW:
            attrs["local_window_size"] = mode.pre_tockens + 1  # the row's own key counts
        if not is_band(self.match, self.facts.options) and not self.attention.grown:
            attrs["causal"] = 0
        attrs |= self._softcap
        past: list[ir.Value | None] = [grown.past for grown in self.attention.grown]
        past = past or [None, None]
        inputs: list[ir.Value | None] = [
            query,
            key,
            value,
            *past,
            *self._lengths(query, key),
            *[None] * 5,
        ]
        inputs[BIAS_PLACES[GROUP_QUERY]] = self._added(query, key)
        if (sink := self.inputs.get("sink")) is not None:
            inputs[SINK_PLACE] = self.emitter.builder.cast(sink, self.match.dtype)
        return inputs, attrs

    @property
    def _softcap(self) -> dict[str, float]:
        """The attribute of a soft cap; empty without one."""
        if self.match.softcap == 0.0:
            return {}
        return {"softcap": float(np.float32(self.match.softcap))}

    def _heads(self) -> tuple[int, int]:
        roles, space = self.match.roles, self.match.space
        heads = certain(space.size(roles.heads).const)  # Roles.check_sizes
        kv_heads = certain(space.size(roles.kv_heads).const)
        return heads, kv_heads

    def _lengths(self, query: ir.Value, key: ir.Value) -> list[ir.Value]:
        """seqlens_k, the index of the last key of each batch entry, and total_sequence_length, the
        number of keys."""
        builder = self.emitter.builder
        keys, batch = builder.dimension(key, 1), builder.dimension(query, 0)
        keys = self._with_past(keys)
        last = builder.cast(builder.sub(keys, builder.ints([1])), INT32)
        return [builder.expand(last, batch), builder.cast(builder.squeeze(keys, (0,)), INT32)]

    def _with_past(self, keys: ir.Value) -> ir.Value:
        """The number of new keys plus that of the keys of the past, where there is one."""
        builder = self.emitter.builder
        for grown in self.attention.grown[:1]:
            keys = builder.add(builder.dimension(grown.past, 2), keys)
        return keys

    # -- masks
    # ------------------------------------------------------------------------------------------

    @property
    def _fill(self) -> float:
        """What is added to the score of an excluded key. Where a row without a key gives a mean it
        is a number in which scores are lost. Biases are proven to be lost in it, too: in the lowest
        number by the mask's plan, and so in this one, or for Attention in a larger one
        (mask.py)."""
        if self.match.mask.empty_rows != "mean":
            return -math.inf
        if self.inputs.get("real_shift") is None or self.attention.operator == ATTENTION:
            return LOST_IN
        return LOW

    def _added(self, query: ir.Value, key: ir.Value) -> ir.Value | None:
        """The mask and the bias in one tensor that is added to the scores; None where there are
        neither."""
        builder, dtype = self.emitter.builder, self.match.dtype
        mask, bias = self.inputs.get("atten_mask"), self.inputs.get("real_shift")
        if mask is not None:
            fill, none = (
                builder.constant(np.array(x, dtype.numpy()), "number") for x in (self._fill, 0.0)
            )
            kept = none if bias is None else builder.cast(bias, dtype)
            bias = builder.where(mask, fill, kept)
        if bias is None:
            return None
        return self._whole(builder.cast(bias, dtype), query, key)

    def _whole(self, mask: ir.Value, query: ir.Value, key: ir.Value) -> ir.Value:
        """A mask, expanded to all rows and keys, and to all batch entries and heads where the
        runtime needs that."""
        builder, space, roles = self.emitter.builder, self.match.space, self.match.roles
        shape = builder.info.sizes(mask)
        groups = [roles.q_seq, roles.kv_seq]
        if self.attention.whole_mask:
            groups = [roles.batch, roles.heads, *groups]
        wanted = [space.size(group) for group in groups]
        if list(shape[-len(wanted) :]) == wanted:
            return mask
        rows = builder.dimension(query, self.plan.name.index("S"))
        keys = self._with_past(builder.dimension(key, self.plan.key_layout.index("S")))
        outer = [builder.ints([1, 1])]
        if self.attention.whole_mask:
            outer = [builder.dimension(query, 0), builder.ints([self._heads()[0]])]
        whole = builder.concat([*outer, rows, keys], 0)
        return builder.expand(mask, whole)

    def _key_padding(self, query: ir.Value, key: ir.Value) -> ir.Value:
        """key_padding_mask, int32 [batch, keys], 1 where a key is kept."""
        builder, roles = self.emitter.builder, self.match.roles
        mask = certain(self.inputs["atten_mask"])
        kept = builder.cast(builder.not_(mask), INT32)
        flat = builder.squeeze(kept, (1, 2))
        if list(builder.info.sizes(flat)) == [
            self.match.space.size(axes) for axes in (roles.batch, roles.kv_seq)
        ]:
            return flat
        whole = [
            builder.dimension(query, 0),
            builder.dimension(key, self.plan.key_layout.index("S")),
        ]
        return builder.expand(flat, builder.concat(whole, 0))


_BUILT: Mapping[str, Callable[[StandardBuilder, ir.Value, ir.Value, ir.Value], _Parts]] = {
    ATTENTION: StandardBuilder._attention,
    MULTI_HEAD: StandardBuilder._multi_head,
    GROUP_QUERY: StandardBuilder._group_query,
}
"""What the inputs and attributes of an operator are made by, of query, key and value."""
