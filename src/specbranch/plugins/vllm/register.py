"""What vLLM calls in each of its processes when the package is installed: entry point `vllm.general_plugins`."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Let our metrics appear on vLLM's endpoint as soon as a proposer of ours runs. Never raises."""
    try:
        from specbranch.plugins.vllm.metrics import show_on_endpoint
        from specbranch.plugins.vllm.slate import begin_run

        show_on_endpoint(begin_run())
    except Exception:
        log.warning("the metrics of specbranch will be missing on vLLM's endpoint", exc_info=True)
