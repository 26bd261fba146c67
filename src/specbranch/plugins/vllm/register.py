"""The plugin's entry points: publish metrics, and let Model Runner V2 use our speculator."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.settings import METHOD, PROPOSER, RunnerError, plugin_settings

log = logging.getLogger("vllm.specbranch")  # below vLLM's own logger, to share its level and format
_CARRIER_METHOD = "ngram_gpu"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_RUNNER = "vllm.v1.worker.gpu.model_runner"


def register() -> None:
    """Let Model Runner V2 use our speculator, and add our metrics to vLLM's endpoint. Never raise.

    The metrics appear as soon as our proposer runs.
    """
    try:
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
    """Publish our metrics from this process, once; the first process also deletes the stats files when it ends.

    Every process of vLLM calls this; a process without a metrics endpoint computes no metrics.
    """
    from prometheus_client import REGISTRY

    from specbranch.plugins.vllm import installed
    from specbranch.plugins.vllm.metrics import Collector
    from specbranch.plugins.vllm.metrics import MultiprocessExporter as Mirror
    from specbranch.plugins.vllm.stats_file import begin_run, is_first_process, remove_stats_files

    run = begin_run()
    collector = Collector(run)
    if installed.is_first_of_several_api_servers():
        Mirror(collector).start()
    else:
        REGISTRY.register(collector)
        atexit.register(collector.close)
    if is_first_process():
        atexit.register(remove_stats_files, run)


def install() -> None:
    """Patch vLLM so that Model Runner V2 uses our speculator; do nothing if vLLM is not imported or too old for it.

    Call it before vLLM creates its configuration.
    """
    if "vllm.config" not in sys.modules:  # not called by vLLM
        return
    if importlib.util.find_spec(f"{_SPECULATORS}.ngram") is None:  # before 0.32
        return
    import vllm.v1.worker.gpu.spec_decode as spec_decode
    from vllm.config.vllm import VllmConfig

    if not hasattr(VllmConfig.__post_init__, "carries"):
        VllmConfig.__post_init__ = _wrap_post_init(VllmConfig.__post_init__)
        ours = _with_ours(spec_decode.init_speculator)
        spec_decode.init_speculator = ours
        if _RUNNER in sys.modules:  # then it has imported the function already
            sys.modules[_RUNNER].init_speculator = ours  # type: ignore[attr-defined]


def _wrap_post_init(original: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def post_init(vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        choose_runner(vllm_config)
        original(vllm_config, *args, **kwargs)

    post_init.carries = True  # type: ignore[attr-defined]
    return post_init


def choose_runner(vllm_config: Any) -> None:
    """Set the speculative method of a vLLM configuration that names our proposer, and log the resulting model runner.

    `ngram_gpu` brings our speculator into V2; `custom_class`, which the configuration has before, our proposer into V1.
    Other configurations stay unchanged. Raise `RunnerError` if the settings ask for V2 and it cannot be used.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD or speculative.model != PROPOSER:
        return
    settings = plugin_settings(compat.own_config(vllm_config), os.environ)
    cause = None
    if settings.runner == "v1":
        cause = "`runner` is 'v1'"
    elif settings.trained_predictor is not None:
        cause = "a trained predictor reads the states of V1"
    else:
        speculative.method = _CARRIER_METHOD
        if not vllm_config.use_v2_model_runner:
            speculative.method = METHOD
            cause = "vLLM's choice for this configuration"
    if cause is None:
        _log_once("specbranch drafts for vLLM's Model Runner V2, on GPUs untested; leave out `runner` for V1")
    elif settings.runner == "v2":
        raise RunnerError(f"`runner` is 'v2', but Model Runner V2 cannot be used here ({cause}); set it to 'auto'")
    else:
        _log_once(f"specbranch drafts for vLLM's Model Runner V1: {cause}")


@functools.cache
def _log_once(message: str) -> None:
    """Log a message unless it was logged before: vLLM copies its configuration, and each copy logs the same."""
    log.info(message)


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative.method != _CARRIER_METHOD or speculative.model != PROPOSER:
            return original(vllm_config, device, req_states)
        return _speculator()(vllm_config, device, req_states)

    return init_speculator


def _speculator() -> Any:
    """Return the class of our speculator, derived from vLLM's base class."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from specbranch.plugins.vllm.runner_v2 import Speculator

    return type("SpecBranchSpeculator", (Speculator, BaseSpeculator), {})
