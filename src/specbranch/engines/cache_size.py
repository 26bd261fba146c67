"""How many tokens a draft's KV cache has room for: as asked for, or by the memory that is free. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 1 << 20  # tokens, by memory: 64 texts of 16,384
USUAL = 1 << 15  # tokens: one long text and some short ones; what is taken where nobody tells how much memory is free
_FEWEST = 4096  # tokens; a smaller cache would be of no use
_GPU_SHARE = 0.75  # of the free memory; a step needs some beside the cache
# A target on the same CPU takes nearly all of the rest: `serve` leaves a tenth of the memory to the draft's cache.
_CPU_SHARE = 0.1
_CPU_LIMIT = 0.25  # where a tenth is too little for the usual cache


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache, and how it was chosen."""

    tokens: int
    bytes_per_token: int
    reason: str

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.tokens * self.bytes_per_token / 1e9:.1f} GB: {self.reason}"


def cache_size(
    asked: int | None, bytes_per_token: int, free_bytes: int | None, *, is_cpu: bool, most: int = MOST
) -> CacheSize:
    """The size that was asked for, or else one by memory. `most` is what the engine or the model can make use of."""
    if asked is not None:
        return CacheSize(asked, bytes_per_token, "as asked for")
    if free_bytes is None:
        return CacheSize(min(USUAL, most), bytes_per_token, "nobody tells how much memory is free")
    fitting = cache_tokens(bytes_per_token, free_bytes, is_cpu=is_cpu)
    if fitting >= most:
        return CacheSize(most, bytes_per_token, "the most that this engine takes by itself")
    return CacheSize(fitting, bytes_per_token, f"by the {free_bytes / 1e9:.1f} GB of memory that are free")


def cache_tokens(bytes_per_token: int, free_bytes: int, *, is_cpu: bool) -> int:
    """How many tokens fit into the cache's share of the free memory, a multiple of 256; never less than is of use.

    A cache that grows as it is needed may still find its memory when others have freed theirs.
    """
    if is_cpu:
        tokens = max(_CPU_SHARE * free_bytes, min(_CPU_LIMIT * free_bytes, USUAL * bytes_per_token)) / bytes_per_token
    else:
        tokens = _GPU_SHARE * free_bytes / bytes_per_token
    return max(int(tokens) // 256 * 256, _FEWEST)
