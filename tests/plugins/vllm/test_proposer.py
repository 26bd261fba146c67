"""The proposer's own logic, without vLLM: settings, rows, limits, ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from specbranch.core.planners import SettingError
from specbranch.core.round import AcceptanceHint, Draft
from specbranch.engines.vocabulary import HASH_LEN
from specbranch.hrad.network import write_hrad
from specbranch.plugins.vllm import SpecBranchProposer, compat
from specbranch.plugins.vllm import proposer as vllm_proposer
from specbranch.plugins.vllm import settings as vllm_settings
from specbranch.plugins.vllm.compat import PAD
from specbranch.plugins.vllm.proposer import RowTextDrafter
from specbranch.plugins.vllm.settings import LayoutError, ProposerSettings, read_settings
from specbranch.service.client.gate import Decision, StepTimer
from specbranch.service.client.interface import NO_ANSWER, ClientOptions, SequenceUpdate
from specbranch.service.client.pool import draft_client


class FixedClient:
    """Proposes the same for every row, and remembers what it was told."""

    def __init__(self, proposal: list[int], options: ClientOptions) -> None:
        self._proposal: list[int] | None = proposal  # None: no answer
        self.options = options
        self.told: list[tuple[list[int], int]] = []
        self.hints: list[AcceptanceHint | None] = []
        self.expected: list[list[int]] = []
        self.step_s: float | None = None
        self.waited_s = 0.0
        self.num_rests = 0

    def rest(self) -> None:
        self.num_rests += 1

    def announce_prompts(self, prompts: Sequence[list[int]]) -> None:
        self.expected += prompts

    def close(self) -> None:
        pass

    def propose(self, rows: list[SequenceUpdate], step_s: float | None = None) -> list[Draft]:
        self.step_s = step_s
        self.told = [(np.asarray(row.tokens).tolist(), row.num_new) for row in rows]
        self.hints = [row.hint for row in rows]
        self.longest = [row.max_draft_tokens for row in rows]
        self.recurring = [row.has_recurring_noise for row in rows]
        return [NO_ANSWER if self._proposal is None else Draft(list(self._proposal)) for _ in rows]


def proposer_with(
    monkeypatch: pytest.MonkeyPatch, is_output_rank: bool = True, target: Any = None, **section: Any
) -> SpecBranchProposer:
    monkeypatch.setattr(compat, "warn_if_untested", lambda: None)
    monkeypatch.setattr(compat, "patch_cpu_sampler", lambda: None)
    monkeypatch.setattr(compat, "is_output_rank", lambda: is_output_rank)
    monkeypatch.setattr("specbranch.plugins.vllm.proposer.draft_client", partial(FixedClient, [5, 6, 7]))
    vllm_config = SimpleNamespace(
        additional_config={"specbranch": {"address": "ipc:///nowhere", "is_gated": False, **section}},
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(
            **{"max_model_len": 10, "get_vocab_size": lambda: 49152, **(target or {}).get("model", {})}
        ),
        parallel_config=SimpleNamespace(
            **{
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "distributed_executor_backend": "mp",
                **(target or {}).get("parallel", {}),
            }
        ),
    )
    return SpecBranchProposer(vllm_config)


def tokens(*rows: list[int]) -> tuple[Any, Any]:
    table = np.zeros((len(rows) + 2, 16), dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return np.array([len(row) for row in rows] + [0, 0]), table


def test_a_plugin_that_is_switched_off_contacts_nobody_and_proposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_ENABLED", "0")
    proposer = proposer_with(monkeypatch, pad="on", planner="pearl")
    lengths, table = tokens([1, 2, 3], [4, 5])

    assert proposer.core._client is None and not proposer.core.is_on
    assert proposer.core.settings.address is None
    assert proposer.propose([[3], [5]], lengths, table) == [[], []]


def test_rows_in_chunked_prefill_get_nothing_and_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1, 2, 3], [4, 5], [6, 7, 8, 9])
    drafts = proposer.propose([[3], [], [8, 9]], lengths, table, slot_mappings=None)

    assert drafts == [[5, 6], [], [5, 6]]
    client: Any = proposer.core._client
    assert client.told == [([1, 2, 3], 1), ([6, 7, 8, 9], 2)]


def test_a_draft_never_goes_beyond_what_vllm_takes_or_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1] * 7, [1] * 8, [1] * 9, [1] * 10)

    drafts = proposer.propose([[1]] * 4, lengths, table)

    assert [len(draft) for draft in drafts] == [2, 1, 0, 0]


def test_the_client_knows_what_the_target_can_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    clients: list[Any] = [proposer.core._client]
    proposer.configure(ProposerSettings(planner="pearl"))
    clients.append(proposer.core._client)

    assert clients[0] is not clients[1]
    assert [client.options.vocab_len for client in clients] == [49152, 49152]


def test_the_targets_tokens_are_read_once_where_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From where vLLM takes its tokenizer. Settings that change later do not read them again."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 257}}}))
    target = {"model": {"tokenizer": str(tmp_path), "model": "/nowhere"}}
    proposer = proposer_with(monkeypatch, target=target)
    samples = [options_of(proposer).vocab_fingerprint]
    (tmp_path / "tokenizer.json").unlink()
    proposer.configure(ProposerSettings(planner="pearl"))
    samples.append(options_of(proposer).vocab_fingerprint)

    assert samples[0] == samples[1] and len(samples[0]) == 2 * HASH_LEN
    assert proposer_with(monkeypatch, is_output_rank=False, target=target).core._vocab_sample == b""


@pytest.mark.parametrize("model", [{}, {"tokenizer": "/nowhere"}, {"tokenizer": None, "model": "/nowhere"}])
def test_a_target_whose_tokens_cannot_be_read_is_compared_by_size(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    options = options_of(proposer_with(monkeypatch, target={"model": model}))

    assert (options.vocab_len, options.vocab_fingerprint) == (49152, b"")


def options_of(proposer: SpecBranchProposer) -> ClientOptions:
    client: Any = proposer.core._client
    options: ClientOptions = client.options
    return options


def test_other_ranks_stay_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, is_output_rank=False)
    lengths, table = tokens([1, 2])

    assert proposer.core._client is None
    assert proposer.propose([[2]], lengths, table) == [[]]
    proposer.load_model(object())


def test_drafts_are_left_out_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts give no more tokens than those without, so the gate closes after its trial."""
    proposer = proposer_with(monkeypatch, is_gated=True)
    proposer.core._timer = StepTimer(partial(next, itertools.count()))  # every step takes a second
    num_with_drafts = 0
    for length in range(3, 9):
        lengths, table = tokens([1] * length)
        for _ in range(20):
            proposer.core._max_model_len = 100
            num_with_drafts += proposer.propose([[1]], lengths, table) != [[]]
            lengths[0] += 1

    assert 0 < num_with_drafts < 40


