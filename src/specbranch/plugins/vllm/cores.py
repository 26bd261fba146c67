"""Use the draft's cores for the target in steps that get no help from the draft: prefill, and steps without its drafts.

Target and draft model have cores of their own while both work. A target's step takes nearly twice as long on half the
cores, so the target takes all cores where the draft cannot help, and pauses the draft service by message meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from specbranch.service.wire.messages import MAX_PAUSE_MS

_MAX_SIZES = 512  # numbers of tokens in a step that are remembered


def set_num_threads(count: int) -> None:
    """Set how many threads torch uses; vLLM has replaced `torch.set_num_threads` by a function that does nothing."""
    import torch

    torch._C.set_num_threads(count)


class LentCores:
    """Decides before each step whether the target takes the cores `lent` to the draft, and sets the target's threads.

    The target starts with all cores and one thread for each. `set_threads` sets the number of threads of its next step,
    and `pause` sends the draft service the milliseconds to pause for.
    """

    def __init__(
        self,
        lent: Iterable[int],
        pause: Callable[[int], None],
        set_threads: Callable[[int], None] = set_num_threads,
        get_affinity: Callable[[], Iterable[int]] = lambda: os.sched_getaffinity(0),
        set_affinity: Callable[[Iterable[int]], None] = lambda cores: os.sched_setaffinity(0, cores),
    ) -> None:
        self._all = frozenset(get_affinity())
        self._own = self._all - frozenset(lent)
        self._pause = pause
        self._set_threads = set_threads
        self._set_affinity = set_affinity
        self._has_all = True
        self._is_paused = False
        self._sizes: set[int] = set()  # numbers of tokens of the steps that ran on all cores

    @property
    def can_lend(self) -> bool:
        """Whether the lent cores are some of the target's, but not all."""
        return bool(self._own) and self._own != self._all

    def release(self) -> None:
        """Give the target all its cores again, and end the draft service's pause."""
        if not self._has_all:
            self._switch(True)
        if self._is_paused:
            self._pause(0)
            self._is_paused = False

    def begin_step(self, num_tokens: int, has_prefill: bool, is_drafting: bool) -> None:
        """Give a step of `num_tokens` tokens all cores or the target's own, and pause the draft service accordingly.

        `is_drafting`: the draft service works on drafts for the next step.
        """
        # oneDNN keeps the number of threads with which it first ran a step of a size, so that step gets all cores.
        is_new = num_tokens not in self._sizes and len(self._sizes) < _MAX_SIZES
        takes_all = has_prefill or not is_drafting or is_new
        if takes_all:
            self._sizes.add(num_tokens)
        if takes_all != self._has_all:
            self._switch(takes_all)
        # Again at each step: the pause ends by itself, and the service may have been restarted.
        if takes_all or self._is_paused:
            self._pause(MAX_PAUSE_MS if takes_all else 0)
            self._is_paused = takes_all

    def _switch(self, takes_all: bool) -> None:
        cores = self._all if takes_all else self._own
        self._set_affinity(cores)
        self._set_threads(len(cores))
        self._has_all = takes_all
