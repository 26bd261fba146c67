"""Measure servers under load: `specbranch serve`, bare or with a draft, answers requests that arrive at random times.

vLLM's own `vllm bench serve` sends the requests and measures the usual metrics: time to first token, time between
tokens, throughput. One server runs at a time; the order of the methods is shuffled for every repeat.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specbranch.bench.results import Record, header, write_line
from specbranch.bench.scenario import BenchMethod, Scenario, Served, read_prompt_sets
from specbranch.engines.models import resolve_model
from specbranch.errors import SpecBranchError
from specbranch.launch.child import Child, join_cores
from specbranch.launch.vllm_flags import flags_of
from specbranch.launch.vllm_server import HttpEndpoint
from specbranch.machine import provenance
from specbranch.service.client.stats import parse_metrics_text

_VLLM = "specbranch.launch.vllm_server"  # vLLM's own command line
_STOP_S, _LOOK_S = 60.0, 0.5
# Histograms of vLLM, of requests and of tokens in a step.
_PHASES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "step": "vllm:iteration_tokens_total",
}
_METRICS_S = 60.0
Totals = dict[str, tuple[float, float]]
_TIMES = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = (50, 99)


class LoadTestError(SpecBranchError, RuntimeError):
    """A server did not start, or the load could not be run."""


@dataclass(frozen=True, slots=True)
class LoadTrial:
    """One measurement under load: a method at a rate of requests per second."""

    method: BenchMethod
    rate: float
    repeat: int


def plan_load(scenario: Scenario, served: Served) -> list[LoadTrial]:
    """Return all measurements in the order to run them: in each repeat, every method at every request rate.

    The order of the methods, and of each method's rates, is random.
    """
    order = random.Random(scenario.seed)
    trials: list[LoadTrial] = []
    for repeat in range(scenario.repeats):
        methods = list(scenario.methods)
        order.shuffle(methods)
        for method in methods:
            rates = list(served.rates)
            order.shuffle(rates)
            trials += [LoadTrial(method, rate, repeat) for rate in rates]
    return trials


def run_load(
    scenario: Scenario,
    data: Path,
    sink: TextIO,
    progress: Callable[[int, int], None],
    num_done: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> None:
    """Measure all trials except the first `num_done`, and write a line of JSON for each to `sink`.

    `data` is the directory of the prompt files. Call `progress` with the number of trials done and of all trials, and
    `on_stage` with a message before each start of a server.
    """
    assert scenario.served is not None
    trials = plan_load(scenario, scenario.served)
    if not num_done:
        write_line(sink, header(scenario, provenance()))
    with tempfile.TemporaryDirectory(prefix="specbranch-load-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        prompts = _write_prompts(scenario, scenario.served, data, directory)
        current: BenchMethod | None = None
        url = ""
        for number, trial in enumerate(trials[num_done:], start=num_done):
            progress(number, len(trials))
            if trial.method != current:
                stack.close()
                current = trial.method
                on_stage(f"starting a server for {current.name}")
                url = stack.enter_context(server(serve_words(scenario, trial.method), directory / "server.log"))
                _load(scenario, url, prompts, 4.0, 4, directory)  # warm-up
            before = read_totals(url)
            measured = _load(scenario, url, prompts, trial.rate, scenario.served.requests, directory)
            phases = mean_phases(before, read_totals(url))
            named = {"method": trial.method.name, "rate": trial.rate, "repeat": trial.repeat}
            write_line(sink, {**named, **_stats(measured), **phases})
        progress(len(trials), len(trials))


def serve_words(scenario: Scenario, method: BenchMethod) -> list[str]:
    """Return the arguments of `specbranch serve` for a method."""
    assert scenario.served is not None
    words = [scenario.target]
    if scenario.target_cores:
        words += ["--target-cores", join_cores(method.cores or scenario.target_cores), "--enforce-eager"]
    if method.planner is None:
        words.append("--bare")
        if method.speculative_config is not None:
            words += ["--speculative-config", json.dumps(method.found_speculative_config())]
    else:
        words += ["--draft", scenario.draft]
        if scenario.draft_cores:
            words += ["--draft-cores", join_cores(scenario.draft_cores)]
        words += ["--planner", method.planner, "--gamma", str(scenario.gamma)]
        words += ["--deadline-ms", str(scenario.deadline_ms)]
        for key, value in method.settings.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        section = {"is_gated": method.is_gated, "pad": method.pad, "rule": method.rule}
        words += ["--additional-config", json.dumps({"specbranch": section})]
    words += ["--dtype", scenario.dtype, "--max-model-len", str(scenario.max_model_len)]
    words += ["--max-num-seqs", str(scenario.served.max_num_seqs), "--seed", str(scenario.seed)]
    return [*words, "--no-enable-prefix-caching", *flags_of(scenario.arguments)]


@contextlib.contextmanager
def server(words: Sequence[str], log_file: Path) -> Iterator[str]:
    """Run `specbranch serve` with these arguments on a free port, yield its URL, and stop it at the end.

    Raise `LoadTestError` with the end of the log if the server ends before it is ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = HttpEndpoint("127.0.0.1", port)
    command = [sys.executable, "-m", "specbranch", "serve", *words, "--host", endpoint.host, "--port", str(port)]
    child = Child(command, log_file=log_file)
    try:
        if not child.wait_until(lambda: endpoint.is_healthy() or None, math.inf, _LOOK_S):
            raise LoadTestError(f"the server {child.exit_summary}; the end of its log:\n{child.log_tail()}")
        yield str(endpoint)
    finally:
        child.stop(_STOP_S)