def test_the_same_settings_again_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, planner="pearl")
    client, gate = proposer.core._client, proposer.core._gate.present
    proposer.configure(ProposerSettings(address="ipc:///nowhere", is_gated=False, planner="pearl"))
    assert (proposer.core._client, proposer.core._gate.present) == (client, gate)


def test_settings_that_come_back_find_their_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, is_gated=True)
    gate = proposer.core._gate.present
    proposer.configure(ProposerSettings(address="ipc:///nowhere", planner="sps"))
    assert proposer.core._gate.present is not gate
    proposer.configure(ProposerSettings(address="ipc:///nowhere"))
    assert proposer.core._gate.present is gate


def test_without_a_planner_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, planner="none")
    lengths, table = tokens([1, 2])

    assert proposer.core._client is None
    assert proposer.propose([[2]], lengths, table) == [[]]
    assert proposer.counts() == {}


def test_settings_come_from_additional_config_and_gamma_from_vllm() -> None:
    settings = read_settings({"planner": "pearl", "deadline_ms": 20, "namespace": "team", "keys": "/k"})
    options = settings.client_options(gamma=6, vocab_len=50)

    assert (options.planner, options.settings, options.deadline_s) == ("pearl", {"gamma": 6}, 0.02)
    assert options.namespace == b"team"
    assert options.vocab_len == 50
    assert options.keys is not None and options.keys.secret.name == "client.key_secret"
    assert ProposerSettings(planner="none").client_options(6).settings == {}
    assert ProposerSettings(predictor="none").client_options(6).predictor == "none"
    assert ProposerSettings(settings={"gamma": 3}).client_options(6).settings == {"gamma": 3}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"adress": "x"}, "did you mean 'address'"),
        ({"planner": "perl"}, "did you mean 'pearl'"),
        ({"settings": {"gama": 1}}, "did you mean 'gamma'"),
        (
            {"planner": "adaedl", "settings": {"threshold_step": "x"}},
            "threshold_step is 'x'; give a number from 0 to 1",
        ),
        ({"predictor": "al"}, "no predictor is called 'al', nor a directory with a trained one; did you mean 'all'"),
        ({"predictor": "/nowhere/trained"}, "it takes confidence, none, all"),
        ({"pad": "yes"}, "pad is 'yes'; it takes auto, on, off"),
        ("ipc:///x", "give a table"),
    ],
)
def test_a_wrong_setting_is_refused_at_start_with_its_advice(section: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_settings(section).client_options(gamma=4)


@pytest.mark.parametrize(
    ("planner", "settings", "is_fine"),
    [("specbranch", {}, False), ("specbranch", {"gamma": 2}, True), ("budget", {}, True)],
)
def test_a_predictor_is_served_only_with_the_window_that_it_was_trained_for(
    planner: str, settings: dict[str, Any], is_fine: bool, tmp_path: Path
) -> None:
    """Planners that ask no predictor take any."""
    pytest.importorskip("safetensors", reason="trained predictors are stored with safetensors")
    from tests.hrad.test_network import CARD, small_tensors

    write_hrad(tmp_path, small_tensors(), CARD)  # of windows of two tokens
    section = read_settings({"planner": planner, "settings": settings, "predictor": str(tmp_path)})
    if is_fine:
        assert section.client_options(gamma=4).predictor == "hrad"
        return
    message = "windows of 2 draft tokens, and gamma is 4; set gamma to 2, or train it again .* --window 4"
    with pytest.raises(SettingError, match=message):
        section.client_options(gamma=4)


def test_the_proposer_refuses_a_predictor_for_another_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="trained predictors are stored with safetensors")
    from tests.hrad.test_network import CARD, small_tensors

    write_hrad(tmp_path, small_tensors(), CARD)

    with pytest.raises(SettingError, match="windows of 2 draft tokens, and gamma is 3"):
        proposer_with(monkeypatch, planner="specbranch", settings={"gamma": 3}, predictor=str(tmp_path))


