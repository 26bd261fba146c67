"""Pads against vLLM's own code: its scheduler, its runner and its sampler take them, and the output stays the same."""

from __future__ import annotations

import pytest

from tests.models import SHORT
from tests.vllm.programs import run_program, run_with_sampler

SAMPLER = """
import json
from types import SimpleNamespace
import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.structured_output.utils import strip_speculative_padding
from specbranch.plugins.vllm import compat
from specbranch.plugins.vllm.compat import PAD

compat.patch_cpu_sampler()
drafts = torch.tensor([[2, PAD, PAD], [1, PAD, PAD], [PAD, PAD, PAD], [2, 3, 4]], dtype=torch.int32)
logits = torch.zeros(12, 6)
for position in range(12):  # the target wants 2, 3, 4 and then 5
    logits[position, 2 + position % 3] = 9.0
said = rejection_sampler.rejection_sample(
    drafts.flatten(), [3] * 4, 3, torch.tensor([3, 6, 9, 12], dtype=torch.int32), None, logits,
    torch.full((4, 1), 5, dtype=torch.int32), SimpleNamespace(all_greedy=True, all_random=False, temperature=None),
)
outputs, *_ = rejection_sampler.RejectionSampler.parse_output(said, 6)
one, none = torch.ones(1), torch.zeros(1)
prompt = torch.tensor([[0]])
penalized = [
    apply_all_penalties(torch.ones(1, 6), prompt, one, one, one, [tokens]).tolist() for tokens in ([3, PAD, PAD], [3])
]
print(json.dumps([current_platform.is_cpu(), outputs, penalized, strip_speculative_padding([4, PAD, 5])]))
"""


def test_vllms_sampler_rejects_pads_and_its_penalties_and_grammars_do_not_see_them() -> None:
    """Greedy, by the kernel of this device."""
    outputs, penalized, stripped = run_with_sampler(SAMPLER)

    assert outputs == [[2, 3], [2], [2], [2, 3, 4, 5]]
    assert penalized[0] == penalized[1]
    assert stripped == [4]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_with_pads_the_output_is_that_of_bare_vllm_and_rows_are_equally_long() -> None:
    """Float32, greedy; also with penalties, log-probabilities, a schema, and sequences up to the longest length."""
    result = run_program("pads", pair=SHORT)

    assert set(result["equal"].values()) == {result["prompts"]}
    submitted, accepted = result["drafts"]["pearl"]
    assert submitted >= accepted > 20
    assert result["drafts"]["none"] == [0, 0]  # pads are no drafts
    for lengths in result["lengths"].values():  # by tokens of a row; prompts have more, others are beside a schema
        assert lengths["5"] > 5 * sum(num for length, num in lengths.items() if length in ("1", "2", "3", "4"))
