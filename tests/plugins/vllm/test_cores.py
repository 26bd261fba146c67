"""The target takes the draft's cores where the draft cannot help, and pauses the draft meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specbranch.plugins.vllm.cores import LentCores
from specbranch.service.wire.messages import MAX_PAUSE_MS


@dataclass
class Machine:
    """A process on cores 0 to 3, and the pauses that were sent."""

    threads: int = 4
    cores: frozenset[int] = frozenset(range(4))
    pauses: list[int] = field(default_factory=list)

    def lend(self, *lent: int) -> LentCores:
        return LentCores(lent, self.pauses.append, self._set_threads, lambda: self.cores, self._set_cores)

    def _set_threads(self, threads: int) -> None:
        self.threads = threads

    def _set_cores(self, cores: Iterable[int]) -> None:
        self.cores = frozenset(cores)


def test_prefill_takes_all_cores_and_decoding_with_drafts_its_own() -> None:
    machine = Machine()
    cores = machine.lend(2, 3)
    for size in (600, 1):  # each size once on all cores
        cores.begin_step(size, has_prefill=True, is_drafting=True)
    assert (machine.threads, machine.cores, machine.pauses) == (4, frozenset(range(4)), [MAX_PAUSE_MS] * 2)

    cores.begin_step(1, has_prefill=False, is_drafting=True)
    assert (machine.threads, machine.cores, machine.pauses[-1]) == (2, frozenset({0, 1}), 0)

    cores.begin_step(1, has_prefill=False, is_drafting=True)
    assert len(machine.pauses) == 3, "nothing is sent while nothing changes"

    cores.begin_step(600, has_prefill=True, is_drafting=True)
    assert (machine.threads, machine.cores, machine.pauses[-1]) == (4, frozenset(range(4)), MAX_PAUSE_MS)


def test_without_drafts_the_target_keeps_all_cores() -> None:
    machine = Machine()
    cores = machine.lend(3)

    for _ in range(3):
        cores.begin_step(1, has_prefill=False, is_drafting=False)

    assert (machine.threads, machine.pauses) == (4, [MAX_PAUSE_MS] * 3), "the pause is renewed, as it ends by itself"


def test_the_first_step_of_each_size_runs_on_all_cores() -> None:
    machine = Machine()
    cores = machine.lend(3)
    seen = []
    for size in (1, 1, 5, 5, 1):
        cores.begin_step(size, has_prefill=False, is_drafting=True)
        seen.append(machine.threads)

    assert seen == [4, 3, 4, 3, 3]


def test_cores_that_the_target_lacks_or_needs_cannot_be_lent() -> None:
    assert not Machine().lend(7).can_lend
    assert not Machine().lend(0, 1, 2, 3).can_lend
    assert Machine().lend(3).can_lend