class FakeBatch:
    """The part of vLLM's input batch that tells what rows are."""

    def __init__(self, *names: str, lora: int | None = None) -> None:
        self.req_ids = list(names)
        self.all_greedy = False
        self.request_lora_mapping = np.zeros(8, dtype=np.int64)
        if lora is not None:
            self.request_lora_mapping[lora] = 3


class FakeRunner:
    """A runner with a drafter, whose hook takes what any future release may pass."""

    def __init__(self, drafter: Any, *images: str, lora: int | None = None, samplings: Any = None) -> None:
        names = ["a", "b", "c", "d"]
        self.drafter = drafter
        self.device = SimpleNamespace(type="cuda")
        self.input_batch = FakeBatch(*names, lora=lora)
        self.requests = {
            name: SimpleNamespace(
                mm_features=[name] if name in images else [],
                sampling_params=(samplings or {}).get(name, SimpleNamespace(temperature=0.0, seed=None)),
            )
            for name in names
        }

    def execute_model(self, scheduled: Any, *, later: int) -> Any:
        lengths, table = tokens(*([1, 2, 3] for _ in scheduled.sampled))
        return later, self.drafter.propose(scheduled.sampled, lengths, table)


def step(*sampled: list[int], new: Sequence[Any] = (), ended: Sequence[str] = ()) -> Any:
    """What a scheduler hands to a runner, and what the step will sample."""
    return SimpleNamespace(
        sampled=list(sampled), scheduled_new_reqs=new, scheduled_spec_decode_tokens={}, finished_req_ids=set(ended)
    )


def new_request(
    prompt: list[int] | None,
    lora: str | None = None,
    image: str | None = None,
    name: str = "x",
    gamma: Any = None,
    **sampling: Any,
) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=prompt,
        lora_request=lora,
        mm_features=[image] if image else [],
        sampling_params=SimpleNamespace(extra_args=None if gamma is None else {"specbranch_gamma": gamma}, **sampling),
    )


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    """A class of runners in the place where vLLM has its own."""
    fresh = type("GPUModelRunner", (FakeRunner,), {"execute_model": FakeRunner.execute_model})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=fresh))
    return fresh


def test_rows_with_an_adapter_or_an_image_stand_aside(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch)
    runner = runner_class(proposer, "d", lora=1)

    assert runner.execute_model(step([3], [3], [3], [3]), later=7) == (7, [[5, 6], [], [5, 6], []])
    client: Any = proposer.core._client
    assert len(client.told) == 2
    assert proposer.core._stats.skipped == {"lora": 1, "multimodal": 1}


