"""One packed row: who belongs together in it, a cache in blocks, and the attention function that serves both.

Everything the model ever sees is ONE row [1, N] of tokens, and a small `Segments` object says which of them
belong together. The same function then serves packed training (no padding and no mask of it),
prefill behind a shared prompt, ragged prefill after a tool's result, and decode from the cache (the idea of
vLLM's paged attention, arXiv 2309.06180).

Axis letters: N tokens of the row, B sequences in it, Hq / Hkv query and key heads, D head size, M blocks a
table, S tokens a block, H hidden size.

Left out: kernels of our own. On CPU attention is torch's SDPA, a call for a few decoding rows and one for
each other sequence; on CUDA, in half precision, one call of torch's varlen_attn. To copy into another
project: needs torch and transformers (5 or later), and nothing else of this folder.
"""

import contextlib
import ctypes
import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

try:  # the CUDA body: torch's own since 2.13; flash-attn, if installed, for training rows of an older torch
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
# the FlashAttention 2 of 2.12 refuses num_splits
_PAGED = varlen_attn is not None and torch.__version__ >= (2, 13)


def keep_freed_memory() -> None:
    """Let glibc keep a gigabyte of freed memory: else the logits of each step go back to the kernel and come
    again as pages to be zeroed, 15 of the 20 ms of sampling from 32 x 49,152. Elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def multiplies_bfloat16() -> bool:
    """Whether this processor does (AVX512-BF16, AMX). Else torch multiplies number by number, 7 to 20 times
    slower than in float32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextlib.contextmanager
