"""The proposer's own logic, without vLLM: settings, rows, limits, ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbranch.core.planners import SettingError
from specbranch.plugins.vllm import SpecBranchProposer, compat
from specbranch.plugins.vllm.settings import ProposerSettings, read_settings
from specbranch.service.client import Committed


class FixedClient:
    """Proposes the same for every row, and remembers what it was told."""

    def __init__(self, proposal: list[int]) -> None:
        self._proposal = proposal
        self.told: list[tuple[list[int], int]] = []

    def propose(self, rows: list[Committed]) -> list[list[int]]:
        self.told = [(np.asarray(row.tokens).tolist(), row.num_new) for row in rows]
        return [list(self._proposal) for _ in rows]


def proposer_with(monkeypatch: pytest.MonkeyPatch, is_output_rank: bool = True, **section: Any) -> SpecBranchProposer:
    monkeypatch.setattr(compat, "warn_if_untested", lambda: None)
    monkeypatch.setattr(compat, "mend_cpu_sampler", lambda: None)
    monkeypatch.setattr(compat, "is_output_rank", lambda: is_output_rank)
    monkeypatch.setattr("specbranch.plugins.vllm.proposer.DraftClient", lambda options: FixedClient([5, 6, 7]))
    config = SimpleNamespace(
        additional_config={"specbranch": {"address": "ipc:///nowhere", **section}},
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(max_model_len=10),
    )
    return SpecBranchProposer(config)


def tokens(*rows: list[int]) -> tuple[Any, Any]:
    table = np.zeros((len(rows) + 2, 16), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return np.array([len(row) for row in rows] + [0, 0]), table


def test_rows_in_chunked_prefill_get_nothing_and_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1, 2, 3], [4, 5], [6, 7, 8, 9])
    drafts = proposer.propose([[3], [], [8, 9]], lengths, table, slot_mappings=None)

    assert drafts == [[5, 6], [], [5, 6]]
    client: Any = proposer._client
    assert client.told == [([1, 2, 3], 1), ([6, 7, 8, 9], 2)]


def test_a_draft_never_goes_beyond_what_vllm_takes_or_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1] * 7, [1] * 8, [1] * 9, [1] * 10)

    drafts = proposer.propose([[1]] * 4, lengths, table)

    assert [len(draft) for draft in drafts] == [2, 1, 0, 0]


def test_other_ranks_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, is_output_rank=False)
    lengths, table = tokens([1, 2])

    assert proposer._client is None
    assert proposer.propose([[2]], lengths, table) == [[]]
    proposer.load_model(object())


def test_settings_come_from_additional_config_and_gamma_from_vllm() -> None:
    settings = read_settings({"planner": "pearl", "deadline_ms": 20, "namespace": "team", "keys": "/k"})
    options = settings.client_options(gamma=6)

    assert (options.planner, options.settings, options.deadline_s) == ("pearl", {"gamma": 6}, 0.02)
    assert options.namespace == b"team"
    assert options.keys is not None and options.keys.secret.name == "client.key_secret"
    assert ProposerSettings(planner="none").client_options(6).settings == {}
    assert ProposerSettings(settings={"gamma": 3}).client_options(6).settings == {"gamma": 3}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"adress": "x"}, "did you mean 'address'"),
        ({"planner": "perl"}, "did you mean 'pearl'"),
        ({"settings": {"gama": 1}}, "did you mean 'gamma'"),
        ("ipc:///x", "give a table"),
    ],
)
def test_a_wrong_setting_is_refused_at_start_with_its_mend(section: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_settings(section).client_options(gamma=4)
