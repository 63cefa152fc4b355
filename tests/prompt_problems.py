"""Calls of PromptFlashAttention and FusedInferAttentionScore in every form, and what they mean in plain NumPy.

A `Form` says what a call has. `Problem` draws the numbers of each batch entry ([N,L,D], as they are attended), stores
them as the form says, and knows the results from the numbers alone: nothing is shared with fa_compiler.reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from fa_compiler.op_registry import NodeView, TensorInfo, dtypes
from fa_compiler.op_registry.constraints.training import compressed_mask

PFA, FIA = "PromptFlashAttention", "FusedInferAttentionScore"
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TRIANGLE = compressed_mask(3)
PFA_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")
FIA_LAYOUTS = (
    *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
    *("BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
)

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """`rows` and `keys` are the lengths of each entry, in rooms of `s1` and `s2` where the layout has such.

    storage      plain, list, or pages by their rank: pages3, pages4, pages5
    mask         "", row (one row: by key), full (in `mask_rank` dimensions), constant
    bias         "", full, slopes, roots
    antiquant    "", or tensor, channel, token, head; `joined` gives both scales in one tensor
    quant        "", tensor, channel; `offset` beside it
    """

    op: str = FIA
    layout: str = "BNSD"
    dtype: str = "float32"
    heads: int = 4
    key_heads: int = 2
    d: int = 16
    dv: int = 16
    rope: int = 0
    rows: tuple[int, ...] = (5, 5)
    keys: tuple[int, ...] = (7, 7)
    s1: int = 5
    s2: int = 7
    lengths: bool = False
    storage: str = "plain"
    block: int = 16
    prefix: int = 0
    prefix_room: int = 0
    query_behind: int = -1
    key_behind: int = -1
    mask: str = ""
    mask_rank: int = 3
    mode: int = 0
    pre: int = 2147483647
    next: int = 2147483647
    bias: str = ""
    antiquant: str = ""
    joined: bool = False
    integers: bool = False
    quant: str = ""
    offset: bool = False
    sink: bool = False
    lse: bool = False
    zero_rows: bool = True
    scale: float = 0.2
    empty: bool = False
    seed: int = field(default=0, compare=False)

    @property
    def batch(self) -> int:
        """Batch entries."""
        return len(self.rows)

    @property
    def given(self) -> str:
        """The layout of query."""
        return self.layout.partition("_")[0]

    @property
    def wanted(self) -> str:
        """The layout of results."""
        return self.layout.partition("_")[2] or self.given

    @property
    def packed(self) -> bool:
        """Whether entries lie back to back."""
        return "T" in self.given


class Problem:
    """`inputs` and `attrs` of a call, and the expected `out` and `lse` in float64, before rounding to the type."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.rng = np.random.default_rng(form.seed)
        self.inputs: Arrays = {}
        self.attrs: Arrays = {
            "num_heads": form.heads,
            "num_key_value_heads": form.key_heads,
            "input_layout": form.layout,
            "scale_value" if form.op == PFA else "scale": form.scale,
            "sparse_mode": form.mode,
            "pre_tokens": form.pre,
            "next_tokens": form.next,
            "inner_precise": 2 if form.zero_rows else 0,
        }
        if form.lse:
            self.attrs["softmax_lse_flag"] = True
        self._query()
        self._caches()
        self._lengths()
        self._terms()
        self._scales()
        self.out, self.lse = self._results()

    # What is stored

    def _numbers(self, *shape: int) -> np.ndarray:
        if self.form.integers:
            return self.rng.integers(-128, 128, shape).astype(np.int8)
        return self.rng.normal(size=shape).astype(DTYPES[self.form.dtype])

    def _query(self) -> None:
        f = self.form
        self.query = [self._numbers(f.heads, n, f.d) for n in f.rows]
        self.inputs["query"] = self._place_queries(self.query, f.d)
        if f.rope:
            self.query_rope = [self._numbers(f.heads, n, f.rope) for n in f.rows]
            self.inputs["query_rope"] = self._place_queries(self.query_rope, f.rope)

    def first_row(self, entry: int) -> int:
        """Where the rows of an entry begin in query."""
        f = self.form
        return 0 if f.query_behind < 0 or f.s1 == 1 else f.s1 - f.query_behind - f.rows[entry]

    def first_key(self, entry: int) -> int:
        """Where its keys begin."""
        f = self.form
        return 0 if f.key_behind < 0 else f.s2 - f.key_behind - f.keys[entry]

    def _place_queries(self, parts: list[np.ndarray], width: int) -> np.ndarray:
        f = self.form
        if f.packed:
            spare = self._numbers(f.heads, 2, width)  # behind the last sequence
            return laid_out(np.concatenate([*parts, spare], axis=1)[None], f.given)
        whole = self._numbers(f.batch, f.heads, f.s1, width)
        for b, part in enumerate(parts):
            whole[b, :, self.first_row(b) : self.first_row(b) + part.shape[1]] = part
        return laid_out(whole, f.given)

    def _caches(self) -> None:
        """Keys, values and rope parts: `self.stored` has them by entry as they are stored, a prefix first."""
        f = self.form
        widths = {"key": f.d, "value": f.dv, **({"key_rope": f.rope} if f.rope else {})}
        self.stored: dict[str, list[np.ndarray]] = {}
        for name, width in widths.items():
            parts = [self._cached(f.key_heads, n, width) for n in f.keys]
            prefix = self._cached(f.key_heads, f.prefix_room or f.prefix, width)
            if f.prefix:
                self.inputs[f"{name}_shared_prefix"] = laid_out(prefix[None], f.given)
            self.stored[name] = [np.concatenate([prefix[:, : f.prefix], part], axis=1) for part in parts]
            self.inputs[name] = self._place(parts, width, name)
        if f.prefix and f.prefix_room:
            self.inputs["actual_shared_prefix_len"] = np.array([f.prefix])

    def _cached(self, *shape: int) -> np.ndarray:
        if self.form.antiquant:
            return self.rng.integers(-128, 128, shape).astype(np.int8)
        return self._numbers(*shape)

    def _place(self, parts: list[np.ndarray], width: int, name: str) -> Any:
        f = self.form
        if f.storage == "list":
            return [laid_out(part[None], f.given) for part in parts]
        if f.storage.startswith("pages"):
            return self._pages(parts, width)
        if f.packed:
            return laid_out(np.concatenate([*parts, self._cached(f.key_heads, 1, width)], axis=1)[None], f.given)
        whole = self._cached(f.batch, f.key_heads, f.s2, width)
        for b, part in enumerate(parts):
            whole[b, :, self.first_key(b) : self.first_key(b) + part.shape[1]] = part
        return laid_out(whole, f.given)

    def _pages(self, parts: list[np.ndarray], width: int) -> np.ndarray:
        f = self.form
        each = max(-(-max(f.keys) // f.block), 1)
        count = each * f.batch + 1
        if "block_table" not in self.inputs:
            table = self.rng.permutation(count)[: each * f.batch].reshape(f.batch, each).astype(np.int32)
            for b, n in enumerate(f.keys):
                table[b, -(-n // f.block) :] = -1  # never read
            self.inputs["block_table"] = table
            self.attrs["block_size"] = f.block
        cache = self._cached(count, f.key_heads, f.block, width)
        for b, part in enumerate(parts):
            for page in range(-(-f.keys[b] // f.block)):
                tokens = part[:, page * f.block : (page + 1) * f.block]
                cache[self.inputs["block_table"][b, page], :, : tokens.shape[1]] = tokens
        if f.storage == "pages3":
            return cache.transpose(0, 2, 1, 3).reshape(count, f.block, -1)
        if f.storage == "pages4":
            return cache
        unit = 32 if cache.dtype == np.int8 else 16
        return cache.reshape(count, f.key_heads, f.block, width // unit, unit).transpose(0, 1, 3, 2, 4)

    def _lengths(self) -> None:
        f = self.form
        if f.packed:
            self.inputs["actual_seq_lengths"] = np.cumsum(f.rows)
            paged = f.storage.startswith("pages")
            self.inputs["actual_seq_lengths_kv"] = np.array(f.keys) if paged else np.cumsum(f.keys)
        elif f.lengths or f.rows != (f.s1,) * f.batch:
            self.inputs["actual_seq_lengths"] = np.array(f.rows)
        if not f.packed and (f.lengths or f.storage.startswith("pages") or f.keys != (f.s2,) * f.batch):
            self.inputs["actual_seq_lengths_kv"] = np.array(f.keys)
        for name, behind in (("query_padding_size", f.query_behind), ("kv_padding_size", f.key_behind)):
            if behind >= 0:
                self.inputs[name] = np.array([behind])

    @property
    def cover(self) -> tuple[int, int]:
        """Rows and columns of a mask of the scores."""
        f = self.form
        if f.storage.startswith("pages"):
            columns = self.inputs["block_table"].shape[1] * f.block
        else:
            columns = max(f.keys) if f.packed or f.storage == "list" else f.s2
        return max(f.rows) if f.packed else f.s1, f.prefix + columns

    def _terms(self) -> None:
        f, rng = self.form, self.rng
        rows, columns = self.cover
        self.mask = self.bias = self.slopes = None
        if f.mask == "constant":
            self.inputs["atten_mask"] = TRIANGLE
        elif f.mask == "row":
            self.mask = rng.random((f.batch, 1, columns + 3)) < 0.4
            shape = {2: (f.batch, -1), 3: (f.batch, 1, -1), 4: (f.batch, 1, 1, -1)}[f.mask_rank]
            self.inputs["atten_mask"] = self.mask.reshape(shape)
        elif f.mask:
            mask = rng.random((f.batch, rows + 2, columns + 3)) < 0.4
            if f.empty:
                mask[:, rows // 2] = True
            self.inputs["atten_mask"] = {2: mask[0], 3: mask, 4: mask[:, None]}[f.mask_rank]
            self.mask = mask[:1].repeat(f.batch, axis=0) if f.mask_rank == 2 else mask
        if f.mask and f.mask != "constant":
            kinds = (np.bool_, np.int8, np.uint8)
            self.inputs["atten_mask"] = self.inputs["atten_mask"].astype(kinds[f.seed % 3])
        if f.bias == "full":
            kind = np.float16 if f.integers else DTYPES[f.dtype]
            self.bias = rng.normal(size=(1, f.heads, rows + 1, columns + 2)).astype(kind)
            self.inputs["pse_shift"] = self.bias
        elif f.bias:
            self.slopes = rng.uniform(0.1, 0.5, f.heads).astype(np.float32)
            self.inputs["pse_shift"] = self.slopes
            self.attrs["pse_type"] = 2 if f.bias == "slopes" else 3
            self.inputs |= {"q_start_idx": np.array([2]), "kv_start_idx": np.array([1])}
        if f.sink:
            self.inputs["learnable_sink"] = rng.normal(size=f.heads).astype(ml_dtypes.bfloat16)

    def _scales(self) -> None:
        f, rng = self.form, self.rng
        self.antiquant: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if f.antiquant:
            kind = np.float32 if f.antiquant == "token" else DTYPES[f.dtype]
            for name, width in (("key", f.d), ("value", f.dv)):
                shape = {
                    "tensor": (1,),
                    "head": (f.key_heads,),
                    "token": (f.batch, self.cover[1]),
                    "channel": (f.key_heads, width),
                }[f.antiquant]
                scale = rng.uniform(0.01, 0.03, shape).astype(kind)
                self.antiquant[name] = scale, rng.integers(-9, 10, shape).astype(kind)
            mode = {"tensor": 0, "channel": 0, "token": 1, "head": 2}[f.antiquant]
            for index, word in enumerate(("scale", "offset")):
                pair = [self.antiquant[name][index] for name in ("key", "value")]
                if f.joined:
                    both = np.stack(pair)
                    self.inputs[f"antiquant_{word}"] = both.reshape(-1) if f.antiquant == "tensor" else both
                    self.attrs["antiquant_mode"] = mode
                else:
                    self.inputs |= {f"key_antiquant_{word}": pair[0], f"value_antiquant_{word}": pair[1]}
                    self.attrs |= {"key_antiquant_mode": mode, "value_antiquant_mode": mode}
        self.chain = None
        if f.integers:
            self.chain = tuple(float(np.float32(x)) for x in (2e-4, 127.0, 1e-2))
            names = ("deq_scale1", "quant_scale1", "deq_scale2")
            if f.op == FIA:
                names = ("dequant_scale1", "quant_scale1", "dequant_scale2")
            self.inputs[names[0]] = np.array([int(np.float32(2e-4).view(np.uint32)) | 5 << 40], np.uint64)
            self.inputs[names[1]] = np.array([127.0], np.float32)
            self.inputs[names[2]] = np.array([1e-2], np.float32)
        self.quant = None
        if f.quant:
            shape = (1,) if f.quant == "tensor" else (1, 1, f.heads * f.dv)
            scale = rng.uniform(20, 40, shape).astype(np.float32)
            offset = rng.integers(-5, 6, shape).astype(np.float32) if f.offset else np.zeros(shape, np.float32)
            self.inputs["quant_scale2"] = scale
            if f.offset:
                self.inputs["quant_offset2"] = offset
            form = (1, 1) if f.quant == "tensor" else (f.heads, f.dv)
            self.quant = scale.reshape(form).astype(np.float64), offset.reshape(form).astype(np.float64)

    # What it means

    def _meant(self, name: str, entry: int, n: int) -> np.ndarray:
        """Keys or values of one head as numbers."""
        stored = self.stored[name][entry][n].astype(np.float64)
        if name not in self.antiquant:
            return stored
        scale, offset = (part.astype(np.float64) for part in self.antiquant[name])
        kind = self.form.antiquant
        if kind in ("channel", "head"):
            scale, offset = scale[n], offset[n]
        elif kind == "token":
            first = self.first_key(entry)
            scale, offset = (part[entry, first : first + len(stored), None] for part in (scale, offset))
        return (stored + offset) * scale

    def attends(self, entry: int, i: int, j: int) -> tuple[bool, bool]:
        """Whether row i attends key j of an entry, and whether the mode alone lets it."""
        f = self.form
        if not f.mask:
            return True, True
        d, off = j - i, f.prefix + f.keys[entry] - f.rows[entry]
        if f.mask == "row":
            assert self.mask is not None
            return not self.mask[entry, 0, self.first_key(entry) + j], True
        padded = f.query_behind >= 0 or f.key_behind >= 0
        lets = {
            0: padded or -f.pre <= d <= f.next,
            1: True,
            2: d <= 0,
            3: d <= off,
            4: -f.pre <= d - off <= f.next,
        }[f.mode]
        if self.mask is None:
            return lets, lets
        row = i if f.packed else self.first_row(entry) + i
        column = j if f.packed else self.first_key(entry) + j
        return lets and not self.mask[entry, row, column], lets

    def _score(self, entry: int, head: int, i: int, keys: np.ndarray) -> np.ndarray:
        f, n = self.form, head // (self.form.heads // self.form.key_heads)
        scores = keys @ self.query[entry][head, i].astype(np.float64)
        if f.rope:
            own = self.query_rope[entry][head, i].astype(np.float64)
            scores = scores + self.stored["key_rope"][entry][n].astype(np.float64) @ own
        scores = scores * f.scale * (self.chain[0] if self.chain else 1.0)
        places = np.arange(len(keys))
        if self.bias is not None:
            row = self.bias[0, head, self.first_row(entry) + i].astype(np.float64)
            scores = scores + row[self.first_key(entry) + places]
        if self.slopes is not None:
            distance = np.abs(places + 1 - i - 2).astype(np.float64)
            scores = scores - float(self.slopes[head]) * (distance if f.bias == "slopes" else np.sqrt(distance))
        return scores

    def _row(self, entry: int, head: int, i: int) -> tuple[np.ndarray, float]:
        f, n = self.form, head // (self.form.heads // self.form.key_heads)
        keys, values = (self._meant(name, entry, n) for name in ("key", "value"))
        attended = [self.attends(entry, i, j) for j in range(len(keys))]
        if not any(lets for _, lets in attended):
            return np.zeros(f.dv), np.inf
        index = [j for j, (good, _) in enumerate(attended) if good]
        if not index:
            zero = f.sink or (f.zero_rows and not (f.op == FIA and f.s1 == 1 and not f.packed))
            mean = values.sum(axis=0) / len(values)
            if self.chain:
                mean = mean * np.rint(self.chain[1]) * self.chain[2]
            return self._rounded(np.zeros(f.dv) if zero else mean, head), np.inf
        scores = self._score(entry, head, i, keys)[index]
        sink = [float(self.inputs["learnable_sink"][head])] if f.sink else []
        top = max([*scores, *sink])
        weights = np.exp(scores - top)
        total = weights.sum() + sum(np.exp(s - top) for s in sink)
        if self.chain:
            weights = np.clip(np.rint(weights * self.chain[1]), -128, 127) * self.chain[2]
        return self._rounded(weights @ values[index] / total, head), float(top + np.log(total))

    def _rounded(self, row: np.ndarray, head: int) -> np.ndarray:
        if self.quant is None:
            return row
        scale, offset = (part[head if len(part) > 1 else 0] for part in self.quant)
        return row * scale + offset

    def _results(self) -> tuple[np.ndarray, np.ndarray]:
        f = self.form
        total = sum(f.rows) + 2 if f.packed else f.s1
        out = np.zeros((1 if f.packed else f.batch, f.heads, total, f.dv))
        lse = np.full(out.shape[:3], np.inf)
        begin = 0
        for b, count in enumerate(f.rows):
            at = begin if f.packed else self.first_row(b)
            for head in range(f.heads):
                for i in range(count if f.prefix + f.keys[b] else 0):
                    row = (0 if f.packed else b, head, at + i)
                    out[row], lse[row] = self._row(b, head, i)
            begin += count
        statistics = lse[0].T[..., None] if f.packed else lse[..., None]
        return laid_out(out, f.wanted), statistics

    def node(self) -> NodeView:
        """The call as the registry checks it, contents of integers included."""

        def info(array: np.ndarray) -> TensorInfo:
            dtype = "DT_FLOAT" if array.dtype == np.float64 else dtypes.from_numpy(array.dtype) or ""
            return TensorInfo(dtype, array.shape, array if array.dtype.kind in "iub" else None)

        tensors: dict[str, Any] = {
            name: [info(each) for each in value] if isinstance(value, list) else info(value)
            for name, value in self.inputs.items()
        }
        if self.form.op == FIA:
            tensors |= {name: [tensors[name]] for name in ("key", "value") if not isinstance(tensors[name], list)}
        return NodeView(self.form.op, "prompt", tensors, {}, self.attrs)


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """[B,N,S,D] in a layout, as one piece of memory."""
    b, n, s, d = array.shape
    turned = {
        "BNSD": lambda: array,
        "BSND": lambda: array.transpose(0, 2, 1, 3),
        "BSH": lambda: array.transpose(0, 2, 1, 3).reshape(b, s, n * d),
        "NBSD": lambda: array.transpose(1, 0, 2, 3),
        "TND": lambda: array[0].transpose(1, 0, 2),
        "NTD": lambda: array[0],
        "NSD": lambda: array[0],
    }[layout]()
    return np.ascontiguousarray(turned)


def drawn(seed: int, op: str, dtype: str = "float32", most: int = 12) -> Form:
    """A form that the operator takes, any of its features at random."""
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def chance(of: float) -> bool:
        return bool(rng.random() < of)

    layout = one_of(*(PFA_LAYOUTS if op == PFA else FIA_LAYOUTS))
    packed, single = "T" in layout.partition("_")[0], layout == "NSD"
    batch = 1 if single else int(rng.integers(1, 4))
    one = op == FIA and not packed and chance(0.25)
    s1, s2 = 1 if one else int(rng.integers(1 if op == PFA else 2, most)), int(rng.integers(1, most))
    lengths = chance(0.5)
    rows = tuple(int(rng.integers(0, s1 + 1)) if (lengths and not one) or packed else s1 for _ in range(batch))
    keys = tuple(int(rng.integers(0, s2 + 1)) if lengths or packed else s2 for _ in range(batch))
    key_heads = one_of(1, 2)
    form = Form(
        op=op, layout=layout, dtype=dtype, rows=rows, keys=keys, s1=s1, s2=s2, lengths=lengths, seed=seed,
        key_heads=key_heads, heads=key_heads * one_of(1, 2, 3), d=one_of(4, 16, 32), zero_rows=chance(0.5),
        empty=chance(0.5), mask_rank=one_of(2, 3, 4),
    )  # fmt: skip
    form = replace(form, dv=form.d if chance(0.7) or op == PFA else one_of(4, 16, 48))
    if chance(0.7):
        mode = int(rng.integers(0, 5))
        kind = "full" if mode < 2 else "constant"
        form = replace(form, mask=kind, mode=mode, pre=int(rng.integers(-2, most)), next=int(rng.integers(-2, most)))
    if chance(0.3) and not packed:
        form = replace(form, bias="full")
    if op == FIA:
        form = _fused(form, rng, one_of, chance)
    if not packed and form.storage != "list" and not form.rope and chance(0.25):
        form = replace(form, quant=one_of("tensor", "channel"), offset=op == PFA or chance(0.5))
        padded = form.query_behind >= 0 or form.key_behind >= 0
        form = replace(form, quant="tensor") if padded or form.lse else form
    plain = not (packed or form.sink or form.lse or form.rope or form.prefix or form.antiquant or form.dv != form.d)
    if plain and form.bias in ("", "full") and not (op == FIA and s1 == 1) and chance(0.2):
        form = replace(form, integers=True)
    return form


def _fused(form: Form, rng: np.random.Generator, one_of: Any, chance: Any) -> Form:
    """What FusedInferAttentionScore has beside PromptFlashAttention."""
    form = replace(form, lse=chance(0.5), sink=chance(0.2))
    if chance(0.2):
        form = replace(form, bias=one_of("slopes", "roots"))
    what = one_of("plain", "pages3", "pages4", "pages5", "list", "prefix", "padding", "rope", "rope")
    if what == "list" and form.batch > 1 and not form.packed:
        form = replace(form, storage="list", lengths=True)
        form = replace(form, s2=max(form.keys))
    elif what.startswith("pages"):
        d = 32 if what == "pages5" else form.d
        form = replace(
            form, storage=what, lengths=True, block=32, d=d, dv=d if form.dv == form.d else 32 * one_of(1, 2)
        )
    elif what == "prefix" and not form.packed:
        form = replace(form, prefix=int(rng.integers(1, 6)), prefix_room=one_of(0, 7))
    elif what == "padding" and not form.packed:
        rows, keys = max(form.rows), max(form.keys)
        form = replace(form, lengths=True, s1=form.s1 if form.s1 == 1 else rows + 3, s2=keys + 4)
        form = replace(form, query_behind=one_of(-1, 0, 2), key_behind=one_of(0, 1, 3))
    if what == "rope" and not form.bias:
        form = replace(form, rope=one_of(8, 16))
    elif chance(0.35):
        kinds = ["tensor", "channel", "head"] + ([] if form.prefix or form.packed else ["token"])
        form = replace(form, antiquant=one_of(*kinds), joined=chance(0.5))
        if form.joined and (form.antiquant == "head" or (form.antiquant == "channel" and form.dv != form.d)):
            form = replace(form, joined=False)
    one_row = not form.packed and form.given != "NSD" and form.s1 == 1 and form.d == form.dv and not form.rope
    return replace(form, mask="row") if form.mask and one_row else form
