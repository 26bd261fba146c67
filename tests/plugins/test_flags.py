"""vLLM's command line and the arguments of `vllm.LLM` say the same in two ways."""

from __future__ import annotations

from typing import Any

import pytest

from specbranch.errors import FlagError
from specbranch.launch.vllm_flags import Flags, flags_of


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", {}),
        ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("-tp=2 -q awq", {"tensor_parallel_size": 2, "quantization": "awq"}),
        ("--max_model_len=512 --seed -1", {"max_model_len": 512, "seed": -1}),
        ("--enforce-eager --dtype half", {"enforce_eager": True, "dtype": "half"}),
        ("--dtype half --no-enable-prefix-caching", {"dtype": "half", "enable_prefix_caching": False}),
        ("--allowed-media-domains a.org b.org", {"allowed_media_domains": ["a.org", "b.org"]}),
        (
            '--compilation-config {"level":3} --compilation-config.cudagraph_mode FULL',
            {"compilation_config": {"level": 3, "cudagraph_mode": "FULL"}},
        ),
        ("--seed 1 --seed 2", {"seed": 2}),
    ],
)
def test_flags_become_arguments(words: str, arguments: dict[str, Any]) -> None:
    assert Flags(words.split()).arguments() == arguments


@pytest.mark.parametrize(
    ("words", "cause"),
    [(["word"], "unexpected word 'word'"), (["2", "--seed", "1"], "unexpected word '2'"), (["-O3"], "long name")],
)
def test_what_is_no_flag_is_refused(words: list[str], cause: str) -> None:
    with pytest.raises(FlagError, match=cause):
        Flags(words).arguments()


def test_arguments_become_flags_and_come_back() -> None:
    arguments = {"tensor_parallel_size": 2, "enforce_eager": True, "enable_lora": False, "rope": {"a": 1}, "dtype": "x"}
    words = flags_of(arguments)

    assert words[:4] == ["--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-lora"]
    assert Flags(words).arguments() == arguments
