"""The entry point `vllm.general_plugins`, which vLLM calls in each of its processes."""

from __future__ import annotations

import atexit
import functools
import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Add our metrics to vLLM's endpoint; they appear as soon as our proposer runs. Never raises."""
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
