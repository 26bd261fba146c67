"""Vocabularies: what is read of models, which pairs fit, and why others do not."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specbranch.engines.pairs import advice_for, pairs_table
from specbranch.engines.vocabulary import (
    HASH_LEN,
    STRIDE,
    VocabFingerprint,
    Vocabulary,
    VocabularyError,
    _Metadata,
    check_same_vocabulary,
    fingerprint_mismatch,
    fingerprint_of,
    read_fingerprint,
    read_tokens,
    read_vocabulary,
    token_text,
    vocabulary_mismatch,
)
from specbranch.errors import EngineError
from tests.measuring import num_calls
from tests.models import model_path
from tests.root import ROOT

NUM = 5000
WORDS = [f"word{number}" for number in range(NUM)]


def vocabulary(words: Sequence[str], size: int | None = None) -> Vocabulary:
    return Vocabulary(size or len(words), dict(enumerate(words)))


def differences(target: Vocabulary, draft: Vocabulary) -> list[str | None]:
    """By all tokens, and by what goes over the wire."""
    samples = [VocabFingerprint(one.size, fingerprint_of(one)) for one in (target, draft)]
    return [vocabulary_mismatch(target, draft), fingerprint_mismatch(*samples)]


def model(directory: Path, tokenizer: Any, config: Any = None) -> str:
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def bpe(words: Sequence[str], **more: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {word: index for index, word in enumerate(words)}, "merges": []}, **more}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("smollm2-135m-dense", "smollm2-135m"),
        ("smollm2-short-dense", "smollm2-short"),
        ("smollm2-135m-dense", "smollm2-short"),
        ("smollm2-135m", "smollm2-135m-dense"),
        ("qwen-coder-0.5b-dense", "qwen-coder-0.5b"),
        ("qwen-coder-1.5b-dense", "qwen-coder-0.5b"),
    ],
)
def test_a_model_can_draft_for_its_family_in_either_format(target: str, draft: str) -> None:
    paths = [str(model_path(name)) for name in (target, draft)]
    ours, theirs = (read_vocabulary(path) for path in paths)
    assert check_same_vocabulary(*paths) is None

    assert ours is not None and ours.tokens and theirs is not None and theirs.tokens
    assert differences(ours, theirs) == [None, None]


@pytest.mark.parametrize("kinds", [("", ""), ("", "-dense"), ("-dense", ""), ("-dense", "-dense")])
def test_models_of_two_families_are_refused_both_ways_with_an_example(kinds: tuple[str, str]) -> None:
    pair = [str(model_path(name + kind)) for name, kind in zip(("smollm2-135m", "qwen-coder-0.5b"), kinds, strict=True)]
    for target, draft in (pair, reversed(pair)):
        with pytest.raises(VocabularyError) as raised:
            check_same_vocabulary(target, draft)

        message = str(raised.value)
        assert message.startswith(f"{draft} cannot draft for {target}: 100 % of the token ids")
        assert "token 24584 is " in message and "'pse' in the" in message and "'ĠPharm' in the" in message
        assert "choose a draft with the target's tokenizer" in message
        assert read_fingerprint(target) and fingerprint_mismatch(
            VocabFingerprint(None, read_fingerprint(target)), VocabFingerprint(None, read_fingerprint(draft))
        )


@pytest.mark.parametrize("name", ["qwen-coder-0.5b", "qwen-coder-0.5b-dense"])
def test_a_large_vocabulary_is_read_with_few_calls_for_a_token(name: str) -> None:
    """So that it can be read at every start."""
    path, results = str(model_path(name)), list[Vocabulary | None]()
    calls = num_calls(lambda: results.append(read_vocabulary(path)))
    (found,) = results

    assert found is not None and found.size == 151936
    assert found.tokens is not None and len(found.tokens) == 151665  # the rest is padding
    assert calls < 10 * len(found.tokens)


def test_no_library_that_runs_models_is_loaded_to_refuse_a_pair(tmp_path: Path) -> None:
    pair = [model(tmp_path / name, bpe(words)) for name, words in (("a", WORDS), ("b", WORDS[::-1]))]
    program = (
        "import sys\n"
        "from specbranch.engines.vocabulary import VocabularyError, check_same_vocabulary\n"
        "try: check_same_vocabulary(*sys.argv[1:])\n"
        "except VocabularyError:\n"
        "    print(*{'torch', 'transformers', 'tokenizers', 'llama_cpp', 'gguf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, *pair], capture_output=True, text=True, check=True)

    assert done.stdout == "\n"


def test_the_same_tokens_in_another_order_are_another_vocabulary() -> None:
    for flaw in differences(vocabulary(WORDS), vocabulary(WORDS[1:] + WORDS[:1])):
        assert flaw is not None and "stand for different text" in flaw


@pytest.mark.parametrize(("num_changed", "fits"), [(0, True), (50, True), (51, False)])
def test_a_few_other_special_tokens_are_no_matter(num_changed: int, fits: bool) -> None:
    tuned = [f"<new{number}>" for number in range(num_changed)] + WORDS[num_changed:]

    assert (vocabulary_mismatch(vocabulary(WORDS), vocabulary(tuned)) is None) is fits


def test_a_sample_refuses_no_run_of_tokens_that_the_whole_comparison_passes() -> None:
    """Added tokens lie together: a hundredth of the vocabulary, anywhere."""
    run_len = NUM // 100
    for start in range(0, NUM - run_len, 7):
        tuned = [*WORDS[:start], *["new"] * run_len, *WORDS[start + run_len :]]

        assert differences(vocabulary(WORDS), vocabulary(tuned)) == [None, None]


def test_a_vocabulary_with_far_more_tokens_is_another_one_in_either_place() -> None:
    small, large = vocabulary(WORDS[: NUM // 2], NUM), vocabulary(WORDS, NUM)
    for pair in ((small, large), (large, small)):
        for flaw in differences(*pair):
            assert flaw is not None and "exist in only one of them" in flaw
    assert differences(vocabulary(WORDS[: NUM - NUM // 200]), vocabulary(WORDS)) == [None, None]


@pytest.mark.parametrize(
    ("target", "draft", "fits"),
    [
        (151936, 152064, True),
        (152064, 151936, True),
        (49152, 151936, False),
        (151936, 49152, False),
        (None, 49152, True),
        (49152, None, True),
    ],
)
def test_without_tokens_on_both_sides_sizes_decide_up_to_padding(
    target: int | None, draft: int | None, fits: bool
) -> None:
    tokens = dict(enumerate(WORDS))
    found = [
        vocabulary_mismatch(Vocabulary(target, None), Vocabulary(draft, tokens)),
        vocabulary_mismatch(Vocabulary(target, tokens), Vocabulary(draft, None)),
        fingerprint_mismatch(VocabFingerprint(target), VocabFingerprint(draft, fingerprint_of(vocabulary(WORDS)))),
    ]

    assert [flaw is None for flaw in found] == [fits] * 3
    assert fits or f"has {target} tokens and the draft's {draft}" in str(found[0])


def test_with_tokens_on_both_sides_padding_of_any_size_is_no_matter() -> None:
    assert differences(vocabulary(WORDS, NUM), vocabulary(WORDS, 2 * NUM)) == [None, None]


def test_padding_in_a_gguf_file_is_no_token(tmp_path: Path) -> None:
    padded = [*WORDS, *(f"[PAD{NUM + number}]" for number in range(500)), "[PAD1]"]
    found = read_vocabulary(str(gguf_file(tmp_path / "a.gguf", token_pair(padded))))

    assert found is not None and found.size == NUM + 501
    assert found.tokens == dict(enumerate(WORDS)) | {NUM + 500: "[PAD1]"}  # the last one is a token of that name
    assert vocabulary_mismatch(vocabulary(WORDS), found) is None


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (bpe(["a", "b"], added_tokens=[{"id": 7, "content": "<s>", "special": True}]), {0: "a", 1: "b", 7: "<s>"}),
        ({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -3]]}}, {0: "<unk>", 1: "▁a"}),
        ({"model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "##a": 1}}}, {0: "[UNK]", 1: "##a"}),
        ({"model": {"type": "Future", "vocab": "elsewhere"}}, None),
        ({"model": {"type": "BPE", "vocab": {}}}, None),
        ([], None),
    ],
    ids=["bpe", "unigram", "wordpiece", "unknown", "empty", "list"],
)
@pytest.mark.parametrize("config", [{"vocab_size": 9}, {"text_config": {"vocab_size": 9}, "vocab_size": None}])
def test_a_directory_of_transformers_is_read(tmp_path: Path, tokenizer: Any, tokens: Any, config: Any) -> None:
    assert read_vocabulary(model(tmp_path / "m", tokenizer, config)) == Vocabulary(9, tokens)


def test_of_what_is_not_here_or_says_nothing_there_is_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    names = [str(tmp_path / "empty"), str(tmp_path / "weights.bin"), str(tmp_path / "absent"), "no-such-model", "a b:c"]

    assert [read_vocabulary(name) for name in names] == [None] * 5
    assert check_same_vocabulary("no-such-model", model(tmp_path / "m", bpe(WORDS))) == (
        "the vocabularies were not compared: the tokens of no-such-model cannot be read here"
    )


def test_a_broken_file_is_refused_with_its_name_and_costs_an_engine_only_its_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(model(tmp_path / "m", bpe(WORDS)))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a"')

    with pytest.raises(EngineError, match=r"tokenizer\.json cannot be read"):
        read_vocabulary(str(directory))
    assert read_fingerprint(str(directory)) == b""
    assert "compared by size only" in caplog.text


def test_a_name_on_the_hub_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    model(snapshot, bpe(WORDS), {"vocab_size": 6000})
    gguf_file(snapshot / "m.gguf", token_pair(WORDS))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)

    assert read_vocabulary("org/model") == vocabulary(WORDS, 6000)
    assert read_vocabulary("org/model:m.gguf") == vocabulary(WORDS)
    assert read_vocabulary("org/model:other.gguf") is read_vocabulary("org/other") is None


def test_a_sample_has_the_same_ids_whatever_the_size_and_zeros_where_there_is_no_token() -> None:
    tokens = {number: WORDS[number] for number in range(1000) if number != STRIDE}
    sample, longer = fingerprint_of(Vocabulary(None, tokens)), fingerprint_of(vocabulary(WORDS))

    assert len(sample) == 4 * HASH_LEN  # ids 0, 257, 514 and 771
    assert sample[HASH_LEN : 2 * HASH_LEN] == bytes(HASH_LEN)
    assert sample[2 * HASH_LEN :] == longer[2 * HASH_LEN : 4 * HASH_LEN]
    assert fingerprint_of(Vocabulary(100, None)) == b""


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
        ([("tokenizer.ggml.tokens", 9, array(4, [b"\0" * 4]))], None, "not strings"),
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

    with pytest.raises(EngineError, match="it does not begin with GGUF"):
        read_tokens(tmp_path / "a.gguf")
    with pytest.raises(EngineError, match="cannot be read"):
        read_tokens(tmp_path / "absent.gguf")


def test_a_file_with_changed_bytes_is_read_or_refused_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it claims, there are no more parts to look at than bytes in it."""
    num_parts = 0
    count = _Metadata._count

    def counted(metadata: _Metadata, length: int) -> None:
        nonlocal num_parts
        num_parts += 1
        count(metadata, length)

    monkeypatch.setattr(_Metadata, "_count", counted)
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


