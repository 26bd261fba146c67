"""Describe how a target is spread over devices and processes, and refuse layouts that drafts do not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbranch.errors import SpecBranchError

_ONE_PROCESS = "uni"
_EVERY_RANK = "external_launcher"


class LayoutError(SpecBranchError, ValueError):
    """Drafts would crash vLLM or change its output with this layout; the message says what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of vLLM's parallel groups, and the name of its executor; None means vLLM's own choice.

    `data` counts data-parallel engines on this machine. A group of tensor and pipeline ranks may span nodes.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    num_nodes: int = 1
    executor: str | None = None

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> ParallelLayout:
        """Return the layout that arguments of `vllm.LLM` describe."""
        return cls(
            tensor=_size(arguments, "tensor_parallel_size"),
            pipeline=_size(arguments, "pipeline_parallel_size"),
            data=_size(arguments, "data_parallel_size"),
            num_nodes=_size(arguments, "nnodes"),
            executor=arguments.get("distributed_executor_backend"),
        )

    @property
    def num_devices(self) -> int:
        """The number of devices that the target uses on this machine; vLLM starts one worker for each."""
        return max(1, self.tensor * self.pipeline // self.num_nodes) * self.data

    @property
    def in_one_process(self) -> bool:
        """Whether vLLM runs the model inside its engine's process, if its engine is not a process of its own."""
        return self.num_devices == 1 and self.executor in (None, _ONE_PROCESS)

    def check_supported(self) -> None:
        """Raise `LayoutError` if drafts cannot be used with this layout."""
        if self.pipeline > 1:
            raise LayoutError(
                f"pipeline parallelism ({self.pipeline} stages) cannot be combined with drafts: vLLM's first stage "
                "fails without a proposer, and its scheduler would verify drafts against the wrong tokens. Use "
                "tensor parallelism (--tensor-parallel-size), or serve without a draft"
            )
        if self.executor == _EVERY_RANK and self.tensor > 1:
            raise LayoutError(
                f"the executor {_EVERY_RANK} runs a scheduler in each of the {self.tensor} ranks, and only one of them "
                "would get drafts: their outputs would diverge. Use the executor mp or ray, or serve without a draft"
            )
        if self.executor == _ONE_PROCESS and self.tensor > 1:
            raise LayoutError(
                f"{self.tensor} workers cannot run in one process (executor {_ONE_PROCESS}); leave the executor to "
                "vLLM, or use one worker"
            )


def _size(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name)
    if value is None:
        return 1
    if not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name} is {value!r}; give a whole number of at least 1")
    return value
