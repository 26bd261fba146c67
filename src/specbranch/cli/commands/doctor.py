"""`specbranch doctor`: show hardware, software and the choices for a draft, and check whether a pair could start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbranch import machine as specbranch_machine
from specbranch.cli.commands.top import findings_table
from specbranch.cli.console import STATE_STYLES, console_for, friendly_errors, print_json
from specbranch.cli.diagnosis import diagnose, is_fault
from specbranch.cli.options import AsJson, DraftDevice, DraftEngineName, OptionalDraft
from specbranch.cli.preflight import Preflight, PreflightFinding
from specbranch.cli.readings import exit_if_unavailable, open_source
from specbranch.engines.kv_cache import cache_size
from specbranch.engines.pairs import advice_for
from specbranch.engines.registry import ENGINES, check_engine, runs_on_gpu
from specbranch.errors import EngineError, SpecBranchError, UsageError
from specbranch.launch.draft_process import DraftServiceOptions, place_pair
from specbranch.launch.placement import DevicePlacement, choose_device, divide_cores, place_draft, usable_cores
from specbranch.launch.vllm_install import slow_type_here, target_on_cpu, vllm_note
from specbranch.machine import cpu_name, instruction_sets, num_gpus, read_topology
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ParallelLayout
from specbranch.service.wire.addresses import default_address
from specbranch.version import __version__

_PACKAGES = ("torch", "transformers", "llama-cpp-python", "pyzmq", "msgspec", "numpy", "huggingface-hub", "matplotlib")
_FAST = (
    ("amx_bf16", "bfloat16 targets and int8 drafts are fast, and verifying several tokens costs little more than one"),
    ("avx512_bf16", "int8 drafts are fast, and bfloat16 targets are not emulated"),
    ("avx512_vnni", "int8 is fast and bfloat16 is emulated; serve an int8 target (specbranch quantize)"),
    ("avx512f", "int8 works at half speed and bfloat16 is emulated; `specbranch plan` compares the types of a target"),
    ("avx2", "8-bit weights are the fastest draft here; `specbranch plan` compares the types of a target"),
)
_NONE = "no vector instructions that matter were found"
_TOKEN_BYTES = 12_288  # of a typical draft with half a billion weights, such as Qwen2.5-Coder-0.5B

Section = dict[str, Any]


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="Also check whether this target could start.")
    ] = None,
    draft: OptionalDraft = None,
    draft_engine: DraftEngineName = None,
    draft_device: DraftDevice = "auto",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Only say whether drafts help a running vLLM server, http://HOST:PORT, and if not, why."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine's hardware and software, and the device, cores and cache that a draft model would get.

    With TARGET and --draft it also runs every check that `serve` makes before it loads anything. Each is OK, FAIL or
    SKIP, which means that it could not be made. With --server it shows the findings of `specbranch top` about a
    running server. Exit code 1: a check or finding is FAIL, or the server does not answer.
    """
    if server is not None:
        with friendly_errors(SpecBranchError, OSError):
            if target is not None or draft is not None:
                raise UsageError("give either --server URL or TARGET and --draft")
            if not server.startswith(("http://", "https://")):
                raise UsageError(f"--server is {server!r}; give the address of a vLLM server, http://HOST:PORT")
            _diagnose_server(server, as_json)
        return
    with friendly_errors(SpecBranchError):
        found = {"machine": machine(), "software": software(), "choices": choices(draft, draft_engine, draft_device)}
        found["choices"]["target data type"] = slow_type_here(target, None) if target else None
        found["choices"]["drafts that fit"] = advice_for(target) if target else None
        findings = _findings(target, draft, draft_engine, draft_device)
    if as_json:
        print_json({**found, "checks": [one.as_json() for one in findings]})
    else:
        _print(console_for(False), found, findings)
    if any(one.state == "fail" for one in findings):
        raise typer.Exit(1)


def _diagnose_server(url: str, as_json: bool) -> None:
    """Print what a server's counters show about the gain from drafts; exit with code 1 if a finding is a fault."""
    with contextlib.closing(open_source(url, None)) as source, exit_if_unavailable(url, as_json):
        found = diagnose(source.read())
    if as_json:
        print_json({"address": url, "answers": True, "findings": [one.as_json() for one in found]})
    else:
        console_for(False).print(findings_table(found))
    if is_fault(found):
        raise typer.Exit(1)


