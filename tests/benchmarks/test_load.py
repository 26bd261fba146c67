"""The long runs under load and with faults: what they draw from a seed, and what they make of what they saw."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.root import ROOT

BENCHMARKS = ROOT / "benchmarks"
PROMPTS = {length: [f"{length} {number}" for number in range(20)] for length in ("short", "middle", "long")}


@pytest.fixture(scope="module")
def script() -> Any:
    """Imports a module of the directory, which is on the path for as long as these tests run."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("under_load", "load", "faults")]:
        del sys.modules[name]


def fault(kind: str, resumed_s: float | None, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "resumed_s": resumed_s, "requests": 5, "failed": [], "changed": [], "is_real": True, **more}


def test_requests_depend_on_the_seed_alone(script: Any) -> None:
    traffic = script("under_load.traffic")
    requests = traffic.draw(3, 400, PROMPTS)

    assert requests == traffic.draw(3, 400, PROMPTS)
    assert requests[:100] == traffic.draw(3, 100, PROMPTS)
    assert requests != traffic.draw(4, 400, PROMPTS)


def test_requests_are_of_all_kinds_and_within_their_bounds(script: Any) -> None:
    traffic = script("under_load.traffic")
    requests = traffic.draw(1, 5000, PROMPTS)
    kinds = Counter(request.kind for request in requests)
    by_kind = {kind: [one for one in requests if one.kind == kind] for kind in kinds}

    assert all(abs(kinds[kind] / 5000 - share) < 0.05 for kind, share in traffic.SHARES.items())
    assert {request.level for request in requests} == set(traffic.LEVELS)
    assert all(1 <= one.max_tokens <= 24 for one in requests if one.kind != traffic.ABORTED)
    assert all(one.temperature == 0 and one.n == 1 for one in requests if one.is_greedy)
    assert all(one.n > 1 and one.temperature > 0 for one in by_kind[traffic.SEVERAL])
    assert all(one.leaves_after < one.max_tokens for one in by_kind[traffic.ABORTED])


def test_the_window_has_as_many_greedy_requests_as_were_asked_for(script: Any) -> None:
    traffic = script("under_load.traffic")
    requests = traffic.draw(1, 1000, PROMPTS)
    found = traffic.window(requests, 100)

    assert sum(request.is_greedy for request in found) == 100
    assert [request.number for request in found] == list(range(250, 250 + len(found)))
    assert traffic.window(requests, 5000) == requests


def test_a_straight_line_has_its_slope_and_no_error(script: Any) -> None:
    x = [0.1 * number for number in range(100)]
    found = script("under_load.progress").slope(x, [7 + 3 * value for value in x])

    assert found.value == pytest.approx(3)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_the_error_of_a_slope_covers_noise_whose_neighbours_are_alike(script: Any) -> None:
    """Without a trend, about 95 % of 200 slopes lie within 2.1 errors; fewer do where each sample counts alone."""
    trend, chance = script("under_load.progress"), random.Random(5)
    covered = {trend.SPANS: 0, 400: 0}
    for _ in range(200):
        level, y = 0.0, []
        for _ in range(400):
            level = 0.5 * level + chance.gauss(0, 1)
            y.append(level)
        for num_spans in covered:
            found = trend.slope(range(400), y, num_spans)
            covered[num_spans] += abs(found.value) < 2.1 * found.error

    assert covered[trend.SPANS] >= 180 > covered[400]


def test_a_slope_needs_three_points_that_differ(script: Any) -> None:
    slope = script("under_load.progress").slope

    assert slope([1, 2], [1, 2]) is None
    assert slope([1, 1, 1], [1, 2, 3]) is None


def test_memory_is_that_of_the_longest_run_after_its_warm_up(script: Any) -> None:
    samples = [{"run": 1, "done": done, "mb": {"draft": 900.0}} for done in range(0, 1000, 100)]
    samples += [
        {"run": 2, "done": done, "mb": {"draft": 100 + 0.002 * done, "engine": 50.0 + (500.0 if done < 900 else 0.0)}}
        for done in range(0, 4001, 50)
    ]
    found = script("load").memory_findings(samples)

    assert found["requests"] == 4000
    assert found["parts"]["draft"]["mb_per_1000"]["value"] == pytest.approx(2)
    assert found["parts"]["engine"]["mb_per_1000"]["value"] == pytest.approx(0)
    assert found["parts"]["all"]["last_mb"] == 158.0


def test_the_lead_of_a_token_is_read_where_two_texts_part(script: Any) -> None:
    load = script("load")
    tokens, tops = (
        ["the", " cat", " sat"],
        [{"the": -0.1, "a": -3}, {" cat": -0.7, " dog": -0.7005}, {" sat": 0, ".": -9}],
    )

    assert load.parting("the cat sat", "the dog sat") == 4
    assert load.gap_at(tokens, tops, 4) == pytest.approx(0.0005)
    assert load.gap_at(tokens, tops, 11) is None


