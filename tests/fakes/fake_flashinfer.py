"""The two wrappers of FlashInfer that we use, written in torch from its documentation.

They are stricter than the real ones: a table, a layout or an argument that FlashInfer would misread
in silence is an assertion here. Only slots that a sequence has are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

__version__ = "0.0.fake"

GROUPS_WITHOUT_TENSOR_CORES = (1, 2, 4, 8)


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.dim() == 1
        assert float_workspace_buffer.numel() >= 128 << 20
        assert kv_layout in ("NHD", "HND")
        self._layout = kv_layout
        self._device = float_workspace_buffer.device
        self.num_plans = 0
        self.num_runs = 0

    def _plan(
        self,
        pages: tuple[Tensor, Tensor, Tensor],
        sizes: tuple[int, int, int, int],
        scores: tuple[float | None, int, float | None],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        indptr, indices, last_page_len = pages
        num_heads, num_kv_heads, head_dim, page_size = sizes
        assert all(tensor.dtype == torch.int32 and tensor.dim() == 1 for tensor in pages)
        # Read on the host; on a device they would make the host wait.
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert indices.device == self._device
        assert len(indptr) == len(last_page_len) + 1 > 1
        assert indptr[0] == 0 and indptr[-1] == len(indices) and bool((indptr.diff() >= 1).all())
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        assert num_heads % num_kv_heads == 0 and head_dim in (64, 128, 256)
        assert scores[1] >= -1 and (scores[2] is None or scores[2] >= 0)
        assert dtypes[0] == dtypes[1] and dtypes[0] in (torch.float16, torch.bfloat16)
        self.window_left = scores[1]
        self._pages, self._sizes, self._scores, self._dtype = pages, sizes, scores, dtypes[0]
        self.num_plans += 1

    def _run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], starts: list[int], out: Tensor
    ) -> Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        page = (num_kv_heads, page_size) if self._layout == "HND" else (page_size, num_kv_heads)
        for part in paged_kv_cache:
            assert part.shape[1:] == (*page, head_dim) and part.is_contiguous()
            assert part.dtype == self._dtype
        for rows in (q, out):
            assert rows.shape == (starts[-1], num_heads, head_dim) and rows.is_contiguous()
            assert rows.dtype == self._dtype
        for i, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            keys, values = (self._tokens(part, i) for part in paged_kv_cache)
            assert 0 < end - first <= len(keys)
            out[first:end] = self._attended(q[first:end].float(), keys, values).to(out.dtype)
        self.num_runs += 1
        return out

    def _tokens(self, part: Tensor, i: int) -> Tensor:
        """float32[L, num_kv_heads, head_dim] of sequence i."""
        indptr, indices, last_page_len = self._pages
        ids = indices[int(indptr[i]) : int(indptr[i + 1])].tolist()
        assert all(0 <= page < len(part) for page in ids) and len(set(ids)) == len(ids)
        pages = part[ids].transpose(1, 2) if self._layout == "HND" else part[ids]
        length = (len(ids) - 1) * self._sizes[3] + int(last_page_len[i])
        return pages.flatten(0, 1)[:length].float()

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_heads, num_kv_heads, head_dim, _ = self._sizes
        scale, window_left, cap = self._scores
        group = num_heads // num_kv_heads
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("mhd,lhd->hml", query, keys)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        num_rows, length = len(query), len(keys)
        at = torch.arange(length - num_rows, length)[:, None]
        key_at = torch.arange(length)
        seen = key_at <= at
        if window_left >= 0:
            seen &= key_at >= at - window_left
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hml,lhd->mhd", weights, values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
    ) -> None:
        assert causal, "without it a row sees tokens that come after it"
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(paged_kv_indptr) and qo_indptr[0] == 0
        self._plan(
            (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (sm_scale, window_left, logits_soft_cap),
            (q_data_type, kv_data_type),
        )
        self._starts = qo_indptr.tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._run(q, paged_kv_cache, self._starts, out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self._use_tensor_cores or group in GROUPS_WITHOUT_TENSOR_CORES
        self._plan(
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (sm_scale, window_left, logits_soft_cap),
            (q_data_type, kv_data_type),
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._run(q, paged_kv_cache, list(range(len(self._pages[2]) + 1)), out)