SEEDED = {
    "a": SimpleNamespace(temperature=1.0, seed=7),
    "b": SimpleNamespace(temperature=1.0, seed=None),
    "c": SimpleNamespace(temperature=0.0, seed=7),  # greedy: nothing is left to chance
}


def test_rows_that_are_sampled_with_a_seed_stand_aside(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """Sent twice, the second would be drafted from the first, and tested with the numbers that made it."""
    vllm_proposer._log_seeds.cache_clear()
    proposer = proposer_with(monkeypatch)
    runner = runner_class(proposer, samplings=SEEDED)
    new = [new_request([1], temperature=0.7, seed=0), new_request([2], temperature=0.7), new_request([3], seed=0)]
    with caplog.at_level("INFO", logger="vllm.specbranch"):
        for _ in range(2):
            drafts = runner.execute_model(step([3], [3], [3], [3], new=new), later=7)[1]

    assert drafts == [[], [5, 6], [5, 6], [5, 6]]
    client: Any = proposer.core._client
    assert client.expected == [[2], [3]] * 2
    assert proposer.core._stats.skipped == {"seed": 2}
    assert caplog.text.count("leave the seed out for drafts") == 1


@pytest.mark.parametrize("namespace", [None, "shared"])
def test_sampled_rows_teach_nobody_in_a_namespace_that_others_may_have(
    namespace: str | None, monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    """vLLM begins with the same random numbers wherever it starts, unless it is given another `--seed`."""
    proposer = proposer_with(monkeypatch, namespace=namespace)
    runner_class(proposer, samplings=SEEDED).execute_model(step([3], [3], [3]), later=0)

    client: Any = proposer.core._client
    assert client.recurring == ([False, False] if namespace is None else [True, False])


def test_the_service_hears_of_prompts_of_text_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch)
    runner = runner_class(proposer)
    new = [new_request([1, 2]), new_request([3], lora="x"), new_request([4], image="y"), new_request(None)]
    runner.execute_model(step([3], new=new), later=0)

    client: Any = proposer.core._client
    assert client.expected == [[1, 2]]


def test_a_request_can_do_without_drafts_or_ask_for_short_ones(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch)
    client: Any = proposer.core._client
    runner = runner_class(proposer)
    new = [new_request([1], name="a", gamma=0), new_request([2], name="b", gamma="1"), new_request([3], name="c")]

    assert runner.execute_model(step([3], [3], [3], new=new), later=0) == (0, [[], [5, 6], [5, 6]])
    assert client.expected == [[2], [3]]
    assert client.longest == [1, None]  # it cuts them, so that it knows what was submitted
    assert proposer.core._stats.skipped == {"request": 1}

    runner.execute_model(step([3], [3], [3], ended=["a", "b"]), later=0)
    assert client.longest == [None, None, None]


@pytest.mark.parametrize("gamma", [-1, "few", [1]])
def test_a_wish_that_cannot_be_read_is_ignored_with_one_warning(gamma: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm_settings._warn_of_value.cache_clear()
    with caplog.at_level("WARNING", logger="vllm.specbranch"):
        assert [vllm_settings.limit_of(SimpleNamespace(extra_args={vllm_settings.KEY: gamma})) for _ in range(2)] == [
            None,
            None,
        ]

    assert caplog.text.count("not a whole number") == 1


def test_what_the_gate_decides_is_logged_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = proposer_with(monkeypatch, is_gated=True)
    caplog.clear()
    with caplog.at_level("INFO", logger="vllm.specbranch"):
        for is_open in (False, False, True):
            proposer.core._gate.log_decisions({8: Decision(8, is_open, 9.1, 9.4, 256)})

    assert [record.getMessage() for record in caplog.records] == [
        f"specbranch: with 5-8 requests at once 9.1 tokens/s with the draft model, 9.4 without: the draft model is "
        f"{state}, next comparison after 256 steps"
        for state in ("off; text drafts go on", "on")
    ]


def test_nobody_is_told_of_prompts_while_drafts_do_not_pay(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch, is_gated=True)
    runner_class(proposer).execute_model(step([3], new=[new_request([1, 2])]), later=0)

    client: Any = proposer.core._client
    assert client.expected == []


def test_a_batch_that_stands_aside_as_a_whole_does_not_ask(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch)
    runner = runner_class(proposer, "a", "b", "c", "d")

    assert runner.execute_model(step([3], [], [3], [3]), later=0) == (0, [[], [], [], []])
    client: Any = proposer.core._client
    assert client.told == []
    assert proposer.core._stats.skipped == {"multimodal": 3}


def test_the_runner_is_wrapped_once_and_other_drafters_do_not_notice(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer_with(monkeypatch)
    wrapped = runner_class.execute_model
    proposer_with(monkeypatch)
    other = SimpleNamespace(propose=lambda *_: "theirs")

    assert runner_class.execute_model is wrapped
    assert runner_class(other).execute_model(step([3]), later=1) == (1, "theirs")


def test_ranks_that_stay_silent_wrap_nothing(monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]) -> None:
    proposer_with(monkeypatch, is_output_rank=False)

    assert runner_class.execute_model is FakeRunner.execute_model


def test_a_vllm_without_the_method_gets_a_warning_and_drafts_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace())
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1, 2, 3])

    assert "has no GPUModelRunner.execute_model" in caplog.text
    assert proposer.propose([[3]], lengths, table) == [[5, 6]]


