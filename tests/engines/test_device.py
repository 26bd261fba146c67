"""Every engine for models of Transformers on the device of `--device`: the conformance suite, and what a CPU says.

Without `--device` all are skipped: other tests hold engines on the CPU to the same. On a GPU, `scripts/gpu-proof` also
gives the draft model that is to be used. What engines say when they are opened, such as how they run their steps,
becomes a property of the JUnit file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

torch = pytest.importorskip("torch", reason="the torch engine needs torch")
transformers = pytest.importorskip("transformers", reason="the torch engine needs transformers")

from specbranch.engines.base import DraftEngine, EngineOptions, Row
from specbranch.engines.registry import ENGINES, open_engine
from tests.engines.closeness import close_distributions
from tests.engines.conformance import Close, EngineConformance, fresh_distribution, machine_for

TINY = {
    "vocab_size": 64,
    "hidden_size": 256,  # heads of 64: kernels for GPUs know few sizes
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # at the usual 0.02 all distributions are flat and all sequences alike
}
FEW = settings(max_examples=20, stateful_step_count=15, deadline=None)
NAMES = [name for name in ENGINES if name != "llamacpp"]
TOKENS = [(7 * position + position * position) % 64 for position in range(150)]

Open = Callable[..., DraftEngine]
Note = Callable[[str, object], None]


class Hearer(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        given = ["given"] if metafunc.config.getoption("--device-model") else []
        metafunc.parametrize("model", ["llama", "qwen2", *given], indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tiny models of random but fixed weights, and the one of `--device-model`."""
    if request.config.getoption("--device") is None:
        pytest.skip("no --device was given; scripts/gpu-proof gives one")
    if request.param == "given":
        return str(request.config.getoption("--device-model"))
    path: Path = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(request.param, **TINY)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=NAMES)
def open_on(request: pytest.FixtureRequest, model: str, record_testsuite_property: Note) -> Open:
    """Open the model in an engine; on the device of `--device` unless another is given."""
    device = request.config.getoption("--device")
    logger, hearer = logging.getLogger("specbranch.engines"), Hearer()

    def opened(dtype: str, device: str = device) -> DraftEngine:
        options = EngineOptions(model, device=device, dtype=dtype, max_tokens=4096)
        logger.addHandler(hearer)
        logger.setLevel(logging.INFO)
        try:
            engine = open_engine(request.param, options)
        finally:
            logger.removeHandler(hearer)
            logger.setLevel(logging.NOTSET)
        said = "; ".join(hearer.lines)
        record_testsuite_property(f"{Path(model).name} in {engine.info.dtype} on {device}", said)
        hearer.lines.clear()
        return engine

    return opened


@pytest.fixture(scope="module")
def exact(open_on: Open) -> Iterator[DraftEngine]:
    engine = open_on("float32")
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def usual(open_on: Open, request: pytest.FixtureRequest) -> Iterator[DraftEngine]:
    """In the data type that is drafted with."""
    engine = open_on("auto" if request.config.getoption("--device") == "cpu" else "bfloat16")
    yield engine
    engine.shutdown()


class TestExact(EngineConformance):
    @pytest.fixture
    def engine(self, exact: DraftEngine) -> DraftEngine:
        return exact

    @pytest.fixture
    def is_close(self) -> Close:
        return partial(close_distributions, tolerance=1e-3)


class TestUsual(EngineConformance):
    """Steps of another shape round differently in this data type."""

    @pytest.fixture
    def engine(self, usual: DraftEngine) -> DraftEngine:
        return usual

    @pytest.fixture
    def is_close(self) -> Close:
        return partial(close_distributions, tolerance=0.05)


def test_random_histories_never_give_a_wrong_distribution_or_leave_a_cell(exact: DraftEngine) -> None:
    run_state_machine_as_test(machine_for(exact, partial(close_distributions, tolerance=1e-3)), settings=FEW)

    assert exact.num_tokens == 0


def test_the_device_says_what_the_cpu_says(exact: DraftEngine, open_on: Open) -> None:
    on_cpu = open_on("float32", "cpu")
    trunk = exact.open()
    exact.run([Row(trunk, tuple(TOKENS[:100]))])
    fork = exact.fork(trunk, 80)
    (distribution,) = exact.run([Row(fork, tuple(TOKENS[80:]))])
    exact.close(trunk)
    exact.close(fork)
    reference, other = (fresh_distribution(on_cpu, tokens) for tokens in (TOKENS, TOKENS[:-1]))
    on_cpu.shutdown()

    assert close_distributions(distribution, reference, tolerance=2e-3)
    assert not close_distributions(distribution, other, tolerance=2e-3)  # else the line above would say nothing


def test_sixty_four_rows_of_one_step_are_told_apart(exact: DraftEngine) -> None:
    """The widest step that a service makes by default."""
    handles = [exact.open() for _ in range(64)]
    distributions = exact.run([Row(handle, (token, 1)) for token, handle in enumerate(handles)])
    for handle in handles:
        exact.close(handle)

    for token in (0, 1, 31, 63):
        assert close_distributions(distributions[token], fresh_distribution(exact, [token, 1]), tolerance=1e-3)
