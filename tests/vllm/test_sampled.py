"""Draft tokens that are drawn by chance, tested by vLLM's own sampler: the output follows the target's distribution."""

from __future__ import annotations

import pytest

from tests.vllm.programs import judge_sampled, run_program, run_with_sampler

SAMPLER = """
import json
from types import SimpleNamespace
import torch
from specbranch.core.sampling import Sampling, number, pick
from specbranch.core.distribution import Distribution
from specbranch.plugins.vllm.compat import patches
from specbranch.plugins.vllm.compat.probs import DraftProbs

patches.patch_cpu_sampler()
torch.manual_seed(0)
ROWS, VOCAB = 2000, 6
p = torch.tensor([0.05, 0.4, 0.25, 0.1, 0.2, 0.0])
draft = Distribution((2, 0, 4, 5), (0.5, 0.2, 0.15, 0.05), 1.0)

def counts(told):
    '''How often each token comes first and second; the first place was drawn from q, the second is certain.'''
    q = Sampling(0.8).shape(draft)
    drawn = [q.ids[pick(q.probs, number(seed, 3, [1, 2]))] for seed in range(ROWS)]
    runner = SimpleNamespace(
        _draft_probs=None, _draft_prob_req_ids=None, device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_ids=[str(row) for row in range(ROWS)]),
    )
    drafts = [[token, 1] for token in drawn]
    DraftProbs(VOCAB, 3).hand_over(runner, drafts, {row: [told(q), None] for row in range(ROWS)})
    probs = torch.cat([runner._draft_probs[row, :2] for row in range(ROWS)]).contiguous()
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(ROWS), generators={})
    said = rejection_sampler.rejection_sample(
        torch.tensor(drafts, dtype=torch.int32).flatten(), [2] * ROWS, 2,
        torch.arange(2, 2 * ROWS + 1, 2, dtype=torch.int32), probs, p.log().repeat(2 * ROWS, 1),
        torch.full((ROWS, 1), 3, dtype=torch.int32), sampling,
    )
    outputs, *_ = rejection_sampler.RejectionSampler.parse_output(said, VOCAB)
    firsts, seconds = [[0] * VOCAB for _ in range(2)]
    for output in outputs:
        firsts[output[0]] += 1
        if len(output) > 1:
            seconds[output[1]] += 1
    kept = sum(output[0] == token for output, token in zip(outputs, drawn))
    return firsts, seconds, kept

def squared(q):
    total = sum(prob**2 for prob in q.probs)
    return Distribution(q.ids, tuple(prob**2 / total for prob in q.probs), 0.0)

print(json.dumps([current_platform.is_cpu(), p.tolist(), counts(lambda q: q), counts(squared)]))
"""


def test_vllms_sampler_tests_drawn_tokens_by_their_probabilities() -> None:
    """With the rows that the proposer hands over; those of another temperature give another distribution."""
    p, right, wrong = run_with_sampler(SAMPLER)

    firsts, seconds, kept = right
    # Of a draft whose first choice the target says in 0.25 of the cases; both distributions have 0.46 in common.
    assert 0.42 < kept / sum(firsts) < 0.5
    assert chi_square(firsts, p) < 25  # p = 0.0001 at 5 degrees
    assert chi_square(seconds, p) < 25
    assert chi_square(wrong[0], p) > 50


def chi_square(counts: list[int], p: list[float]) -> float:
    total = sum(counts)
    assert all(count == 0 for count, prob in zip(counts, p, strict=True) if prob == 0)
    return sum((count - total * prob) ** 2 / (total * prob) for count, prob in zip(counts, p, strict=True) if prob)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_drawn_tokens_leave_the_distribution_alone_and_wrong_probabilities_are_noticed() -> None:
    judge_sampled(run_program("sampled"), least_kept=0.3)