def test_a_runner_that_has_changed_gets_one_warning_and_drafts_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = proposer_with(monkeypatch)
    lengths, table = tokens([1, 2, 3])
    proposer.on_step_scheduled(SimpleNamespace(input_batch=SimpleNamespace()), compat.StepInfo())
    caplog.clear()

    assert [proposer.propose([[3]], lengths, table) for _ in range(3)] == [[[5, 6]]] * 3
    assert caplog.text.count("is not as expected") == 1


@pytest.mark.parametrize(
    ("parallel", "cause"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_a_layout_that_would_be_wrong_stops_vllm_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], cause: str
) -> None:
    with pytest.raises(LayoutError, match=cause):
        proposer_with(monkeypatch, target={"parallel": parallel})
    proposer_with(monkeypatch, target={"parallel": {"tensor_parallel_size": 2, "distributed_executor_backend": object}})


def test_the_service_is_told_whether_the_last_step_decoded_these_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch)
    client: Any = proposer.core._client
    seen = []
    for sampled, rows in (
        ([[3]], ([1, 2, 3],)),  # the first step: nobody knows what else was in it
        ([[4]], ([1, 2, 3, 4],)),
        ([[5], [7]], ([1, 2, 3, 4, 5], [6, 7])),  # another row has come
        ([[6], [8]], ([1, 2, 3, 4, 5, 6], [6, 7, 8])),
        ([[7], []], ([1, 2, 3, 4, 5, 6, 7], [6, 7, 8])),  # one is in prefill
    ):
        proposer.propose(sampled, *tokens(*rows))
        seen.append(client.step_s is not None)

    assert seen == [False, True, False, True, False]


def test_a_step_that_was_not_asked_about_is_not_taken_for_a_part_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, is_gated=True)
    client: Any = proposer.core._client
    seen = []
    for length, is_worthwhile in ((3, True), (4, True), (5, False), (6, True), (7, True)):
        monkeypatch.setattr(proposer.core._gate, "is_worthwhile", lambda *_, found=is_worthwhile: found)
        proposer.propose([[length]], *tokens(list(range(1, length + 1))))
        seen.append(is_worthwhile and client.step_s is not None)

    assert seen == [False, True, False, False, True]


def test_the_service_is_told_once_that_the_gate_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, is_gated=True)
    client: Any = proposer.core._client
    num_rests = []
    for length, is_worthwhile in ((3, False), (4, True), (5, False), (6, False), (7, True), (8, False)):
        monkeypatch.setattr(proposer.core._gate, "is_worthwhile", lambda *_, found=is_worthwhile: found)
        proposer.propose([[length]], *tokens(list(range(1, length + 1))))
        num_rests.append(client.num_rests)

    assert num_rests == [0, 0, 1, 1, 1, 2]


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> SpecBranchProposer:
    """A proposer with a runner, that pads to two tokens; sequences may have ten."""
    proposer = proposer_with(monkeypatch, pad="on")
    proposer.on_step_scheduled(FakeRunner(proposer), compat.StepInfo())
    return proposer


def test_all_rows_are_filled_up_to_the_same_length(padding: SpecBranchProposer) -> None:
    client: Any = padding.core._client
    lengths, table = tokens([1, 2, 3], [4, 5])
    for proposal, padded in (([5, 6, 7], [5, 6]), ([5], [5, PAD]), ([], [PAD, PAD])):
        client._proposal = proposal
        assert padding.propose([[3], [5]], lengths, table) == [padded, padded]
        assert padding.core._last.num_submitted == 2 * min(len(proposal), 2)  # the gate must not take pads for drafts


