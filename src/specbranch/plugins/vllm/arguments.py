"""The two arguments of vLLM that bring our proposer in. The only place where they are built.

Needs no vLLM, so that a caller can prepare the arguments before vLLM is imported.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbranch.plugins.vllm.settings import ProposerSettings

METHOD = "custom_class"  # of `speculative_config`: vLLM's hook for proposers like ours
PROPOSER = "specbranch.plugins.vllm.SpecBranchProposer"
SECTION = "specbranch"  # our key in vLLM's `additional_config`


def proposer_arguments(settings: ProposerSettings, num_speculative_tokens: int = 8) -> dict[str, Any]:
    """Arguments for `vllm.LLM(model, **arguments)`: `speculative_config` and `additional_config`.

    `num_speculative_tokens` is the most draft tokens that vLLM verifies per sequence and step.
    """
    return {
        "speculative_config": {
            "method": METHOD,
            "model": PROPOSER,
            "num_speculative_tokens": num_speculative_tokens,
        },
        "additional_config": {SECTION: settings_table(settings)},
    }


def settings_table(settings: ProposerSettings) -> dict[str, Any]:
    """The settings as plain data, without those that are not set."""
    return {name: value for name, value in asdict(settings).items() if value is not None}
