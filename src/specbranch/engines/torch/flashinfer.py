"""Attention over page tables by FlashInfer, which reads keys and values where they are.

Written without a GPU at hand and run on none; tests have a stand-in that follows FlashInfer's documentation. The engine
compares a first step with one that needs no such library, and leaves this out if it fails or differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.extras import extra
from specbranch.engines.torch.arena import Arena
from specbranch.engines.torch.paged import Attention, Bucket, Buckets

with extra("torch"):
    import torch

_WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends


class FlashInfer:
    """Paged decode with pages of one slot. A row count has a wrapper of its own: a graph fixes its buffers."""

    def __init__(self, buckets: Buckets, arena: Arena, num_heads: int, scaling: float) -> None:
        """`num_heads` is that of queries. The arena must have each slot's heads side by side."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._arena, self._num_heads, self._scaling = arena, num_heads, scaling
        workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=arena.device)
        indices = torch.zeros(buckets.rows[-1] * buckets.contexts[-1], dtype=torch.int32, device=arena.device)
        self._wrappers: dict[int, Any] = {
            num_rows: BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,  # the other kernels know few ratios of query heads to key heads
                paged_kv_indptr_buffer=torch.zeros(num_rows + 1, dtype=torch.int32, device=arena.device),
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=torch.ones(num_rows, dtype=torch.int32, device=arena.device),
            )
            for num_rows in buckets.rows
        }

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        is_seen = np.arange(bucket.context) < lengths[:, None]
        self._wrappers[bucket.num_rows].plan(
            torch.from_numpy(ends),
            torch.from_numpy(pages[is_seen].astype(np.int32)),
            torch.ones(bucket.num_rows, dtype=torch.int32),
            self._num_heads,
            self._arena.num_key_heads,
            self._arena.head_dim,
            1,  # slots of a page
            q_data_type=self._arena.dtype,
            kv_data_type=self._arena.dtype,
            sm_scale=self._scaling,
        )

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        wrapper, num_keys = self._wrappers[bucket.num_rows], self._arena.num_key_heads

        def attend(store: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
            out = wrapper.run(query.contiguous(), store.view(len(store), 2, 1, num_keys, -1))
            found: torch.Tensor = out.view(len(query), num_keys, -1, query.shape[2])
            return found

        return attend