def test_rows_are_filled_up_also_when_nothing_is_drafted(padding: SpecBranchProposer) -> None:
    padding.configure(ProposerSettings(address="ipc:///nowhere", planner="none", pad="on"))
    lengths, table = tokens([1, 2, 3])

    assert padding.propose([[3]], lengths, table) == [[PAD, PAD]]
    padding.configure(ProposerSettings(address="ipc:///nowhere", planner="pearl", is_gated=True, pad="on"))
    assert padding.propose([[3]], lengths, table) == [[PAD, PAD]]  # the gate is closed at first


@pytest.mark.parametrize(
    ("sampled", "rows", "cause"),
    [
        ([[3], []], ([1, 2, 3], [4, 5]), "another row is in prefill"),
        ([[3], [3]], ([1, 2, 3], [1] * 8), "another row has no room"),
        ([[3]] * 43, ([1, 2, 3],) * 43, "more tokens than are cheap"),
        ([], (), "no rows"),
    ],
)
def test_rows_that_cannot_be_equal_or_are_too_many_are_left_as_they_are(
    padding: SpecBranchProposer, sampled: list[list[int]], rows: tuple[list[int], ...], cause: str
) -> None:
    lengths, table = tokens(*rows)
    client: Any = padding.core._client
    client._proposal = [5]

    assert not any(PAD in draft for draft in padding.propose(sampled, lengths, table)), cause


def test_beside_a_seed_nothing_is_padded(padding: SpecBranchProposer) -> None:
    """vLLM would draw from its generator for pads too."""
    padding._runner.requests["b"].sampling_params = SimpleNamespace(temperature=0.5, seed=1)
    lengths, table = tokens(*[[1, 2, 3]] * 4)

    assert padding.propose([[3]] * 4, lengths, table) == [[5, 6], [], [5, 6], [5, 6]]


def test_beside_a_thinking_budget_nothing_is_padded(padding: SpecBranchProposer) -> None:
    padding._runner.requests["b"].sampling_params.thinking_token_budget = 20
    lengths, table = tokens([1, 2, 3], [4, 5])
    client: Any = padding.core._client
    client._proposal = [5]

    assert padding.propose([[3], [5]], lengths, table) == [[5], [5]]


def test_on_the_cpu_only_greedy_rows_are_padded(padding: SpecBranchProposer) -> None:
    lengths, table = tokens([1, 2, 3])
    client: Any = padding.core._client
    client._proposal = [5]
    padding._runner.device.type = "cpu"
    assert padding.propose([[3]], lengths, table) == [[5]]

    padding._runner.input_batch.all_greedy = True
    assert padding.propose([[3]], lengths, table) == [[5, PAD]]


@pytest.mark.parametrize(
    ("pad", "has_graphs", "is_padded"), [("auto", True, True), ("auto", False, False), ("off", True, False)]
)
def test_rows_are_padded_where_vllm_has_graphs_for_it(
    monkeypatch: pytest.MonkeyPatch, pad: str, has_graphs: bool, is_padded: bool
) -> None:
    monkeypatch.setattr(compat, "has_graphs_for_equal_rows", lambda vllm_config: has_graphs)
    proposer = proposer_with(monkeypatch, pad=pad)
    lengths, table = tokens([1, 2, 3])
    client: Any = proposer.core._client
    client._proposal = [5]

    assert proposer.propose([[3]], lengths, table) == [[5]]  # nobody has said what the rows are
    proposer.on_step_scheduled(FakeRunner(proposer), compat.StepInfo())
    assert proposer.propose([[3]], lengths, table) == ([[5, PAD]] if is_padded else [[5]])


def test_a_vllm_without_whole_graphs_for_equal_rows_has_no_pads() -> None:
    modes = [
        SimpleNamespace(separate_routine=lambda: False, has_full_cudagraphs=lambda: True),
        SimpleNamespace(separate_routine=lambda: True, has_full_cudagraphs=lambda: False),
        None,
    ]
    for mode in modes:
        vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        assert not compat.has_graphs_for_equal_rows(vllm_config)
    assert not compat.has_graphs_for_equal_rows(SimpleNamespace())


def test_pads_that_vllm_counts_as_draft_tokens_are_known(
    monkeypatch: pytest.MonkeyPatch, runner_class: type[FakeRunner]
) -> None:
    proposer = proposer_with(monkeypatch)
    scheduled = step([3])
    scheduled.scheduled_spec_decode_tokens = {"a": [5, PAD, PAD], "b": [6, 7, 8], "c": [PAD] * 3}
    runner_class(proposer).execute_model(scheduled, later=0)

    assert proposer.num_pads == 5