def _load(
    scenario: Scenario, url: str, prompts: Path, rate: float, num_requests: int, directory: Path
) -> dict[str, Any]:
    """Send `num_requests` requests, `rate` per second, to the server at `url`; return `vllm bench serve`'s results.

    `prompts` is the file of the prompts; `vllm bench serve` writes its results to a file in `directory`.
    """
    out = directory / "load.json"
    out.unlink(missing_ok=True)
    words = ["bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    words += ["--model", scenario.target, "--tokenizer", resolve_model(scenario.target)]
    words += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle"]
    words += ["--custom-output-len", str(scenario.max_tokens), "--temperature", str(scenario.temperature)]
    words += ["--top-p", str(scenario.top_p)] if scenario.top_p < 1 else []
    words += ["--num-prompts", str(num_requests), "--request-rate", str(rate), "--seed", str(scenario.seed)]
    words += ["--percentile-metrics", ",".join(_TIMES), "--metric-percentiles", ",".join(map(str, _PERCENTILES))]
    words += ["--save-result", "--result-dir", str(directory), "--result-filename", out.name, "--disable-tqdm"]
    done = subprocess.run([sys.executable, "-m", _VLLM, *words], capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        raise LoadTestError(
            f"vllm bench serve ended with code {done.returncode}; the end of its log:\n{done.stderr[-1500:]}"
        )
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def _stats(measured: dict[str, Any]) -> Record:
    """Return the record of a measurement under load: counts, throughput, and the percentiles and mean of each time.

    `measured` are the results of `vllm bench serve`.
    """
    times = {
        name: {f"p{percentile}": measured[f"p{percentile}_{name}_ms"] for percentile in _PERCENTILES}
        | {"mean": measured[f"mean_{name}_ms"]}
        for name in _TIMES
    }
    return {
        "completed": measured["completed"],
        "duration_s": measured["duration"],
        "tokens": measured["total_output_tokens"],
        "tokens_per_s": measured["output_throughput"],
        "times_ms": times,
    }


def read_totals(url: str) -> Totals:
    """Return the totals of vLLM's histograms in `_PHASES` since the server's start: sum and count, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_METRICS_S) as page:
        samples = list(parse_metrics_text(page.read().decode()))

    def total(name: str) -> float:
        return sum([sample.value for sample in samples if sample.name == name])

    return {name: (total(f"{metric}_sum"), total(f"{metric}_count")) for name, metric in _PHASES.items()}


def mean_phases(before: Totals, after: Totals) -> Record:
    """Return what vLLM itself counted between two readings: mean times in the queue and in prefill, and its steps.

    The rest of the time to the first token is the wait for the step that runs when a request comes, and the server's.
    """
    change = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in after}
    means = {name: round(1000 * change[name][0] / max(change[name][1], 1), 1) for name in ("queue", "prefill")}
    return {"phases_ms": means, "steps": int(change["step"][1]), "step_tokens": int(change["step"][0])}


def _write_prompts(scenario: Scenario, served: Served, data: Path, directory: Path) -> Path:
    """Write a file of prompts for `vllm bench serve` to `directory`, and return its path.

    It has at least as many prompts as there are requests at each rate, and they alternate between the tasks.
    """
    tasks = [messages for _, messages in read_prompt_sets(scenario, data)]
    mixed = [messages[index % len(messages)] for index in range(served.requests) for messages in tasks]
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in mixed))
    return path
