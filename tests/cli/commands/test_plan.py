"""`specbranch plan` without engines: what it refuses, and what it says."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbranch.bench.forecast import TypeForecast, advise
from specbranch.bench.survey import PairOptions, Survey
from specbranch.cli import app
from specbranch.cli.commands.plan import _chosen_flags, sentences
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.plugins.vllm import installed
from specbranch.simulation.presets import ModelPair, make_trace

TRACE = make_trace(ModelPair("made", 5.0, 5, 0.85, ""), 8, 60, random.Random(0))
run = CliRunner().invoke


def said(draft_s: dict[int, float], chosen: Sequence[str] = (), hooked_s: dict[int, float] | None = None) -> str:
    survey = Survey({1: 0.1, 2: 0.101}, 0.11, draft_s, TRACE, hooked_s or {})
    return "\n".join(sentences([typed("auto", survey, 1, 4)], ["big one", "--draft", "d.gguf"], chosen))


def typed(dtype: str, survey: Survey, *concurrencies: int) -> TypeForecast:
    return TypeForecast(dtype, survey, advise(survey, ["none", "pearl"], concurrencies or [1]))


# 16 bits read half as much, but where they are emulated each further token costs a whole step.
EMULATED = Survey({1: 0.06, 2: 0.12, 8: 0.48}, 0.06, {1: 0.02, 2: 0.021}, TRACE)
WIDE = Survey({1: 0.1, 2: 0.101, 8: 0.105}, 0.1, {1: 0.02, 2: 0.021}, TRACE)


def test_it_says_whether_it_pays_and_with_what() -> None:
    cheap = said({1: 0.02, 2: 0.021})

    assert "drafts help: pearl is forecast to decode" in cheap
    assert "c (target step / draft step) is 5.5" in cheap
    assert "a second draft device" in cheap
    assert "drafts do not help" in said({1: 0.2, 2: 0.3})


def test_types_are_compared_by_tokens_per_second() -> None:
    types = [typed("float32", WIDE), typed("bfloat16", EMULATED)]
    lines = sentences(types, ["big", "--draft", "d"], ["--draft-dtype", "int8"])
    text = "\n".join(lines)
    gain = types[0].best_per_s / types[1].bare_per_s

    assert "fastest without drafts: bfloat16, 16.7 tokens/s; fastest with drafts: float32" in text
    assert types[0].best.speed > gain > 1.1
    assert f"decode {gain:.2f} times as fast as vLLM without drafts in its fastest type" in text
    assert lines[-1].endswith("--draft-dtype int8 --dtype float32")


def test_drafts_that_only_beat_their_own_slow_type_do_not_pay() -> None:
    fast = replace(WIDE, target_alone_s={1: 0.01, 2: 0.02}, target_beside_s=0.01, draft_s={1: 0.02, 2: 0.02})
    types = [typed("float32", WIDE), typed("bfloat16", fast)]
    lines = sentences(types, ["big", "--draft", "d"], [])

    assert types[0].best.speed > 1.1
    assert "drafts do not help" in "\n".join(lines)
    assert lines[-1] == "  specbranch serve big --bare --dtype bfloat16"


def test_the_fastest_with_drafts_drafts_even_where_that_does_not_pay() -> None:
    slow = typed("float32", replace(WIDE, target_beside_s=0.12, draft_s={1: 0.2, 2: 0.3}))

    assert slow.best.method.planner == "pearl"
    assert slow.best_per_s < slow.bare_per_s


def test_it_says_what_the_hook_costs_where_it_costs_something() -> None:
    cheap = {1: 0.02, 2: 0.021}

    assert "takes 1.20 times as long as in vLLM without it" in said(cheap, hooked_s={1: 0.12, 2: 0.12})
    assert "drafts do not help" in said(cheap, hooked_s={1: 0.5, 2: 0.5})
    assert "proposer" not in said(cheap)


def test_the_hook_is_timed_with_an_idle_proposer() -> None:
    arguments = {"tensor_parallel_size": 2}
    options = PairOptions(target="t", draft=DraftServiceOptions("d"), messages=["x"], max_tokens=8, arguments=arguments)
    bare, hooked = options.target_options(), options.target_options(has_hook=True)

    assert bare.settings is None
    assert hooked.settings is not None and hooked.settings.planner == "none"
    assert bare.arguments == hooked.arguments and bare.arguments["tensor_parallel_size"] == 2
    assert "distributed_executor_backend" not in bare.arguments


def test_the_last_line_is_the_whole_command_to_copy() -> None:
    *_, command = said({1: 0.02, 2: 0.021}, ["--draft-dtype", "int8"]).splitlines()
    *_, bare = said({1: 0.2, 2: 0.3}, ["--draft-dtype", "int8", "--dtype", "bfloat16"]).splitlines()

    assert re.fullmatch(
        r"  specbranch serve 'big one' --draft d.gguf --planner pearl --gamma \d --draft-dtype int8", command
    )
    assert bare == "  specbranch serve 'big one' --bare --dtype bfloat16"


def test_it_claims_no_more_than_its_docs() -> None:
    cheap = said({1: 0.02, 2: 0.021})

    assert "3 to 20 % up to 4 concurrent requests" in cheap and "a third to a half too high" in cheap
    assert "within 10" not in cheap and "for each of" not in cheap


def test_what_was_chosen_here_is_passed_on_to_serve() -> None:
    options = PairOptions(
        target="t",
        draft=DraftServiceOptions("d", device="cuda:1", engine="torch"),
        messages=["x"],
        max_tokens=8,
        dtype="half",
    )
    words = _chosen_flags(
        options, "cuda:1", "0", None, {"enforce_eager": True, "max_model_len": 512, "enable_lora": False}
    )

    assert " ".join(words) == (
        "--draft-device cuda:1 --draft-engine torch --target-cores 0 --dtype half --enforce-eager --max-model-len 512 "
        "--no-enable-lora"
    )
    assert options.target_options().arguments["dtype"] == "half"


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    for words, message in (
        (["--concurrency", "0"], "from 1 on"),
        (["--prompts", str(tmp_path / "none.jsonl")], "cannot read"),
        (["--record", str(tmp_path / "none" / "trace.jsonl.gz")], "there is no directory"),
        (["--vllm-arg", "x"], "give KEY=VALUE"),
    ):
        refused = run(app, ["plan", "t", "--draft", "d", *words])

        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
