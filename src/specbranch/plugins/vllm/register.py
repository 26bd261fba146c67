"""The entry point `vllm.general_plugins`, which vLLM calls in each of its processes."""

from __future__ import annotations

import atexit
import functools
import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Let Model Runner V2 use our speculator, and add our metrics to vLLM's endpoint. Never raises.

    The metrics appear as soon as our proposer runs.
    """
    try:
        from specbranch.plugins.vllm.compat.v2 import install

        install()
    except Exception:
        log.warning("drafts can be used with vLLM's Model Runner V1 only", exc_info=True)
    try:
        _show_metrics()
    except Exception:
        log.warning(
            "vLLM's metrics endpoint will have no metrics of specbranch; drafting is not affected", exc_info=True
        )


@functools.cache
def _show_metrics() -> None:
    """Once per process, whichever it is: a collector that nobody asks costs nothing."""
    from prometheus_client import REGISTRY

    from specbranch.plugins.vllm.compat import launch
    from specbranch.plugins.vllm.metrics import Collector
    from specbranch.plugins.vllm.mirror import Mirror
    from specbranch.plugins.vllm.stats_file import begin_run, is_first_process, remove_stats_files

    run = begin_run()
    collector = Collector(run)
    if launch.is_first_of_several_api_servers():
        Mirror(collector).start()
    else:
        REGISTRY.register(collector)
        atexit.register(collector.close)
    if is_first_process():
        atexit.register(remove_stats_files, run)