class Reader:
    """Requests whose answers repeat the same nine tokens, decoded with what the proposer drafts for them."""

    def __init__(self, proposer: SpecBranchProposer, num_rows: int = 1, *images: str) -> None:
        self.proposer = proposer
        self.runner = FakeRunner(proposer, *images)
        self.texts = [[row, 10] for row in range(num_rows)]
        self._drafts: list[list[int]] = [[] for _ in range(num_rows)]

    def step(self, **news: Any) -> list[list[int]]:
        """Decode one step and return the drafts after it."""
        self.proposer.on_step_scheduled(self.runner, compat.StepInfo(**news))
        sampled = []
        for text, draft in zip(self.texts, self._drafts, strict=True):
            new = [(text[-1] - 10 + 1) % 9 + 10]
            for token in draft:
                if token != new[-1]:
                    break
                new.append((token - 10 + 1) % 9 + 10)
            text += new
            sampled.append(new)
        table = np.zeros((len(self.texts), 1000), dtype=np.int32)
        for row, text in enumerate(self.texts):
            table[row, : len(text)] = text
        self._drafts = self.proposer.propose(sampled, np.array([len(text) for text in self.texts]), table)
        return self._drafts

    def read(self, num_steps: int) -> int:
        """Decode some steps, and return how many tokens the first request got."""
        before = len(self.texts[0])
        for _ in range(num_steps):
            self.step()
        return len(self.texts[0]) - before


LONG: Any = {"model": {"max_model_len": 1000}}
FREELY = {"cost_aware": False}  # in these tests a step takes no time


@contextlib.contextmanager
def service_that_is(state: str, directory: Path) -> Iterator[tuple[str | None, zmq.Socket[bytes]]]:
    """The address of a draft service that is not there, that says nothing, or None; and the socket that is silent."""
    address = f"ipc://{directory}/draft.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        if state == "late":
            silent.bind(address)
        yield None if state == "none" else address, silent


@pytest.mark.parametrize("state", ["none", "dead", "late"])
def test_without_a_service_that_answers_drafts_come_from_the_text(
    state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with service_that_is(state, tmp_path) as (address, silent):
        proposer = proposer_with(monkeypatch, target=LONG, planner="none")
        monkeypatch.setattr("specbranch.plugins.vllm.proposer.draft_client", draft_client)
        proposer.configure(ProposerSettings(address=address, settings=FREELY, deadline_ms=5, is_gated=False))
        reader = Reader(proposer)
        first = reader.read(15)
        while state == "late" and not silent.poll(20):  # steps take no time: all could end before it is connected
            first += reader.read(1)
        later = reader.read(15)
        client = proposer.core._client
        if client is not None:
            client.close()

    counts = proposer.counts()
    assert first > 15 and later > 40, "of at most 45: two draft tokens and one more"
    assert counts["text_accepted"] >= 25 and counts["text_faults"] == 0
    assert (counts.get("unreachable", 0) == counts.get("calls", -1)) == (state == "dead")
    assert (counts.get("timeouts", 0) > 0) == (state == "late")
    assert (client is None) == (state == "none")


def test_text_drafts_go_on_while_the_gate_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, is_gated=True, settings=FREELY)
    monkeypatch.setattr(proposer.core._gate, "is_worthwhile", lambda *_: False)
    reader = Reader(proposer)
    reader.read(15)

    client: Any = proposer.core._client
    assert reader.read(10) > 25 and client.told == []
    assert not proposer.core._last.num_submitted, "the gate compares the service with text drafts"


