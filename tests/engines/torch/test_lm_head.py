"""The output layer with candidates: it learns, finds what the full layer finds, and notices when it no longer does."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")

from specbranch.engines.torch.linear import Int8Linear, can_int8
from specbranch.engines.torch.lm_head import LEARNED, LowRankOutputLayer, is_worth_narrowing

pytestmark = pytest.mark.skipif(not can_int8(), reason="this build of torch has no int8 kernels")
VOCAB, WIDTH, TRUE_WIDTH = 131072, 64, 12


@pytest.fixture
def linear() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(WIDTH, VOCAB, bias=False)


def states(count: int, seed: int) -> Any:
    """Hidden states that vary along few directions; another seed, other directions."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.randn(TRUE_WIDTH, WIDTH, generator=generator)
    return torch.randn(count, TRUE_WIDTH, generator=generator) @ axes * 2


def learned(head: LowRankOutputLayer, seed: int) -> LowRankOutputLayer:
    for piece in states(LEARNED, seed).split(1024):
        assert not head.is_narrow
        head.observe(piece)
    assert head.is_narrow
    return head


def test_it_says_the_same_as_the_full_layer_of_tokens_that_matter(linear: Any) -> None:
    head = learned(LowRankOutputLayer(linear, Int8Linear), seed=1)
    rows = states(LEARNED + 64, seed=1)[LEARNED:]
    full = rows @ linear.weight.detach().T
    logits = torch.cat([head(piece) for piece in rows.split(4)])

    assert torch.equal(logits.argmax(-1), full.argmax(-1))
    assert (logits.softmax(-1) - full.softmax(-1)).abs().sum(-1).max() < 0.02


def test_a_flat_distribution_has_exact_logits_for_its_first_tokens_and_no_more_of_them(linear: Any) -> None:
    """Every candidate is a row of the matrix to read, and here are thousands of about the same chance."""
    row = states(LEARNED + 1, seed=1)[LEARNED:] / 4
    with torch.no_grad():
        linear.weight[:4096] += 8 * row / row.square().sum()
    head = learned(LowRankOutputLayer(linear, Int8Linear), seed=1)
    full = row @ linear.weight.detach().T

    logits = head(row)

    num_full = int(torch.isclose(logits, full, atol=1e-6, rtol=0).sum())
    assert 512 < num_full < 1536
    assert set(logits.topk(16).indices[0].tolist()) == set(full.topk(16).indices[0].tolist())


def test_its_output_has_the_shape_of_its_input(linear: Any) -> None:
    head = LowRankOutputLayer(linear, Int8Linear)
    before = head(states(3, seed=1)[None])
    after = learned(head, seed=1)(states(3, seed=1)[None])

    assert before.shape == after.shape == (1, 3, VOCAB)


def test_it_goes_back_to_the_full_layer_when_sequences_change_and_learns_anew(
    linear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.engines.torch.lm_head._AUDIT_EVERY", 1)
    head = learned(LowRankOutputLayer(linear, Int8Linear), seed=1)
    others = states(512, seed=2)
    full = others @ linear.weight.detach().T
    first = head(others[:4])
    assert not torch.equal(first.argmax(-1), full[:4].argmax(-1)), "else there would be nothing to notice"
    products = 0
    while head.is_narrow and products < 20:
        head(others[:4])
        products += 1

    assert not head.is_narrow
    near = (head(others).argmax(-1) == full.argmax(-1)).float().mean()
    assert near > 0.97  # within 8 bits
    assert learned(head, seed=2)


def test_many_rows_go_through_the_full_layer(linear: Any) -> None:
    head = LowRankOutputLayer(linear, Int8Linear)
    rows = states(5, seed=1)
    full = head(rows)
    learned(head, seed=1)

    assert torch.equal(head(rows), full)
    assert not torch.equal(head(rows[:4]), full[:4])


def test_small_layers_and_layers_with_a_bias_are_left_full(linear: Any) -> None:
    assert is_worth_narrowing(linear)
    assert not is_worth_narrowing(torch.nn.Linear(WIDTH, 1000, bias=False))
    assert not is_worth_narrowing(torch.nn.Linear(8, VOCAB))
