"""Workers with our speculator for Model Runner V2, around a runner of torch tensors; vLLM itself does not run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from specbranch.core.distribution import Distribution
from specbranch.core.round import Draft
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.runner_v2 import Speculator
from specbranch.service.client.interface import ClientOptions, SequenceUpdate

GAMMA, SLOTS, MAX_LEN, VOCAB_LEN = 3, 4, 16, 100


class Client:
    """Proposes for a text the tokens that follow its last one by counting; fails when it is told to."""

    def __init__(self, options: ClientOptions) -> None:
        self.told: list[tuple[list[int], int]] = []
        self.expected: list[list[int]] = []
        self.length = GAMMA
        self.samplings: list[Any] = []
        self.distributions: list[Distribution | None] = []  # of the drafts of sampled rows
        self.has_failed = False
        self.waited_s = 0.0

    def propose(self, rows: Sequence[SequenceUpdate], step_s: float | None = None) -> list[Draft]:
        if self.has_failed:
            raise RuntimeError("out of order")
        self.told = [(np.asarray(row.tokens).tolist(), row.num_new) for row in rows]
        self.samplings = [row.sampling for row in rows]
        drafts = [[text[-1] + step for step in range(1, self.length + 1)] for text, _ in self.told]
        return [
            Draft(draft, self.distributions if row.sampling else []) for draft, row in zip(drafts, rows, strict=True)
        ]

    def announce_prompts(self, prompts: Sequence[list[int]]) -> None:
        self.expected += prompts

    def close(self) -> None:
        pass


class States:
    """The request states of V2's runner, on the CPU."""

    max_num_reqs, max_model_len = SLOTS, MAX_LEN

    def __init__(self) -> None:
        self.total_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(SLOTS, MAX_LEN, dtype=torch.int32))
        self.last = torch.zeros(SLOTS, 1, dtype=torch.int64)
        self.draft_tokens = torch.zeros(SLOTS, GAMMA, dtype=torch.int64)

    def sample(self, slot: int, text: Sequence[int]) -> None:
        """Let a slot have this text."""
        self.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.total_len.gpu[slot] = len(text)
        self.last[slot] = text[-1]


OURS = {"address": "ipc:///nowhere", "is_gated": False, "rule": "auto", "runner": "auto"}


class Rank:
    """A worker with our speculator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_output_rank: bool = True, **section: Any) -> None:
        monkeypatch.setattr(compat, "warn_if_untested", lambda: None)
        monkeypatch.setattr(compat, "is_output_rank", lambda: is_output_rank)
        monkeypatch.setattr("specbranch.plugins.vllm.proposer.draft_client", Client)
        config = SimpleNamespace(
            additional_config={"specbranch": {**OURS, **section}},
            speculative_config=SimpleNamespace(
                num_speculative_tokens=GAMMA, method="ngram_gpu", enable_adaptive_verification=True
            ),
            model_config=SimpleNamespace(max_model_len=MAX_LEN, get_vocab_size=lambda: VOCAB_LEN),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                prefill_context_parallel_size=1,
                distributed_executor_backend="mp",
            ),
        )
        self.states = States()
        self.has_grammar = False
        self.speculator = Speculator(config, torch.device("cpu"), self.states)

    @property
    def client(self) -> Any:
        return self.speculator._core._client

    def sample_at(self, temperatures: Sequence[float], budgets: Sequence[bool] | None = None) -> None:
        """Let the runner sample its slots so; `budgets`: which of them have a thinking budget."""
        states = SimpleNamespace(
            temperature=SimpleNamespace(np=np.array(temperatures, np.float32)),
            top_p=SimpleNamespace(np=np.full(SLOTS, 0.5, np.float32)),
            top_k=SimpleNamespace(np=np.array([VOCAB_LEN, 7] * (SLOTS // 2))),
            seeds=SimpleNamespace(np=np.arange(SLOTS)),
            seeds_set=np.zeros(SLOTS, bool),
            vocab_size=VOCAB_LEN,
        )
        thinking = SimpleNamespace(use_thinking_budget=np.array(budgets)) if budgets else SimpleNamespace()
        sampler = SimpleNamespace(sampling_states=states, thinking_budget_state=thinking)
        lora = SimpleNamespace(lora_ids=np.zeros(SLOTS, np.int32))
        self.speculator.on_step_scheduled(
            SimpleNamespace(sampler=sampler, lora_state=lora, encoder_cache=None), compat.StepInfo()
        )

    def propose(self, *rows: tuple[str, int, int], **kwargs: Any) -> list[list[int]]:
        """Drafts of rows, each given by name, slot and number of new tokens."""
        names, slots, num_sampled = zip(*rows, strict=True)
        batch = SimpleNamespace(
            num_reqs=len(rows),
            req_ids=list(names),
            idx_mapping=torch.tensor(slots),
            idx_mapping_np=np.array(slots),
            has_structured_output_reqs=self.has_grammar,
        )
        sampled = torch.tensor(num_sampled, dtype=torch.int32)
        drafts = self.speculator.propose(
            batch, None, None, None, None, sampled, None, self.states.last, None, None, None, **kwargs
        )
        assert (drafts.dtype, tuple(drafts.shape)) == (torch.int64, (len(rows), GAMMA))
        self.states.draft_tokens[batch.idx_mapping] = drafts
        found: list[list[int]] = drafts.tolist()
        return found


class Group:
    """Two ranks, one after the other: what the first one broadcasts is what the second one gets."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, tensor: Any) -> Any:
        if not self.sent:
            self.sent.append(tensor.clone())
            return tensor
        sent = self.sent.pop()
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        return tensor.copy_(sent)
