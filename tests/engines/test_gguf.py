"""The tokens of a GGUF file: read as the library reads them, and no file however broken does harm."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from specbranch.engines import vocabulary
from specbranch.engines.vocabulary import read_tokens
from specbranch.errors import EngineError
from tests.engines.models import model_path

TOKENS = ["<s>", "Ġthe", "ü", "", "x" * 300]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def gguf_file(path: Path, *pairs: tuple[str, int, bytes], version: int = 3, count: int | None = None) -> Path:
    """A file with these pairs of metadata, and some weights behind them."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    path.write_bytes(head + b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs))
    return path


def token_pair(tokens: list[str]) -> tuple[str, int, bytes]:
    return ("tokenizer.ggml.tokens", 9, array(8, [text(token) for token in tokens]))


BEFORE = [
    ("general.architecture", 8, text("llama")),
    ("a.byte", 0, b"\x01"),
    ("a.word", 3, b"\x01\x00"),
    ("a.number", 4, struct.pack("<I", 7)),
    ("a.truth", 7, b"\x01"),
    ("a.long", 10, struct.pack("<Q", 7)),
    ("a.double", 12, struct.pack("<d", 0.5)),
    ("tokenizer.ggml.scores", 9, array(6, [struct.pack("<f", 0.5)] * 5)),
    ("tokenizer.ggml.merges", 9, array(8, [text("a b"), text("c d")])),
]


def test_the_tokens_of_a_real_model_are_those_that_the_library_reads() -> None:
    library = pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = model_path("smollm2-short") / "smollm2-short.gguf"
    field = library.GGUFReader(path).fields["tokenizer.ggml.tokens"]

    assert read_tokens(path) == [bytes(field.parts[index]).decode() for index in field.data]


def test_the_tokens_are_found_behind_values_of_every_type(tmp_path: Path) -> None:
    assert read_tokens(gguf_file(tmp_path / "a.gguf", *BEFORE, token_pair(TOKENS))) == TOKENS


def test_a_file_without_tokens_or_of_an_unknown_version_has_none(tmp_path: Path) -> None:
    assert read_tokens(gguf_file(tmp_path / "a.gguf", *BEFORE)) is None
    assert read_tokens(gguf_file(tmp_path / "b.gguf", token_pair(TOKENS), version=9)) is None


def test_a_file_that_is_cut_short_anywhere_is_refused_with_the_way_out(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "whole.gguf", *BEFORE, token_pair(TOKENS)).read_bytes()
    part = tmp_path / "part.gguf"
    for length in range(len(whole)):
        part.write_bytes(whole[:length])
        with pytest.raises(EngineError, match=r"part\.gguf is not a complete GGUF file: .*; download it again"):
            read_tokens(part)


@pytest.mark.parametrize(
    ("pairs", "count", "message"),
    [
        ([("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1 << 62))], None, "an array of"),
        ([("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1 << 20))], None, "ends too early"),
        ([("a.text", 8, struct.pack("<Q", 1 << 62))], None, "ends too early"),
        ([("a.list", 9, struct.pack("<IQ", 12, 1 << 23))], None, "ends too early"),
        ([("a.list", 9, array(9, []))], None, "unknown type 9"),
        ([("a.thing", 77, b"")], None, "unknown type 77"),
        ([("tokenizer.ggml.tokens", 9, array(4, [b"\0" * 4]))], None, "no strings"),
        ([], 1 << 62, "metadata entries"),
        ([], 7, "ends too early"),
    ],
    ids=range(9),
)
def test_a_file_that_claims_what_it_does_not_hold_is_refused_at_once(
    tmp_path: Path, pairs: list[tuple[str, int, bytes]], count: int | None, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        read_tokens(gguf_file(tmp_path / "a.gguf", *pairs, count=count))


def test_what_is_no_gguf_file_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")

    with pytest.raises(EngineError, match="it does not begin like one"):
        read_tokens(tmp_path / "a.gguf")
    with pytest.raises(EngineError, match="cannot be read"):
        read_tokens(tmp_path / "absent.gguf")


def test_a_file_with_changed_bytes_is_read_or_refused_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it claims, there are no more parts to look at than bytes in it."""
    num_parts = 0
    count = vocabulary._Metadata._count

    def counted(metadata: vocabulary._Metadata, length: int) -> None:
        nonlocal num_parts
        num_parts += 1
        count(metadata, length)

    monkeypatch.setattr(vocabulary._Metadata, "_count", counted)
    rng = random.Random(0)
    path = gguf_file(tmp_path / "a.gguf", *BEFORE, token_pair(TOKENS))
    whole = path.read_bytes()
    num_refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(4, len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(data)
        num_parts = 0
        try:
            read_tokens(path)
        except EngineError:
            num_refused += 1
        assert num_parts <= len(whole)

    assert 100 < num_refused < 1000