def packed_weights(model):
    """In here the linear layers of a bfloat16 model on CPU multiply by a copy of their weight; others do not.

    Where the processor multiplies bfloat16, the copy is ordered as its matrix unit reads it: torch would
    order it anew in each product, a third of the time at 32 rows. Elsewhere the copy is float32, and results
    are rounded as that unit would. Copies are made anew each time, so they are never those of an older step.
    """
    layers, unit = [], multiplies_bfloat16()
    if model.device.type == "cpu":
        layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.bfloat16]

    def linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        if unit:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return F.linear(x.float(), weight, bias).to(x.dtype)

    try:
        for layer in layers:
            weight, bias = layer.weight.detach(), layer.bias
            if unit:
                weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            else:
                weight, bias = weight.float(), None if bias is None else bias.float()
            layer.forward = functools.partial(linear, weight, bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


class Blocks:
    """Keys and values in blocks of `size` tokens, taken once. A sequence owns a table, a list of block ids; a
    block may be in several tables and is free again when the last of them is released.

    k, v [layers, blocks, S, Hkv, D]. Block 0 belongs to nobody: tables are padded with it.
    """

    def __init__(self, config, blocks: int, size: int, dtype=torch.float32, device="cpu"):
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, blocks, size, heads, dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.size, self.free, self.count = size, list(range(blocks - 1, 0, -1)), [0] * blocks
        self.seen: set[int] = set()  # layers whose keys came by: the audit wants all of them

    def needs(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend the table to hold `tokens`. False, and nothing taken, if too few are free."""
        missing = self.needs(tokens) - len(table)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            table.append(self.free.pop())
            self.count[table[-1]] = 1
        return True

    def fork(self, table: list[int], tokens: int) -> list[int] | None:
        """A second table for the same first `tokens`: full blocks shared, the last, partly filled one copied.
        None, and nothing taken, if that one finds no free block."""
        full = tokens // self.size
        if tokens % self.size and not self.free:
            return None
        new = table[:full]
        for block in new:
            self.count[block] += 1
        if tokens % self.size:
            new.append(self.free.pop())
            self.count[new[-1]] = 1
            self.k[:, new[-1]], self.v[:, new[-1]] = self.k[:, table[full]], self.v[:, table[full]]
        return new

    def clear(self, zero: bool) -> None:
        """Take all blocks back, from whoever has them. zero: wipe them too, for a NaN in the cache spreads
        even where it is masked."""
        self.free, self.count = list(range(len(self.count) - 1, 0, -1)), [0] * len(self.count)
        if zero:
            self.k.zero_()
            self.v.zero_()

    def release(self, table: list[int]) -> None:
        for block in table:
            self.count[block] -= 1
            if not self.count[block]:
                self.free.append(block)
        table.clear()


class Segments:
    """Who belongs together in one packed row.

    new     [B] ints  tokens of each sequence in this row, in order; N = sum(new)
    past    [B] ints  tokens of each sequence that the cache already holds (none without a cache)
    tables  [B, M] int64 on CPU, block ids of each sequence; needs room for past + new tokens
    """

    def __init__(
        self, new, past=None, tables: Tensor | None = None, cache: Blocks | None = None, device="cpu"
    ):
        self.cache, self.tables = cache, tables
        new = torch.as_tensor(new, dtype=torch.long)
        past = torch.zeros_like(new) if past is None else torch.as_tensor(past, dtype=torch.long)
        ends = new.cumsum(0)
        owner = torch.repeat_interleave(new)  # [N] sequence of each token
        position = torch.arange(int(ends[-1])) - (ends - new - past)[owner]  # [N]
        self.position = position[None].to(device)  # [1, N]
        self.last = (ends - 1).to(device)  # [B] place of each sequence's last token
        starts = ends - new
        self.spans = list(zip(starts.tolist(), ends.tolist(), past.tolist()))  # (from, to, past) of each
        self.new, self.past, self.biases = new, past, {}
        self.ragged = range(len(new))  # sequences that take an attention call of their own
        self.single = []  # decoding rows: one new token, the rest in the cache; those with most keys first
        if cache:
            slot = tables[owner, position // cache.size] * cache.size + position % cache.size
            self.slot = slot.to(device)  # [N] where keys and values go in the flattened cache
            self.ragged = torch.nonzero(new != 1)[:, 0].tolist()
            self.single = torch.nonzero(new == 1)[:, 0]
            self.single = self.single[past[self.single].argsort(descending=True, stable=True)]

    @classmethod
    def decoding(cls, past: Tensor, tables: Tensor, cache: Blocks) -> "Segments":
        """One new token for each of R sequences, made of tensors alone: the host waits for none of them, and
        a CUDA graph can record it. past [R], tables [R, M], both int64 on the device. Sets what `attention`
        reads of such rows, and not `new` and `spans`."""
        seg, rows = cls.__new__(cls), torch.arange(len(past), device=past.device)
        seg.cache, seg.tables, seg.past, seg.position = cache, tables, past, past[None]
        seg.slot = tables[rows, past // cache.size] * cache.size + past % cache.size
        seg.last, seg.single, seg.ragged, seg.biases = rows, rows, [], {}
        seg.pieces, seg.gathered = [(0, len(past), tables, past[:, None])], (None, None)
        edges, width = torch.arange(len(past) + 1, dtype=torch.int32, device=past.device), tables.shape[1]
        width *= cache.size  # of every table, as the longest sequence is known to the device alone
        seg.flash = (edges, edges * width, 1, width), (past.int() + 1, tables.int())
        return seg

    @functools.cached_property
    def flash(self) -> tuple[tuple, tuple]:
        """For the CUDA body, int32: where each sequence begins among queries and among keys [B+1], and
        the longest of each; the keys of each sequence [B] and its blocks [B, M]."""
        device, total = self.position.device, self.new + self.past
        edges = F.pad(torch.stack([self.new.cumsum(0), total.cumsum(0)]), (1, 0)).int().to(device)
        blocks = self.tables.int().to(device) if self.cache else None
        return (*edges, int(self.new.max()), int(total.max())), (total.int().to(device), blocks)

    @functools.cached_property
    def pieces(self) -> list[tuple[int, int, Tensor, Tensor]]:
        """(from, to) in `single`, tables [c, m], last key that each row sees [c, 1]. Rows of about one length
        and a megabyte of keys and values, so that what is gathered is read again from the processor's own
        cache, and no row is padded to the longest of all. Makes `gathered` too, the buffer they all use."""
        room = 2**19 if self.slot.device.type == "cpu" else 2**28  # bytes; a GPU wants few launches
        found, start = [], 0
        while start < len(self.single):
            width = self.cache.needs(int(self.past[self.single[start]]) + 1)
            end = start + max(1, room // (width * self.cache.k[0, 0].nbytes))
            rows = self.single[start:end]
            tables, last = self.tables[rows, :width], self.past[rows, None]
            found.append((start, end, tables.to(self.slot.device), last.to(self.slot.device)))
            start = end
        most = max(tables.numel() for _, _, tables, _ in found)
        self.gathered = self.cache.k.new_empty(2, most, *self.cache.k.shape[2:])  # k, v of a piece
        return found

    def bias(self, window: int | None) -> list[Tensor]:
        """Of each piece [c, 1, 1, m*S]: 0 where its rows see the key, else -inf. Made once for all layers."""
        if window not in self.biases:
            self.biases[window] = []
            for _, _, tables, last in self.pieces:
                key = torch.arange(tables.shape[1] * self.cache.size, device=last.device)[None]  # [1, m*S]
                hidden = key > last
                if window:
                    hidden |= last - key >= window
                bias = torch.zeros(hidden.shape, dtype=self.cache.k.dtype, device=last.device)
                self.biases[window].append(bias.masked_fill_(hidden, -torch.inf)[:, None, None])
        return self.biases[window]


def _gather(blocks: Tensor, tables: Tensor, out: Tensor | None = None) -> Tensor:
    """[blocks, S, Hkv, D], tables [b, m] -> [b, Hkv, m*S, D]. (index_select of whole blocks; blocks[tables]
    is 3 times slower)"""
    b, m = tables.shape
    out = None if out is None else out[: b * m]
    picked = torch.index_select(blocks, 0, tables.flatten(), out=out)  # [b*m, S, Hkv, D]
    return picked.view(b, m * blocks.shape[1], *blocks.shape[2:]).transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, seg: Segments, scaling: float, sliding_window: int | None):
    """The CUDA body, not yet run on a GPU: one call for all sequences of the row, their old keys included.

    q [N, Hq, D]; k, v [N, Hkv, D] or the blocks of the cache -> [N, Hq, D], or None if nothing here serves
    it. num_splits=1: split attention over blocks has returned NaN (pytorch/torchtitan#3235). The keys' edges
    are not read beside a block table, but FlashAttention 2, torch's default, wants them.
    """
    (new_edges, key_edges, most_new, most_keys), (total, blocks) = seg.flash
    edges = new_edges, key_edges, most_new, most_keys
    # a single query is its sequence's last token: without the bound, query heads that share keys go together
    window = (sliding_window - 1 if sliding_window else -1, 0 if most_new > 1 else -1)
    if _PAGED:
        paged = {"seqused_k": total, "block_table": blocks, "num_splits": 1} if seg.cache else {}
        return varlen_attn(q, k, v, *edges, scale=scaling, window_size=window, enable_gqa=True, **paged)
    if flash_attn_varlen_func and not seg.cache:
        return flash_attn_varlen_func(q, k, v, *edges, softmax_scale=scaling, causal=True, window_size=window)
    return None


def attention(
    module, q, k, v, mask, scaling=None, dropout=0.0, seg: Segments | None = None, sliding_window=None, **kw
):
    """q [1, Hq, N, D], k v [1, Hkv, N, D] -> [1, N, Hq, D]. Without `seg`: transformers' SDPA.

    A query sees the keys of its own sequence up to its own position, the last `sliding_window` of them if
    that is set. Dropout is not applied: the ratio of a first optimizer step must be 1.
    """
    if kw.get("softcap") or kw.get("s_aux") is not None:
        raise ValueError(
            f"{module.config.model_type}: attention with soft-capping or sinks is not implemented"
        )
    if seg is None:
        return sdpa_attention_forward(
            module, q, k, v, mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kw
        )
    sdpa = F.scaled_dot_product_attention
    cache = seg.cache
    if cache:
        layer = module.layer_idx
        cache.seen.add(layer)
        keys, values = cache.k[layer], cache.v[layer]  # [blocks, S, Hkv, D]
        keys.flatten(0, 1)[seg.slot] = k[0].transpose(0, 1)
        values.flatten(0, 1)[seg.slot] = v[0].transpose(0, 1)

    if q.is_cuda:
        out = None
        if q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0):
            kf, vf = (keys, values) if cache else (k[0].transpose(0, 1), v[0].transpose(0, 1))
            out = _flash(q[0].transpose(0, 1), kf, vf, seg, scaling, sliding_window)
        if out is not None:
            return out[None], None
        text = (
            "attention by SDPA, slow and large for long rows; a better one needs torch 2.13, bfloat16, Ampere"
        )
        warnings.warn(text, stacklevel=1)

    if len(seg.single):  # decoding rows; the query heads of one key head are its queries
        places = seg.last[seg.single]
        qb = q[0].transpose(0, 1)[places]  # [b, Hq, D]
        grouped = qb.reshape(len(qb), k.shape[1], -1, q.shape[3])  # [b, Hkv, Hq / Hkv, D]
        pieces = []
        for (start, end, tables, _), bias in zip(seg.pieces, seg.bias(sliding_window)):
            kb = _gather(keys, tables, seg.gathered[0])  # [c, Hkv, m*S, D]
            vb = _gather(values, tables, seg.gathered[1])
            pieces.append(sdpa(grouped[start:end], kb, vb, attn_mask=bias, scale=scaling))
        out = torch.empty_like(q[0].transpose(0, 1), memory_format=torch.contiguous_format)  # [N, Hq, D]
        out[places] = torch.cat(pieces).reshape(qb.shape)

    outs = []
    for i in seg.ragged:  # training, prompts, tool results: one sequence at a time
        start, end, past = seg.spans[i]
        qi, ki, vi = q[:, :, start:end], k[:, :, start:end], v[:, :, start:end]
        total = past + end - start
        if past:
            table = seg.tables[i : i + 1, : cache.needs(total)].to(q.device)
            ki, vi = _gather(keys, table)[:, :, :total], _gather(values, table)[:, :, :total]
        visible = None
        if past or (sliding_window and total > sliding_window):
            query_at = torch.arange(past, total, device=q.device)[:, None]
            key_at = torch.arange(total, device=q.device)[None]
            visible = key_at <= query_at
            if sliding_window:
                visible &= query_at - key_at < sliding_window
        if q.is_cuda:  # there only flash kernels know groups, and they take no mask and no float32
            ki, vi = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (ki, vi))
        gqa = ki.shape[1] != q.shape[1]
        outs.append(sdpa(qi, ki, vi, visible, is_causal=visible is None, scale=scaling, enable_gqa=gqa))
    if not len(seg.single):
        return torch.cat(outs, 2).transpose(1, 2), None
    for i, o in zip(seg.ragged, outs):
        out[seg.spans[i][0] : seg.spans[i][1]] = o[0].transpose(0, 1)
    return out[None], None


AttentionInterface.register("segments", attention)
AttentionMaskInterface.register("segments", sdpa_mask)  # for an ordinary forward, which stays possible
_READY = torch.zeros(1, 1, 1, 1)  # a 4D mask counts as finished, so transformers builds none for a packed row


def trunk(model, ids: Tensor, seg: Segments) -> Tensor:
    """Hidden states [N, H] of the packed row `ids` [N], before the head."""
    base = model.base_model
    base.config._attn_implementation = "segments"
    out = base(
        input_ids=ids[None], position_ids=seg.position, attention_mask=_READY, use_cache=False, seg=seg
    )
    return out.last_hidden_state[0]