def write_vocabulary(path: Path, *tokens: str) -> str:
    document = {"model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}}}
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    return str(path)


def test_bytes_and_spaces_are_readable(tmp_path: Path) -> None:
    spell = token_text(write_vocabulary(tmp_path, "Ġdef", "Ċ", "Ã¤", "\u2581the", "<|end|>"))

    assert [spell(token) for token in range(5)] == [" def", "\n", "ä", " the", "<|end|>"]


def test_tokens_that_nobody_knows_are_numbers(tmp_path: Path) -> None:
    assert token_text(None)(7) == "#7"
    assert token_text("no-such-model")(7) == "#7"
    assert token_text(write_vocabulary(tmp_path, "a"))(7) == "#7"


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "for Qwen2.5-Coder 1.5B to 32B take Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("/models/qwen2.5-72b-awq", "for Qwen2.5 3B to 72B take Qwen/Qwen2.5-0.5B-Instruct or"),
        ("meta-llama/Llama-3.3-70B-Instruct", "take meta-llama/Llama-3.2-1B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Llama-3.2-1B-Instruct"),
        ("Qwen/Qwen3-32B", "take Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "no draft is known for Qwen3-Next"),
        ("microsoft/phi-4", "no draft is known for Phi-4 14B"),
        ("microsoft/Phi-4-mini-instruct", None),
        ("a/private-model", None),
    ],
)
def test_a_popular_target_is_told_which_draft_fits(target: str, advice: str | None) -> None:
    found = advice_for(target)

    assert found is None if advice is None else found is not None and advice in found


def test_a_wrong_draft_for_a_popular_target_is_refused_with_the_name_of_a_right_one(tmp_path: Path) -> None:
    for name, tokens in (("Qwen3-8B", 300), ("other", 200)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"vocab_size": tokens}))

    with pytest.raises(VocabularyError, match=r"for Qwen3 4B to 235B, Qwen3-Coder take Qwen/Qwen3-0\.6B"):
        check_same_vocabulary(str(tmp_path / "Qwen3-8B"), str(tmp_path / "other"))


def test_the_page_has_the_table_of_pairs() -> None:
    assert pairs_table() in (ROOT / "docs" / "choose.md").read_text()
