"""The proposer for stock vLLM, which loads it through its `custom_class` hook.

--speculative-config '{"method": "custom_class", "model": "specbranch.plugins.vllm.SpecBranchProposer",
                       "num_speculative_tokens": 8}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbranch.plugins.vllm.runner_v1 import SpecBranchProposer

__all__ = ["SpecBranchProposer"]


def __getattr__(name: str) -> Any:
    # Imported late: a caller that only prepares vLLM's arguments needs neither NumPy nor the draft client.
    if name == "SpecBranchProposer":
        from specbranch.plugins.vllm.runner_v1 import SpecBranchProposer

        return SpecBranchProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
