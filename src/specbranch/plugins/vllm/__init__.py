"""The proposer for stock vLLM, entered through its `custom_class` hook.

--speculative-config '{"method": "custom_class", "model": "specbranch.plugins.vllm.SpecBranchProposer",
                       "num_speculative_tokens": 8}'
"""

from specbranch.plugins.vllm.proposer import SpecBranchProposer

__all__ = ["SpecBranchProposer"]
