"""The package as an installer sees it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "vllm", "llama_cpp", "matplotlib")


def test_it_imports_and_simulates_with_no_extra_installed() -> None:
    """Heavy libraries are made impossible to import; everything but plotting must work without them."""
    program = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import pkgutil, importlib, specbranch
for module in pkgutil.walk_packages(specbranch.__path__, "specbranch."):
    importlib.import_module(module.name)
from specbranch.cli import app
try:
    app(["simulate", "--tokens", "50", "--planners", "pearl", "--json", "--plot", "x.png"])
except SystemExit as stop:
    assert stop.code == 2, stop.code
app(["simulate", "--tokens", "50", "--planners", "pearl", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "pip install 'specbranch[bench]'" in " ".join(done.stderr.split())
    assert done.stdout.startswith('{"preset"')
