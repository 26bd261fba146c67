"""`specbranch draft` with a model and texts of 20,000 tokens: what it drafts for, and what it says of the rest."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

from specbranch.core.distribution import Distribution
from specbranch.simulation.scripted import TextScript
from tests.models import model_path
from tests.service.harness import PATIENCE_S, Service, Walk, free_port
from tests.service.test_faults import client_for

VOCAB_LEN = 49152
SENTENCE = [504, 2365, 6354, 16438, 690, 260, 2091, 28, 284, 260, 1743, 314]
TEXT = (SENTENCE * 2000)[:20_000]
REPEATING = TextScript(VOCAB_LEN, lambda text: Distribution((SENTENCE[len(text) % len(SENTENCE)],), (1.0,), 0.0))
START_S, PREFILL_S = 150.0, 300.0  # on a machine that others use too; alone they take a tenth of it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of SmolLM2: real weights and a real vocabulary, and 20,000 tokens take half a minute."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source = model_path("smollm2-short-dense")
    path = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.from_pretrained(source, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_pretrained(source, config=config).save_pretrained(path)
    return path


@contextlib.contextmanager
def draft_service(model: Path, directory: Path, port: int, *arguments: str) -> Iterator[Service]:
    """A draft service as users start it; its log goes to `directory`."""
    program = shutil.which("specbranch", path=str(Path(sys.executable).parent))
    assert program is not None
    address = f"ipc://{directory}/draft.sock"
    options = ["--threads", "1", "--metrics-port", str(port), "--log-format", "json", *arguments]
    command = [program, "draft", str(model), "--listen", address, *options]
    service = Service(["sh", "-c", 'exec "$@" 2>"$0"', str(directory / "log"), *command], address)
    service.start()
    try:
        service.wait_until_up(START_S)
        yield service
    finally:
        service.stop()


def messages(directory: Path, level: str) -> list[str]:
    lines = [line for line in (directory / "log").read_text().splitlines() if line.startswith("{")]
    return [entry["message"] for entry in map(json.loads, lines) if entry["level"] == level]


def undrafted(port: int) -> dict[str, float]:
    """What Prometheus reads of texts that were not drafted for, by reason."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (family,) = [family for family in families if family.name == "specbranch_draft_undrafted"]
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


@pytest.mark.timeout(600)
def test_a_text_of_twenty_thousand_tokens_is_drafted_for(model: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        draft_service(model, tmp_path, port, "--dtype", "int8") as service,
        contextlib.closing(client_for(service.address, "sps", deadline_s=10.0)) as client,
    ):
        walk, end_s = Walk(client, TEXT, REPEATING), time.monotonic() + PREFILL_S
        while not walk.proposal:
            assert time.monotonic() < end_s, f"nothing was proposed: {client.counts}"
            time.sleep(0.5)
            walk.step()

        assert undrafted(port) == {"too_long": 0, "foreign_token": 0, "no_room": 0}
    assert any("the draft's KV cache: " in message and " GB: " in message for message in messages(tmp_path, "info"))
    assert messages(tmp_path, "warning") == []


def test_texts_that_are_not_drafted_for_are_counted_by_reason_and_said_once(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    port = free_port()
    with (
        draft_service(model_path("smollm2-short"), tmp_path, port, "--cache-tokens", "16384") as service,
        contextlib.closing(client_for(service.address, "pearl", deadline_s=0.2)) as client,
    ):
        assert client.hello(PATIENCE_S) is not None
        client.announce_prompts([TEXT, TEXT[1:], [*SENTENCE, VOCAB_LEN + 5], [VOCAB_LEN, *SENTENCE], TEXT[2:]])
        end_s = time.monotonic() + PATIENCE_S
        while sum(undrafted(port).values()) < 5:
            assert time.monotonic() < end_s, undrafted(port)
            time.sleep(0.1)
        walk = Walk(client, TEXT, REPEATING)
        for _ in range(5):
            walk.step()

        assert undrafted(port) == {"too_long": 3, "foreign_token": 2, "no_room": 0}
        assert walk.num_accepted == 0
    said = messages(tmp_path, "warning")
    assert len(said) == 2
    assert "a text of 20000 tokens is not drafted for" in said[0]
    assert "texts of 16320; start the draft with a larger --cache-tokens" in said[0]
    assert f"token {VOCAB_LEN + 5} is not drafted for: the draft knows {VOCAB_LEN} tokens" in said[1]
