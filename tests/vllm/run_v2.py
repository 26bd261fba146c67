"""Decode with Model Runner V2 on the CPU, bare and with our speculator; print one JSON document.

A program of its own, with one part for each call: vLLM keeps global state, and its environment must be set before it is
imported.
"""

from __future__ import annotations

import tests.vllm.interpreter  # isort: skip  # before all that may import vLLM

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from specbranch.core.planners import PLANNERS
from specbranch.exactness.statistics import compare_counts, count_pairs
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.launch.vllm_engine import LocalEngine, LocalEngineOptions, Request
from specbranch.plugins.vllm import runner_v2, runner_v2_device
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments
from tests.vllm.made_models import VOCAB_LEN, write_pair
from tests.vllm.programs import FALSE_ALARM, MAX_TESTS
from tests.vllm.runs import CORES, num_equal, proposer_of, squared

assert tests.vllm.interpreter
ROWS, TOKENS, GAMMA = 8, 20, 4
SAMPLES, SAMPLED_TOKENS = 300, 3
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 2": {"temperature": 2.0},  # this model is sure of what it says
    "top-p 0.9, top-k 20, penalties": {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
}
SOME = ("budget", "sps")
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": ROWS,
    "max_num_batched_tokens": 64,  # some prompts are read in several steps, beside rows that decode
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "distributed_executor_backend": "uni",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    with tempfile.TemporaryDirectory() as directory:
        target, draft = write_pair(Path(directory))
        print(json.dumps(PARTS[parser.parse_args().part](str(target), str(draft))))


def some_planners(target: str, draft: str) -> dict[str, Any]:
    """The default planner and one that always waits for drafts; requests that are aborted; a draft that is killed."""
    return _decode(target, draft, SOME)


def all_planners(target: str, draft: str) -> dict[str, Any]:
    """Every planner."""
    return _decode(target, draft, list(PLANNERS))


def asynchronous(target: str, draft: str) -> dict[str, Any]:
    """As on GPUs: the scheduler is a step ahead, and every row has all places."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        original(config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(keep)
    return _decode(target, draft, SOME)


def by_load(target: str, draft: str) -> dict[str, Any]:
    """Another number of places at each load: none at up to 4 rows, all at up to 7, then 1."""
    return _decode(target, draft, SOME, num_speculative_tokens_per_batch_size=[[1, 4, 0], [5, 7, GAMMA], [8, ROWS, 1]])


def two_ranks(target: str, draft: str) -> dict[str, Any]:
    """Two tensor-parallel workers, each in a process of its own."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    arguments = {**ARGUMENTS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    bare = LocalEngine(LocalEngineOptions(target, arguments=arguments))
    known = _answers(bare)
    bare.llm.llm_engine.engine_core.shutdown()
    with _service(draft) as service:
        settings = _settings(service.address, "sps")
        ours = LocalEngine(LocalEngineOptions(target, arguments={**arguments, **proposer_arguments(settings, GAMMA)}))
        equal = num_equal(known, _answers(ours))
        drafted = ours.draft_tokens()
        ours.llm.llm_engine.engine_core.shutdown()
    return {"equal": equal, "drafted": drafted}


