"""Whether a target's data type makes verification expensive on this CPU: known before anything loads.

vLLM's CPU build takes 16-bit types everywhere, but without instructions for bfloat16 it emulates them: each further
token in a step then costs nearly as much as the first, and drafts gain little whatever the planner does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbranch import machine
from specbranch.engines.models import read_config, weight_bytes
from specbranch.machine import instruction_sets
from specbranch.plugins.vllm.compat import launch

_NATIVE = ("amx_bf16", "avx512_bf16")
_NAMES = {"half": "float16", "float": "float32"}
_SIXTEEN_BITS = ("bfloat16", "float16")
_CPUINFO = Path("/proc/cpuinfo")


def types_here(target: str, draft: str, dtype: str) -> list[str]:
    """Return the data types of a target that are worth measuring on this machine, beside this draft."""
    if not launch.runs_on_cpu():
        return [dtype]
    free, draft_bytes = machine.free_host_memory(), weight_bytes(draft)

    def fits(kind: str) -> bool:
        return free is None or weight_bytes(target, kind) + draft_bytes <= free

    return types_to_measure(_named(), read_config(target), dtype, fits)


def slow_type_here(target: str, dtype: str | None) -> str | None:
    """Say why a target will verify slowly in vLLM on this machine, and the way out; None if it will not.

    `dtype` is that of `--dtype`. Nothing is said of a model whose config is not on this machine.
    """
    config = read_config(target) if launch.runs_on_cpu() else None
    return None if config is None else slow_type(_named(), config, dtype, target)


def slow_type(named: Sequence[str], config: Mapping[str, Any], dtype: str | None, target: str) -> str | None:
    """The same for a CPU with these instruction sets and a checkpoint with this `config.json`."""
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
    """Return the data types of a target that are worth measuring on a CPU, the one expected to be fastest first.

    A type that was asked for is the only one, and a quantized checkpoint stays as it is. `fits` tells whether the
    weights fit into memory in a type.
    """
    if dtype != "auto" or config is None or "quantization_config" in config:
        return [dtype]
    own = computed_type(config, dtype)
    types = [own, "float32"] if fits("float32") else [own]
    return types[::-1] if emulates_sixteen_bits(named) else types


def emulates_sixteen_bits(named: Sequence[str]) -> bool:
    """Whether a CPU with these instruction sets has none for bfloat16; False for a CPU of which nothing is known."""
    return bool(named) and not any(name in named for name in _NATIVE)


def computed_type(config: Mapping[str, Any], dtype: str | None) -> str:
    """Return the type that vLLM computes in on a CPU: for `auto` that of the checkpoint, but never 32 bits."""
    asked = (dtype or "auto").removeprefix("torch.")
    if asked != "auto":
        return _NAMES.get(asked, asked)
    own = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return own if own in _SIXTEEN_BITS else "bfloat16"


def has_int8_output(config: Mapping[str, Any]) -> bool:
    """Whether vLLM multiplies the output layer of a checkpoint in int8: weights and activations of 8 bits."""
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
    """Whether a layer is among the targets of compressed-tensors: names, or expressions behind `re:`."""
    return any(
        re.match(target.removeprefix("re:"), name) if target.startswith("re:") else target == name for target in targets
    )