def test_progress_goes_on_and_refuses_that_of_another_run(script: Any, tmp_path: Path) -> None:
    kind = script("under_load.progress").Progress
    kind(tmp_path / "a.jsonl", {"seed": 1}).add({"what": "request", "id": 7})
    again = kind(tmp_path / "a.jsonl", {"seed": 1})

    assert again.of("request", id=7) == [{"what": "request", "id": 7}]
    with pytest.raises(SystemExit, match="another run"):
        kind(tmp_path / "a.jsonl", {"seed": 2})


@pytest.mark.parametrize(
    ("text", "is_well"),
    [('{"animal":"cat","legs":4}', True), ('{"animal":"cow","legs":4}', False), ('{"animal":', False)],
)
def test_an_object_must_fit_the_schema(script: Any, text: str, is_well: bool) -> None:
    traffic, asking = script("under_load.traffic"), script("under_load.asking")
    answer = asking.Answer([text], ["stop"], num_tokens=12)

    assert (
        asking.fault_of(traffic.Request(0, traffic.SCHEMA, "", 24, 1, is_to_the_last=False), answer) is None
    ) == is_well


def test_faults_are_of_all_kinds_and_those_over_tcp_come_last(script: Any) -> None:
    faults = script("faults")
    kinds = [*faults.OVER_UNIX, *faults.OVER_TCP]
    planned = faults.plan(1, 200, kinds)

    assert Counter(planned) == dict.fromkeys(kinds, 20)
    assert planned == faults.plan(1, 200, kinds) != faults.plan(2, 200, kinds)
    assert set(planned[140:]) == set(faults.OVER_TCP)


def test_the_table_of_faults_counts_what_went_wrong(script: Any) -> None:
    faults = script("faults")
    lines = [fault("killed", 2.0), fault("killed", 4.0, failed=["gone"]), fault("half-open", None, is_real=False)]
    found = faults.summary(lines)
    rows = faults.table(found).splitlines()

    assert [faults.is_well(line) for line in lines] == [True, False, False]
    assert rows[2] == "| killed | 2 | 2 | 10 | 1 | 0 | 0 | 3.0 | 4.0 |"
    assert rows[3] == "| half-open | 1 | 0 | 5 | 0 | 0 | 1 | - | - |"
    assert rows[4] == "| all | 3 | 2 | 15 | 1 | 0 | 1 | | |"
    assert len({row.count("|") for row in rows}) == 1


def test_a_relay_keeps_the_order_when_it_gets_faster_and_holds_without_closing(script: Any) -> None:
    relay_kind = script("under_load.relay").Relay

    async def talk() -> tuple[bytes, bool, bytes]:
        ended: list[asyncio.Event] = []

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ended.append(asyncio.Event())
            this = ended[-1]
            while data := await reader.read(100):
                writer.write(data)
            writer.close()
            await writer.wait_closed()
            this.set()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        relay = relay_kind(server.sockets[0].getsockname()[1])
        port = script("under_load.servers").free_port()
        async with relay.listening(port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            relay.delay_s = 0.2
            writer.write(b"one ")
            await asyncio.sleep(0.05)
            relay.delay_s = 0.0
            writer.write(b"two")
            heard = await reader.readexactly(7)
            relay.hold()
            writer.write(b"lost")
            try:
                await asyncio.wait_for(reader.read(1), 0.3)
                is_silent = False
            except TimeoutError:
                is_silent = True
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
            other_writer.write(b"new")
            after = await other_reader.readexactly(3)
            for one in (writer, other_writer):
                one.close()
                await one.wait_closed()
        await asyncio.gather(*(one.wait() for one in ended))
        server.close()
        return heard, is_silent, after

    assert asyncio.run(talk()) == (b"one two", True, b"new")


@pytest.mark.parametrize(
    ("num_tokens", "to_the_last", "at_will"), [(0, False, False), (3, False, True), (8, True, True)]
)
def test_an_answer_has_as_many_tokens_as_it_should(
    script: Any, num_tokens: int, to_the_last: bool, at_will: bool
) -> None:
    traffic, asking = script("under_load.traffic"), script("under_load.asking")
    answer = asking.Answer(["text"], ["length"], num_tokens=num_tokens)
    for is_to_the_last, is_well in ((True, to_the_last), (False, at_will)):
        request = traffic.Request(0, traffic.WHOLE, "", 8, 1, is_to_the_last=is_to_the_last)
        assert (asking.fault_of(request, answer) is None) == is_well
