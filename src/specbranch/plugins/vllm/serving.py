"""How `vllm serve` is started, with our proposer or bare: its arguments, environment and cores.

With one worker on the CPU the model runs inside vLLM's engine process. By default vLLM starts a worker process and
waits for it by spinning on shared memory, which takes a core from the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from specbranch.errors import FlagError
from specbranch.plugins.vllm.arguments import proposer_arguments
from specbranch.plugins.vllm.binding import is_bound_by_user, threads_of_workers
from specbranch.plugins.vllm.flags import Flags, layout_of
from specbranch.plugins.vllm.settings import ProposerSettings

_EXECUTOR = "--distributed-executor-backend"
_OWN_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_MEMORY = "--gpu-memory-utilization"  # of the host, where vLLM runs on the CPU
_USUAL_SHARE, _SPARE_SHARE, _LEAST_SHARE = 0.92, 0.1, 0.1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve. `model` is what vLLM loads, `name` what clients call it, `flags` are vLLM's own.

    `settings` None means vLLM without our proposer: bare, or with the speculative decoding that its flags ask for.
    `cores` None means that vLLM is not pinned, as on a GPU.
    """

    model: str
    name: str
    _: KW_ONLY
    settings: ProposerSettings | None
    num_speculative_tokens: int = 8
    flags: Flags = field(default_factory=lambda: Flags([]))
    cores: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.settings is None:
            return
        layout_of(self.flags).refuse()
        for name in ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"):
            if self.flags.has(name):
                raise FlagError(
                    f"{name} is set by `specbranch serve`; use --draft, --gamma, --planner and --set instead"
                )

    @property
    def num_workers(self) -> int:
        """How many worker processes vLLM starts on this machine."""
        return layout_of(self.flags).num_devices

    @property
    def in_one_process(self) -> bool:
        """Whether we let the model run inside vLLM's engine process."""
        asked = self.flags.has(_EXECUTOR) or is_bound_by_user()
        return self.cores is not None and self.num_workers == 1 and not asked

    def arguments(self) -> list[str]:
        """The arguments of vLLM's command; the user's flags go through as they are."""
        ours, rest = self._with_proposer(self.settings) if self.settings is not None else ([], self.flags)
        if self.in_one_process:
            ours += [_EXECUTOR, "uni"]
        if self.name != self.model and not rest.has("--served-model-name"):
            ours += ["--served-model-name", self.name]
        return ["serve", self.model, *ours, *rest.words]

    def memory_flags(self, free: float | None) -> list[str]:
        """Flags without which vLLM may refuse to start: on the CPU it wants its whole share of memory free at start.

        The draft has taken some by then. vLLM gets a share of what is `free`, less some for the draft's KV cache.
        """
        is_asked = self.flags.has(_MEMORY, "--kv-cache-memory-bytes", "--kv-cache-memory") or _OWN_CACHE in os.environ
        if self.cores is None or self.settings is None or is_asked or free is None:
            return []
        share = min(_USUAL_SHARE, free - _SPARE_SHARE)
        return [_MEMORY, f"{share:.2f}"] if share >= _LEAST_SHARE else []

    def _with_proposer(self, settings: ProposerSettings) -> tuple[list[str], Flags]:
        """The flags that bring our proposer in, and the user's other flags."""
        table, rest = self.flags.take_json("--additional-config")
        ours = proposer_arguments(settings, self.num_speculative_tokens)
        speculative, additional = ours["speculative_config"], {**table, **ours["additional_config"]}
        return ["--speculative-config", json.dumps(speculative), "--additional-config", json.dumps(additional)], rest

    def environment(self) -> dict[str, str]:
        """Variables that keep vLLM to its cores."""
        if self.cores is None:
            return {}
        if self.in_one_process:
            # Without the second one vLLM replaces "uni" by "mp" on the CPU. The HTTP server and the engine are two
            # processes all the same.
            return {"OMP_NUM_THREADS": str(len(self.cores)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return threads_of_workers(self.cores, self.num_workers)