def test_the_draft_models_death_costs_no_text_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step without an answer of the service has text drafts already."""
    proposer = proposer_with(monkeypatch, target=LONG, settings=FREELY)
    client: Any = proposer.core._client
    reader = Reader(proposer)
    for _ in range(12):
        client._proposal = [(reader.texts[0][-1] - 10 + more) % 9 + 10 for more in (2, 3)]
        reader.step()
    client._proposal = None

    assert all(reader.step()[0] for _ in range(10))


def test_an_empty_draft_of_the_service_is_an_answer_that_the_text_does_not_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, settings=FREELY)
    client: Any = proposer.core._client
    reader = Reader(proposer)
    client._proposal = None
    reader.read(20)
    client._proposal = []

    assert [reader.step() for _ in range(5)] == [[[]]] * 5
    client._proposal = None
    assert reader.step()[0]


def test_drafts_of_the_service_come_first_and_then_the_text_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, target=LONG)
    text: Any = proposer.core._text
    monkeypatch.setattr(text, "drafter", None)  # nothing may be asked of it

    assert Reader(proposer, 2).step() == [[5, 6], [5, 6]]


def test_rows_that_may_have_no_drafts_get_none_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, address=None, settings=FREELY)
    reader = Reader(proposer, 4, "b")
    reader.step(limits={"c": 0, "d": 1})
    reader.read(20)

    assert [len(draft) for draft in reader.step()] == [2, 0, 0, 1]
    proposer.core._max_model_len = len(reader.texts[0]) + 4
    assert [len(draft) for draft in reader.step()] == [0, 0, 0, 1], "room for one token of vLLM's own"
    reader.runner.input_batch.req_ids = []  # a runner that does not say what its rows are
    assert reader.step() == [[], [], [], []]


def test_text_drafts_teach_the_service_no_price_and_every_step_teaches_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, settings=FREELY)
    proposer.core._timer = StepTimer(partial(next, itertools.count()))  # every step takes a second
    client: Any = proposer.core._client
    text: Any = proposer.core._text
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(text.drafter, "observe_step", lambda rows, sent, got, step_s: seen.append((rows, sent, got)))
    reader, known = Reader(proposer), []
    for index in range(16):
        client._proposal = [5] if index == 4 else None
        known.append((reader.step()[0], client.step_s))

    drafts = [draft for draft, _ in known]
    assert [step_s is None for _, step_s in known[1:]] == [bool(draft) and draft != [5] for draft in drafts[:-1]]
    assert [sent for _, sent, _ in seen] == [len(draft) for draft in drafts[:-1]], (
        "all but the first, whose time is unknown"
    )
    assert drafts[4] == [5] and any(len(draft) > 1 for draft in drafts)


def test_requests_that_have_ended_are_forgotten_and_what_they_said_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, address=None, settings=FREELY)
    reader = Reader(proposer)
    reader.read(8)
    again = Reader(proposer)
    again.runner.input_batch.req_ids = ["b"]
    drafts = [*again.step(ended=["a"]), *again.step(), *again.step()]
    text: Any = proposer.core._text

    assert list(text.drafter._sessions) == ["b"]
    assert drafts[-1], "the nine tokens were not repeated yet, but the request before said them"


@pytest.mark.parametrize(("step_s", "num_rows"), [(None, 16), (0.1, 16), (1.0, 25), (9.0, 40)])
def test_many_rows_of_a_fast_target_take_turns(step_s: float | None, num_rows: int) -> None:
    """A row takes 2 ms here, and all text drafts of a step may take a twentieth of it."""
    drafted: list[str] = []

    def draft(name: str, *_: object) -> list[int]:
        drafted.append(name)
        return [7]

    drafter: Any = SimpleNamespace(draft=draft)
    rows = RowTextDrafter(drafter, clock=lambda: 0.002 * len(drafted))
    updates = {index: SequenceUpdate([1, 2], 1, name=f"r{index}") for index in range(40)}
    nums = []
    for _ in range(4):
        drafts = [Draft([]) for _ in updates]
        rows.fill(drafts, updates, [2] * 40, step_s)
        nums.append(sum(bool(draft.tokens) for draft in drafts))

    assert nums == [16, num_rows, num_rows, num_rows]
    assert len(set(drafted)) == 40


def test_a_fault_while_drafting_from_the_text_costs_drafts_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = proposer_with(monkeypatch, target=LONG, address=None)
    text: Any = proposer.core._text
    monkeypatch.setattr(text.drafter, "_draft", lambda *_: 1 // 0)

    assert Reader(proposer, 2).read(3) == 3
    assert proposer.counts()["text_faults"] == 6
    assert caplog.text.count("drafting from the text failed") == 1


@pytest.mark.parametrize(
    ("section", "has_text"),
    [({}, True), ({"planner": "pearl"}, False), ({"settings": {"uses_text": False, "uses_memory": False}}, False)],
)
def test_only_planners_that_draft_from_the_text_do_so_here(
    section: dict[str, Any], has_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (proposer_with(monkeypatch, **section).core._text is not None) == has_text
    if not has_text:
        with pytest.raises(SettingError, match="makes none; name a draft"):
            proposer_with(monkeypatch, address=None, **section)
    off = proposer_with(monkeypatch, address=None, planner="none")
    assert not off.core.is_on and off.counts() == {}
