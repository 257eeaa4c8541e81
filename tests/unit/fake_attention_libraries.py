"""Stand-ins for flash_attn_interface and flashinfer: what their documentation says of the calls
that kvrelay makes, in plain torch."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window_left: int,
    softcap: float,
) -> torch.Tensor:
    """`[queries, heads, dim]` against `[keys, kv_heads, dim]`, causal from the bottom right."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    near = torch.arange(len(query))[:, None] + len(key) - len(query)
    far = torch.arange(len(key))[None]
    hidden = far > near
    if window_left >= 0:
        hidden |= far < near - window_left
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=2)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> torch.Tensor:
    for table in (cache_seqlens, page_table, cu_seqlens_q):
        assert table.dtype is torch.int32
    assert causal and window_size[1] <= 0 and num_splits == 0
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(bounds))
    out = []
    for i, tokens in enumerate(cache_seqlens.tolist()):
        pages = page_table[i, : -(-tokens // k_cache.shape[1])]
        key, value = (cache[pages].flatten(0, 1)[:tokens] for cache in (k_cache, v_cache))
        rows = q[bounds[i] : bounds[i + 1]]
        out.append(_attend(rows, key, value, softmax_scale, window_size[0], softcap))
    return torch.cat(out)


class _PagedWrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert options["causal"] and options["q_data_type"] is options["kv_data_type"]
        self._tables = [t.tolist() for t in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)]
        self._pages, self._page_size, self._options = paged_kv_indices, page_size, options

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        (rows, pages, last), out = self._tables, []
        for i, filled in enumerate(last):
            assert 1 <= filled <= self._page_size
            held = self._pages[pages[i] : pages[i + 1]]
            tokens = (len(held) - 1) * self._page_size + filled
            key, value = (cache[held].flatten(0, 1)[:tokens] for cache in paged_kv_cache)
            found = _attend(
                q[rows[i] : rows[i + 1]],
                key,
                value,
                self._options["sm_scale"],
                self._options["window_left"],
                self._options["logits_soft_cap"] or 0.0,
            )
            out.append(found)
        return torch.cat(out)


def modules() -> dict[str, ModuleType]:
    flash, flashinfer = ModuleType("flash_attn_interface"), ModuleType("flashinfer")
    flash.flash_attn_with_kvcache = _flash_attn_with_kvcache  # type: ignore[attr-defined]
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = _PagedWrapper  # type: ignore[attr-defined]
    return {"flash_attn_interface": flash, "flashinfer": flashinfer}
