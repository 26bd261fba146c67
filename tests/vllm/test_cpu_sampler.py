"""vLLM's verification on the CPU hands every draft token its own request's sampling parameters, with our workaround."""

from __future__ import annotations

from tests.measuring import record
from tests.vllm.programs import run_with_sampler

PROGRAM = """
import json
from types import SimpleNamespace

import torch
from specbranch.plugins.vllm import compat

replaced = compat.patch_cpu_sampler()
ends = torch.tensor([2, 2, 5], dtype=torch.int32)
top_k, temperature = torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0.5, 0.75, 0.0])
compat.patch_cpu_sampler()  # a second time changes nothing


def recovered(num_drafted):
    # The tokens in place of draft tokens 1 where the target is sure of 3, and whether random numbers were drawn.
    before = torch.get_rng_state()
    sure = torch.nn.functional.one_hot(torch.full((num_drafted,), 3), 9).float()
    ids, ends = torch.ones(num_drafted, dtype=torch.int32), torch.tensor([num_drafted], dtype=torch.int32)
    found = rejection_sampler.sample_recovered_tokens(
        2, [num_drafted], ends, ids, None, sure, SimpleNamespace(generators={}), torch.device("cpu")
    )
    return found.tolist(), not torch.equal(before, torch.get_rng_state())


print(json.dumps([
    current_platform.is_cpu(),
    rejection_sampler.expand_batch_to_tokens(top_k, ends, 5).tolist(),
    rejection_sampler.expand_batch_to_tokens(temperature, ends, 5, replace_from=0, replace_to=1).tolist(),
    list(rejection_sampler.apply_top_k_top_p(torch.empty(0, 9), top_k[:0], None).shape),
    replaced,
    rejection_sampler.apply_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]), None).isinf().tolist(),
    [recovered(2), recovered(0)],
]))
"""


def test_every_draft_token_gets_the_parameters_of_its_request() -> None:
    """The second request has no draft token; a temperature of 0 becomes 1, as vLLM asks for."""
    top_k, temperature, shape, replaced, is_cut, recovered = run_with_sampler(PROGRAM)

    record("sampler", replaced=", ".join(replaced))
    assert top_k == [5, 5, 7, 7, 7]
    assert temperature == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert shape == [0, 9]  # a step without draft tokens
    assert is_cut == [[True, False, False]]
    assert recovered == [[[3, 3], True], [[], False]]
