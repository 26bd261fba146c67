"""Why vLLM did not start, read from logs as it writes them; and what it does meanwhile."""

from __future__ import annotations

import pytest

from specbranch.launch.vllm_log import FailureParser, StartupProgress

MEMORY = """
(EngineCore pid=7) INFO 11-16 05:00:00 [core.py:1] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 11-16 05:00:01 [core.py:2] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-16 05:00:01 [core.py:2]   File "core.py", line 1, in run
(EngineCore pid=7) ERROR 11-16 05:00:01 [core.py:2] ValueError: Free memory on device (2.1/23.0 GiB) on startup is \
less than desired GPU memory utilization (0.9, 20.7 GiB).
(EngineCore pid=7) Process EngineCore:
\x1b[31m(APIServer pid=5) Traceback (most recent call last):\x1b[0m
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_the_root_not_its_echo_and_the_way_out_follows() -> None:
    cause = FailureParser(MEMORY.splitlines()).cause(1)

    assert cause.startswith("ValueError: Free memory on device (2.1/23.0 GiB)")
    assert cause.endswith("or give vLLM a smaller share with --gpu-memory-utilization")
    assert "\n" not in cause


@pytest.mark.parametrize(
    ("line", "code", "cause"),
    [
        ("OSError: [Errno 98] Address already in use", 1, "choose another port with --port"),
        ("launch.py serve: error: argument --dtype: invalid choice: 'x'", 2, "argument --dtype: invalid choice: 'x'"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "lower --gpu-memory-utilization or --max-model-len"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error", 1, "1 validation error"),
        ("\x1b[36mINFO\x1b[0m all is well", -9, "killed by SIGKILL, most likely because memory ran out"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above.",
            1,
            "its engine ended without an error message",
        ),
        ("ValueError: a request of long ago", -9, "killed by SIGKILL"),
        ("INFO all is well", 3, "it ended with code 3 and logged no cause"),
        ("INFO request failed with HTTPError: none", 0, "HTTPError: none"),
    ],
)
def test_other_ends_are_named_too(line: str, code: int, cause: str) -> None:
    assert cause in FailureParser(["some line", line]).cause(code)


def test_the_line_below_a_validation_error_is_the_cause() -> None:
    cause = FailureParser(
        [
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
            "  Value error, User-specified max_model_len (9) is greater than the derived max_model_len (8). [type=x",
            "    For further information visit https://errors.pydantic.dev",
        ]
    ).cause(1)

    assert cause == (
        "User-specified max_model_len (9) is greater than the derived max_model_len (8); lower --max-model-len"
    )


def test_endless_words_are_cut() -> None:
    assert len(FailureParser([f"ValueError: {'x' * 5000}"]).cause(1)) < 400


def test_stages_follow_the_log_and_never_go_back() -> None:
    stages = StartupProgress()
    seen = [stages.stage]
    for line in (
        "INFO Initializing a V1 LLM engine (v0.32.0) with config",
        "INFO Starting to load model /m...",
        "INFO Warming up model for the compilation...",
        "INFO Loading weights took 3 s",
        "INFO Starting vLLM server on http://0.0.0.0:8000",
    ):
        stages.feed(line)
        seen.append(stages.stage)

    words = ["starting (", "setting up", "loading weights", "compiling takes minutes", "compiling", "HTTP server"]
    assert [word in stage for word, stage in zip(words, seen, strict=True)] == [True] * 6
