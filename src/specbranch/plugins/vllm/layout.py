"""How a target is spread over devices and processes, and which layouts cannot be drafted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbranch.errors import SpecBranchError
from specbranch.plugins.vllm.flags import Flags

_ONE_PROCESS = "uni"
_EVERY_RANK = "external_launcher"


class LayoutError(SpecBranchError, ValueError):
    """A layout with which drafts would crash vLLM or change its output; the message says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of vLLM's parallel groups, and the name of its executor; None means vLLM's own choice."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    executor: str | None = None

    @classmethod
    def of_flags(cls, flags: Flags) -> Layout:
        """The layout that the flags of `vllm serve` ask for."""
        return cls(
            tensor=flags.number("--tensor-parallel-size", "-tp"),
            pipeline=flags.number("--pipeline-parallel-size", "-pp"),
            data=flags.number("--data-parallel-size", "-dp"),
            executor=flags.value("--distributed-executor-backend"),
        )

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> Layout:
        """The layout that arguments of `vllm.LLM` ask for."""
        return cls(
            tensor=int(arguments.get("tensor_parallel_size") or 1),
            pipeline=int(arguments.get("pipeline_parallel_size") or 1),
            data=int(arguments.get("data_parallel_size") or 1),
            executor=arguments.get("distributed_executor_backend"),
        )

    @property
    def num_devices(self) -> int:
        """How many devices the target uses, and how many workers vLLM starts."""
        return self.tensor * self.pipeline * self.data

    def refuse(self) -> None:
        """Raise if drafts cannot be used with this layout."""
        if self.pipeline > 1:
            raise LayoutError(
                f"pipeline parallelism ({self.pipeline} stages) cannot be combined with drafts: vLLM's first stage "
                "fails without a proposer, and its scheduler would verify drafts against the wrong tokens. Use "
                "tensor parallelism (--tensor-parallel-size), or serve without a draft"
            )
        if self.executor == _EVERY_RANK and self.tensor > 1:
            raise LayoutError(
                f"the executor {_EVERY_RANK} runs a scheduler in each of the {self.tensor} ranks, and only one of them "
                "would get drafts: their outputs would part. Use the executor mp or ray, or serve without a draft"
            )
        if self.executor == _ONE_PROCESS and self.tensor > 1:
            raise LayoutError(
                f"{self.tensor} workers cannot run in one process (executor {_ONE_PROCESS}), as this command "
                "runs vLLM; use `specbranch serve`, or one worker"
            )