def machine() -> Section:
    """Return the section on the processor and its instruction sets, the cores, memory and GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = instruction_sets(text)
    topology = read_topology()
    free, total = specbranch_machine.free_host_memory(), specbranch_machine.host_memory()
    return {
        "cpu": cpu_name(text) or platform.processor() or platform.machine(),
        "instruction sets": named,
        "what they mean": next((words for name, words in _FAST if name in named), _NONE),
        "cores": sorted(os.sched_getaffinity(0)),
        "physical cores": usable_cores(),
        "NUMA nodes": [f"node {node} with {len(cores)} cores" for node, cores in sorted(topology.cores.items())],
        "memory": f"{_gb(total)}, of which {_gb(free)} are free",
        "GPUs": num_gpus(),
    }


def software() -> Section:
    """Return the section on the versions of packages, the state of each draft engine, and the missing extras."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "specbranch": __version__,
        "vLLM": f"{installed.version()} for {'CPUs' if installed.runs_on_cpu() else 'GPUs'}"
        if installed.is_installed()
        else None,
        "note": vllm_note(),
        **versions,
        "engines": {name: _engine_state(name) for name in ENGINES},
        "missing": _missing(),
    }


def choices(draft: str | None, engine: str | None, device: str) -> Section:
    """Return the section on the device of a draft on this machine, with the reason, its cores, data type and cache."""
    place = place_draft(device, draft, engine, ParallelLayout()) if draft else _place_any(device)
    cores = divide_cores(place.device)
    free = specbranch_machine.free_host_memory()
    return {
        "draft device": f"{place.device}: {place.reason}",
        "warning": place.warning,
        "target cores": list(cores.target) if cores.target else None,
        "draft cores": list(cores.draft) if cores.draft else None,
        "draft data type": "the fastest of float32, bfloat16, int8 and w8a16, timed at each start (torch engine)",
        "draft cache": f"for {_TOKEN_BYTES / 1024:g} KB a token (a model of 0.5B): {_cache(free)}",
        "socket": default_address(),
        "models": os.environ.get("SPECBRANCH_MODELS") or "$SPECBRANCH_MODELS is not set; models are paths or hub names",
    }


def _findings(target: str | None, draft: str | None, engine: str | None, device: str) -> list[PreflightFinding]:
    if target is None:
        return []
    options = DraftServiceOptions(draft, engine=engine, device=device) if draft else None
    placed = place_pair(options, ParallelLayout()).draft
    return Preflight(target=target, draft=placed, has_text_drafts=True, is_server=True).findings()


def _place_any(device: str) -> DevicePlacement:
    """Return the device, with the reason, of a draft whose engine supports GPUs; `device` is `--draft-device`.

    The target is assumed to use one device.
    """
    return choose_device(
        device,
        num_gpus=num_gpus(),
        target_on_cpu=target_on_cpu(),
        num_target_devices=1,
        engine_runs_on_gpu=True,
    )


def _cache(free: int | None) -> str:
    return str(cache_size(None, _TOKEN_BYTES, free, is_cpu=True))


def _engine_state(name: str) -> str:
    try:
        check_engine(name)
        return "ready, with GPUs" if runs_on_gpu(name) and num_gpus() else "ready, on the CPU"
    except EngineError as error:
        return str(error)


def _missing() -> list[str]:
    """Return the extras whose libraries are not installed, such as specbranch[torch]."""
    extras = {"vllm" if num_gpus() else "cpu": "vllm", "llamacpp": "llama_cpp", "torch": "transformers"}
    extras |= {"metrics": "prometheus_client", "bench": "matplotlib"}
    return [f"specbranch[{extra}]" for extra, module in extras.items() if importlib.util.find_spec(module) is None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"


def _print(console: Console, found: dict[str, Section], findings: list[PreflightFinding]) -> None:
    for title, section in found.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in section.items():
            if value is not None:
                table.add_row(f"  {name}", escape(_words(value)))
        console.print(f"[bold cyan]{title}[/]")
        console.print(table)
    if findings:
        console.print("[bold cyan]checks[/]")
        for one in findings:
            mark = f"[{STATE_STYLES[one.state]}]{one.state.upper():<4}[/]"
            console.print(f"  {mark}  {escape(one.cause or one.check)}", highlight=False, soft_wrap=True)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(str(one) for one in value) or "none"
    return str(value)