def sampled(target: str, draft: str) -> dict[str, Any]:
    """Sampled answers against bare V2's, and against drafts whose probabilities are wrong on purpose."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # vLLM's own torch form: the interpreter cannot run the other one
    bare = LocalEngine(LocalEngineOptions(target, arguments=ARGUMENTS))
    expected = {name: _samples(bare, one, seed=1) for name, one in SAMPLINGS.items()}
    del bare
    with _service(draft) as service:
        settings = _settings(service.address, "sps")
        ours = LocalEngine(LocalEngineOptions(target, arguments={**ARGUMENTS, **proposer_arguments(settings, GAMMA)}))
        pair = Pair(target, draft)
        found = {name: _compared(ours, one, expected[name], pair) for name, one in SAMPLINGS.items()}

        def wrong(answer: Any, samplings: Any, sampled_from: Any) -> Any:
            """As if the tokens had been drawn at a quarter of the temperature."""
            flat = {row: [squared(squared(q)) for q in distributions] for row, distributions in sampled_from.items()}
            return runner_v2_device.pack(answer, samplings, flat)

        name = next(iter(SAMPLINGS))
        with mock.patch.object(runner_v2, "pack", wrong):
            wrong_found = _compared(ours, SAMPLINGS[name], expected[name], pair)
    return {"found": found, "wrong": wrong_found}


PARTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "some": some_planners,
    "all": all_planners,
    "async": asynchronous,
    "load": by_load,
    "ranks": two_ranks,
    "sampled": sampled,
}


def _decode(target: str, draft: str, planners: Sequence[str], **speculative: Any) -> dict[str, Any]:
    bare = LocalEngine(LocalEngineOptions(target, arguments=ARGUMENTS))
    known = _answers(bare)
    result: dict[str, Any] = {"runner": _runner(bare), "chunks": _has_chunks(), "equal": {}, "drafted": {}}
    del bare
    with _service(draft) as service:
        arguments = proposer_arguments(_settings(service.address), GAMMA)
        arguments["speculative_config"] |= speculative
        ours = LocalEngine(LocalEngineOptions(target, arguments={**ARGUMENTS, **arguments}))
        result["drafting_runner"] = _runner(ours)
        result["is_async"] = ours.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        proposer = proposer_of(ours.llm)
        for planner in planners:
            proposer.configure(_settings(service.address, planner))
            before = ours.draft_tokens()
            result["equal"][planner] = num_equal(known, _answers(ours))
            drafted = [after - first for after, first in zip(ours.draft_tokens(), before, strict=True)]
            result["drafted"][planner] = drafted
        proposer.configure(_settings(service.address))
        result["aborted"] = _abort(ours, known)
        result["faults"] = proposer.counts()["faults"]
    result["killed"] = _kill(ours, draft, known)
    return result


def _service(draft: str) -> DraftProcess:
    return DraftProcess(DraftServiceOptions(draft, engine="torch", cores=CORES.draft, extra=("--log-level", "warning")))


def _settings(address: str, planner: str = "budget", **more: Any) -> ProposerSettings:
    # A step takes a second here, and what it costs is not what is tested.
    settings = {"cost_aware": False} if planner == "budget" else {}
    ours = {"address": address, "planner": planner, "settings": settings, "deadline_ms": 20000, "is_gated": False}
    return ProposerSettings(**{**ours, "runner": "v2", "rule": "auto", **more})


def _prompts() -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(VOCAB_LEN) for _ in range(5 + 11 * row)] for row in range(ROWS)]


def _has_chunks() -> bool:
    return sum(len(prompt) for prompt in _prompts()) > 2 * int(str(ARGUMENTS["max_num_batched_tokens"]))


def _requests() -> list[Request]:
    greedy = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return [Request(prompt, greedy) for prompt in _prompts()]


def _answers(target: LocalEngine) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(ROWS)]
    for piece in target.stream(_requests()):
        answers[piece.index] += piece.tokens
    return answers


def _abort(target: LocalEngine, known: Sequence[Sequence[int]]) -> dict[str, int]:
    """Abort all requests in the middle, and decode them anew: the slots of the aborted ones are used again."""
    stream = target.stream(_requests())
    seen = 0
    for piece in stream:
        seen += len(piece.tokens)
        if seen >= ROWS * TOKENS // 3:
            break
    stream.close()
    return {"seen": seen, "equal": num_equal(known, _answers(target))}


def _kill(target: LocalEngine, draft: str, known: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Kill the draft in the middle: the rest of the answers is decoded without."""
    answers: list[list[int]] = [[] for _ in range(ROWS)]
    proposer = proposer_of(target.llm)
    with _service(draft) as service:
        proposer.configure(_settings(service.address, deadline_ms=500))
        is_killed = False
        for piece in target.stream(_requests()):
            answers[piece.index] += piece.tokens
            if not is_killed and sum(map(len, answers)) >= ROWS * TOKENS // 3:
                service.kill()
                is_killed = True
    counts = proposer.counts()
    return {"equal": num_equal(known, answers), "answered": counts["answered"], "calls": counts["calls"]}


def _samples(target: LocalEngine, sampling: Mapping[str, Any], seed: int) -> list[list[int]]:
    """Many answers to one prompt."""
    parameters = {**sampling, "max_tokens": SAMPLED_TOKENS, "ignore_eos": True, "detokenize": False}
    prompt = _prompts()[0]
    requests = [Request(prompt, {**parameters, "seed": seed * SAMPLES + index}) for index in range(SAMPLES)]
    answers: list[list[int]] = [[] for _ in requests]
    for piece in target.stream(requests):
        answers[piece.index] += piece.tokens
    return answers


class Pair:
    """Both models by Transformers: what the target samples from at every place is known."""

    def __init__(self, target: str, draft: str) -> None:
        from transformers import AutoModelForCausalLM

        self._models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (target, draft)]

    def lean(self, texts: Sequence[Sequence[int]], temperature: float) -> float:
        """How likely chance alone is as far off, in how often tokens come that the wrong probabilities make rare.

        Two-sided. Far more is seen this way than by counting tokens, of which most come once or twice.
        """
        import torch

        prompt = _prompts()[0]
        tokens = torch.tensor([[*prompt, *text] for text in texts])
        with torch.inference_mode():
            p, q = (
                torch.softmax(model(tokens).logits[:, len(prompt) : -1].double() / temperature, -1)
                for model in self._models
            )
        wrong = q**4 / (q**4).sum(-1, keepdim=True)
        is_rarer = wrong > p
        chances = (p * is_rarer).sum(-1)
        is_seen = is_rarer.gather(-1, tokens[:, len(prompt) + 1 :, None])[..., 0]
        deviation = (chances * (1 - chances)).sum().sqrt()
        return float(torch.special.erfc((is_seen.sum() - chances.sum()).abs() / deviation / 2**0.5))


def _compared(
    target: LocalEngine, sampling: Mapping[str, Any], expected: Sequence[Sequence[int]], pair: Pair
) -> dict[str, Any]:
    """Each token behind the first by a permutation test against bare V2, and by what is known; and what was kept."""
    before, drawn = target.draft_tokens(), proposer_of(target.llm).counts()["sampled"]
    texts = _samples(target, sampling, seed=2)
    submitted, accepted = (after - first for after, first in zip(target.draft_tokens(), before, strict=True))
    rng = np.random.default_rng(0)
    p_values = []
    for place in range(1, SAMPLED_TOKENS):
        counts = count_pairs([text[place] for text in texts], [text[place] for text in expected])
        p_values.append(compare_counts(*counts, FALSE_ALARM / MAX_TESTS, rng).p_value)
    if set(sampling) == {"temperature"}:
        p_values.append(pair.lean(texts, sampling["temperature"]))
    drawn = proposer_of(target.llm).counts()["sampled"] - drawn
    return {"p_values": p_values, "submitted": submitted, "accepted": accepted, "drawn": drawn}


def _runner(target: LocalEngine) -> str:
    core: Any = target.llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    return f"{type(runner).__module__} {type(getattr(runner, 'speculator', None)).__name__}"


if __name__ == "__main__":
    main()
