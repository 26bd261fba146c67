"""The public names: there, lazy, and of one family of errors."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import specbranch
from specbranch import DraftServer, SpecBranchError, simulate
from specbranch.core.planners import SettingError
from specbranch.service.wire.addresses import AddressError
from specbranch.simulation.presets import PAIRS, make_trace

HEAVY = ("torch", "vllm", "llama_cpp", "transformers", "matplotlib", "zmq", "numpy", "msgspec", "typer")


def test_every_public_name_is_there_and_documented() -> None:
    for name in specbranch.__all__:
        found = getattr(specbranch, name)

        assert name == "__version__" or inspect.getdoc(found), name
    assert sorted(specbranch.__all__) == dir(specbranch)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specbranch.nothing  # noqa: B018


def test_the_package_itself_loads_nothing_heavy() -> None:
    code = f"import sys, specbranch; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_all_errors_have_one_root() -> None:
    """Modules that need an extra are looked at where it is installed."""
    for module in walk_packages(specbranch.__path__, "specbranch."):
        if module.name.endswith("__main__"):
            continue
        try:
            loaded = import_module(module.name)
        except (ImportError, SpecBranchError):
            continue
        for name, one in inspect.getmembers(loaded, inspect.isclass):
            if issubclass(one, Exception) and one.__module__ == module.name:
                assert issubclass(one, SpecBranchError), name


def test_a_simulation_says_what_is_missing() -> None:
    trace = make_trace(PAIRS["llama3-8b-70b"], 1, 20, random.Random(0))

    assert simulate(trace, "pearl", c=5).stats.emitted == 20
    assert simulate(trace, "sps", c=5).method.settings["gamma"] == 5, "planners that are compared have the same window"
    assert simulate(trace, "sps", c=5, gamma=2).method.settings["gamma"] == 2
    with pytest.raises(SettingError, match="c=6, or a Layout"):
        simulate(trace, "pearl")
    with pytest.raises(SettingError, match="did you mean 'pearl'"):
        simulate(trace, "perl", c=5)


def test_arguments_for_vllm_are_the_two_dicts() -> None:
    arguments = DraftServer.at("ipc:///nowhere/draft.sock").vllm_args("budget", 6, settings={"max_rows": 4})

    assert set(arguments) == {"speculative_config", "additional_config"}
    assert arguments["speculative_config"]["num_speculative_tokens"] == 6
    assert arguments["additional_config"]["specbranch"]["settings"] == {"max_rows": 4}


def test_what_vllm_would_refuse_much_later_is_refused_at_once(tmp_path: Path) -> None:
    for error, address, keys, planner in (
        (SettingError, "ipc:///nowhere/draft.sock", None, "bugdet"),
        (AddressError, "nonsense", None, "budget"),
        (AddressError, "tcp://host:5555", None, "budget"),
        (AddressError, "tcp://host:5555", tmp_path, "budget"),
    ):
        with pytest.raises(error):
            DraftServer.at(address, keys).vllm_args(planner)


def test_a_server_that_cannot_start_says_why_and_is_not_started_again() -> None:
    server = DraftServer("no-such-model", engine="nothing")
    with pytest.raises(SpecBranchError, match="no-such-model"):
        server.start()
    with pytest.raises(SpecBranchError, match="make a new one"):
        server.start()
