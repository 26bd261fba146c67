"""The package as an installer sees it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "vllm", "llama_cpp", "matplotlib", "prometheus_client")

PROGRAM = f"""
import importlib, pkgutil, sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import specbranch
from specbranch.cli import app
from specbranch.engines.protocol import EngineError
on_torch = ("answer", "arena", "attention", "dtype", "engine", "flashinfer", "forward", "fused", "graph", "guess")
on_torch += ("head", "int8", "joined", "load", "paged", "spans", "static", "step")
extras = {{f"specbranch.engines.torch.{{name}}": "specbranch[torch]" for name in on_torch}}
extras["specbranch.plugins.transformers"] = "specbranch[torch]"
extras |= {{f"specbranch.{{name}}.llamacpp": "specbranch[llamacpp]" for name in ("engines", "plugins")}}
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
