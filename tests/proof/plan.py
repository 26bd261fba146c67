"""Which stages a proof has, in the order of what they on_progress: the first ones are there whatever time is left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from specbranch.bench.scenario import BenchMethod
from specbranch.core.planners import DEFAULT_PLANNER
from tests.proof.decode import Decode
from tests.proof.stages import Stage, last_json, read_junit
from tests.root import ROOT

BARE, OURS = "bare", DEFAULT_PLANNER
EXACT = " in float32"  # ending of the names of stages whose answers must be equal
_PYTHON = (sys.executable, "-P", "-m")
_WHOLE, _REDUCED = (8, 64, [1, 8]), (3, 24, [1, 3])  # prompts, tokens, requests at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A pair, where it runs, and how much of the proof there is time for.

    With one GPU both models share it. On the CPU, where the reduced form is tested, everything is in float32.
    """

    target: str
    draft: str
    num_gpus: int
    is_reduced: bool = False
    minutes: float = 10.0
    eagle: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    target_cores: Sequence[int] | None = None
    draft_cores: Sequence[int] | None = None

    @property
    def draft_device(self) -> str:
        """Where the draft runs: beside the target, and on its GPU only if there is no other."""
        return "cpu" if not self.num_gpus else f"cuda:{min(1, self.num_gpus - 1)}"

    @property
    def dtype(self) -> str:
        """The data type that is measured."""
        return "auto" if self.num_gpus else "float32"

    def stages(self) -> list[Stage]:
        """What is run, one after the other."""
        return [
            Stage("machine", self._specbranch("doctor", self.target, "--draft", self.draft, "--json"), last_json, 60),
            *(self._decode(method, self.dtype) for method in (self._bare(), self._ours())),
            *self._exact(),
            self._conformance(),
            self._profile(),
            *(self._decode(method, self.dtype) for method in self._peers()),
        ]

    def _exact(self) -> list[Stage]:
        """Answers of another data type cannot be compared token by token: near-ties swap."""
        if self.dtype == "float32":
            return []
        return [self._decode(method, "float32", EXACT) for method in (self._bare(), self._ours())]

    def _bare(self) -> BenchMethod:
        return BenchMethod(BARE)

    def _ours(self) -> BenchMethod:
        return BenchMethod(OURS, planner=DEFAULT_PLANNER, is_gated=False)

    def _peers(self) -> list[BenchMethod]:
        peers: dict[str, dict[str, Any]] = {
            "draft_model": {"model": self.draft, "num_speculative_tokens": 4},
            "ngram": {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        }
        if self.eagle is not None:
            name = "eagle3" if "eagle3" in self.eagle.lower() else "eagle"
            peers[name] = {"model": self.eagle, "num_speculative_tokens": 5}
        return [BenchMethod(name, speculative_config={"method": name, **more}) for name, more in peers.items()]

    def _decode(self, method: BenchMethod, dtype: str, ending: str = "") -> Stage:
        num_prompts, max_tokens, at_once = _REDUCED if self.is_reduced else _WHOLE
        options = Decode(
            method=method,
            target=self.target,
            draft=self.draft,
            draft_device=self.draft_device,
            dtype=dtype,
            arguments=self._engine_arguments(),
            target_cores=list(self.target_cores) if self.target_cores else None,
            draft_cores=list(self.draft_cores) if self.draft_cores else None,
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            at_once=at_once,
        )
        command = [*_PYTHON, "tests.proof.decode", msgspec.json.encode(options).decode(), "{out}"]
        return Stage(method.name + ending, command, last_json, self._share(240))

    def _engine_arguments(self) -> dict[str, Any]:
        return {
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "enforce_eager": not self.num_gpus,  # with graphs, as when serving
            "distributed_executor_backend": "uni",
            "enable_prefix_caching": False,
            "seed": 0,
            **({"gpu_memory_utilization": 0.6} if self.num_gpus == 1 else {}),
            **self.arguments,
        }

    def _conformance(self) -> Stage:
        words = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT), "--junitxml", "{out}"]
        which = ["-k", "llama"] if self.is_reduced else ["--device-model", self.draft]
        where = ["--device", self.draft_device, *which]
        command = [*_PYTHON, "pytest", *words, str(ROOT / "tests" / "engines" / "test_device.py"), *where]
        return Stage("engine", command, read_junit, self._share(180))

    def _profile(self) -> Stage:
        words = ["--rows", "1,4", "--steps", "3"] if self.is_reduced else ["--rows", "1,4,16,64"]
        command = self._specbranch("profile", self.draft, "--device", self.draft_device, *words, "--json")
        return Stage("profile", command, last_json, self._share(120))

    def _specbranch(self, *words: str) -> list[str]:
        return [*_PYTHON, "specbranch", *words]

    def _share(self, of_ten_minutes_s: float) -> float:
        return of_ten_minutes_s * self.minutes / 10
