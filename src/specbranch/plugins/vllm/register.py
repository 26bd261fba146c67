"""What vLLM calls in each of its processes when the package is installed: entry point `vllm.general_plugins`."""

from __future__ import annotations

import atexit
import functools
import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Let our metrics appear on vLLM's endpoint as soon as a proposer of ours runs. Never raises."""
    try:
        _show_metrics()
    except Exception:
        log.warning("the metrics of specbranch will be missing on vLLM's endpoint", exc_info=True)


@functools.cache
def _show_metrics() -> None:
    """Once in a process. Whatever the process is: a collector that nobody asks costs nothing."""
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
