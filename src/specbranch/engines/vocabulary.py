"""Read the vocabularies of models, also from GGUF files, compare them, and spell tokens as text.

Files are read without the libraries that run models, so that a draft with another vocabulary than its target's is
refused before anything loads. A fingerprint of a vocabulary is small enough to send: a hash of every 257th token.

GGUF metadata is parsed here because the `gguf` package reads one value at a time: 15 seconds for 150,000 tokens on a
slow core. A file may be truncated or malicious, so every length is checked against the bytes left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from specbranch.engines.models import cached_file, local_model
from specbranch.engines.pairs import advice_for
from specbranch.errors import EngineError, SpecBranchError

log = logging.getLogger(__name__)

STRIDE = 257  # distance of the token ids in a fingerprint
HASH_LEN = 4  # bytes; all zero for an id that has no token
MAX_SAMPLE = 1 << 16  # bytes of a fingerprint, enough for four million tokens

# Share of token ids that may differ: fine-tunes change a few special tokens, and output layers are padded.
_TOLERANCE = 0.01
# A fingerprint has only a few hundred ids. It must not by chance refuse a pair that the full comparison accepts;
# unrelated vocabularies differ nearly everywhere.
_SAMPLE_TOLERANCE = 0.05
_ADVICE = "choose a draft with the target's tokenizer, usually a smaller model of the same family"

T = TypeVar("T")
_Size = Annotated[int, Meta(ge=0, lt=1 << 31)]
J = TypeVar("J")
_SPACE = "\u2581"  # SentencePiece's symbol for a space
_KEY = b"tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_MAX_PAIRS = 1 << 16
_MAX_ITEMS = 1 << 24
_STRING, _ARRAY = 8, 9
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value type to its size in bytes
_HEAD = struct.Struct("<IQQ")  # version, number of tensors, number of pairs
_ITEMS = struct.Struct("<IQ")  # type of an array's items, and their number
_NUMBER = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class VocabularyError(SpecBranchError, ValueError):
    """The draft's vocabulary differs from the target's; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary. Either field is None if unknown.

    `size` is the length of the logits, padding included. `tokens` maps each token id but padding to its text.
    """

    size: int | None
    tokens: Mapping[int, str] | None


@dataclass(frozen=True, slots=True)
class VocabFingerprint:
    """A summary of a vocabulary that a service sends to its targets.

    `size` is None if unknown; `hashes` has a hash of every 257th token, and is empty if the tokens are unknown.
    """

    size: int | None
    hashes: bytes = b""


def check_same_vocabulary(target: str, draft: str) -> str | None:
    """Raise `VocabularyError` if the vocabularies of two models do not match.

    Returns a warning that their tokens were not compared, with the reason, or None if they were. The models are named
    as for `EngineOptions`. Loads no model and downloads nothing.
    """
    nothing = Vocabulary(None, None)
    ours, theirs = read_vocabulary(target) or nothing, read_vocabulary(draft) or nothing
    flaw = vocabulary_mismatch(ours, theirs)
    if flaw is not None:
        raise _mismatch(target, draft, flaw)
    unread = [model for model, read in ((target, ours), (draft, theirs)) if read.tokens is None]
    return _not_compared(unread, ours.size, theirs.size)


def check_same_fingerprint(target: str, draft: str, sample: VocabFingerprint) -> str | None:
    """Raise `VocabularyError` if a target's vocabulary does not match `sample`, which the draft's service has sent.

    Returns a warning that the tokens were not compared, with the reason, or None if they were. `draft` is the draft
    model's name for messages.
    """
    ours = read_vocabulary(target)
    own = VocabFingerprint(ours.size, fingerprint_of(ours)) if ours is not None else VocabFingerprint(None)
    flaw = fingerprint_mismatch(own, sample)
    if flaw is not None:
        raise _mismatch(target, draft, flaw)
    unread = [model for model, hashes in ((target, own.hashes), (draft, sample.hashes)) if not hashes]
    return _not_compared(unread, own.size, sample.size)


def _mismatch(target: str, draft: str, flaw: str) -> VocabularyError:
    """Return the error for a pair that does not match; it names a draft that does, if one is known."""
    advice = advice_for(target)
    return VocabularyError(f"{draft} cannot draft for {target}: {flaw}" + (f"; {advice}" if advice else ""))


def _not_compared(unread: list[str], target_size: int | None, draft_size: int | None) -> str | None:
    """Return a warning that tokens were not compared, because those of the `unread` models cannot be read.

    Returns None if `unread` is empty. A size is None if unknown.
    """
    if not unread:
        return None
    extent = " except by their sizes" if target_size and draft_size else ""
    return f"the vocabularies were not compared{extent}: the tokens of {' and '.join(unread)} cannot be read here"


def read_vocabulary(model: str) -> Vocabulary | None:
    """Read the vocabulary of a Transformers directory, a GGUF file, or a name in the hub's local cache.

    Returns None if these files have neither its tokens nor its size. Raises `EngineError` for broken files.
    """
    path = local_model(model)
    if path is None:
        return _from_hub_cache(model)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not (path / "tokenizer.json").exists() and len(files) == 1:
            return _from_gguf(files[0])
        return _from_directory(path / "tokenizer.json", path / "config.json")
    return _from_gguf(path) if path.suffix == ".gguf" else None


def vocabulary_mismatch(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Compare two vocabularies, by their sizes only if the tokens of one are unknown.

    Returns a message that says how they differ and what to do, or None if they differ in at most 1 % of the ids.
    """
    if target.tokens is None or draft.tokens is None:
        return _size_difference(target.size, draft.size)
    ours, theirs = target.tokens, draft.tokens
    others = _others(ours, theirs)
    common = len(ours.keys() & theirs.keys())
    if len(others) > _TOLERANCE * common:
        example = others[len(others) // 2]
        return (
            f"{_percent(len(others), common)} of the token ids in both stand for different text; token {example} is "
            f"{_quoted(ours[example])} in the target and {_quoted(theirs[example])} in the draft; {_ADVICE}"
        )
    alone, together = len(ours.keys() ^ theirs.keys()), len(ours.keys() | theirs.keys())
    if alone > _TOLERANCE * together:
        return (
            f"the target has {len(ours)} tokens and the draft {len(theirs)}: {_percent(alone, together)} of the ids "
            f"exist in only one of them; {_ADVICE}"
        )
    return None


def fingerprint_mismatch(target: VocabFingerprint, draft: VocabFingerprint) -> str | None:
    """Compare two fingerprints, by their sizes only if one has no hashes.

    Returns a message that says how the vocabularies differ, or None if at most 5 % of the hashes, or 1 % of the size,
    differ.
    """
    if not target.hashes or not draft.hashes:
        return _size_difference(target.size, draft.size)
    ours, theirs = _by_place(target.hashes), _by_place(draft.hashes)
    others, common = len(_others(ours, theirs)), len(ours.keys() & theirs.keys())
    if others > _SAMPLE_TOLERANCE * common:
        return f"of {common} token ids compared, {others} stand for different text in the draft; {_ADVICE}"
    alone, together = len(ours.keys() ^ theirs.keys()), len(ours.keys() | theirs.keys())
    if alone > _SAMPLE_TOLERANCE * together:
        return f"of {together} token ids compared, {alone} exist in only one of them; {_ADVICE}"
    return None


def fingerprint_of(vocabulary: Vocabulary) -> bytes:
    """Return the hashes of every 257th token of a vocabulary; b"" if its tokens are unknown."""
    tokens = vocabulary.tokens
    if not tokens:
        return b""
    ids = range(0, max(tokens) + 1, STRIDE)[: MAX_SAMPLE // HASH_LEN]
    return b"".join(_hash(tokens[token]) if token in tokens else bytes(HASH_LEN) for token in ids)


def read_fingerprint(model: str) -> bytes:
    """Read a model's vocabulary, and return the hashes of every 257th token; b"" if the tokens are unknown.

    Never raises: a file that cannot be read is logged as a warning.
    """
    try:
        vocabulary = read_vocabulary(model)
    except Exception as error:
        log.warning("the tokens of %s cannot be read, so vocabularies are compared by size only: %s", model, error)
        return b""
    return fingerprint_of(vocabulary) if vocabulary else b""


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(msgspec.Struct):
    """The part of `tokenizer.json` that names the tokens."""

    model: _Model
    added_tokens: list[_Added] | None = None


class _TextConfig(msgspec.Struct):
    vocab_size: _Size | None = None


class _Config(msgspec.Struct):
    """The part of `config.json` that has the vocabulary size; multimodal models nest it in `text_config`."""

    vocab_size: _Size | None = None
    text_config: _TextConfig | None = None


def _from_directory(tokenizer: Path | None, config: Path | None) -> Vocabulary | None:
    """Read a vocabulary from the two files of a Transformers model, either of which may be absent.

    Returns None if neither its tokens nor its size are in them.
    """
    tokens = _tokens_of(_read_json(tokenizer, _Tokenizer))
    size = _size_of(_read_json(config, _Config))
    return None if tokens is None and size is None else Vocabulary(size, tokens)


def _from_gguf(path: Path) -> Vocabulary | None:
    tokens = read_tokens(path)
    return Vocabulary(len(tokens), _without_padding(enumerate(tokens))) if tokens else None


def _from_hub_cache(model: str) -> Vocabulary | None:
    repo, _, name = model.partition(":")
    if name:
        path = cached_file(repo, name)
        return _from_gguf(path) if path and name.endswith(".gguf") else None
    return _from_directory(cached_file(repo, "tokenizer.json"), cached_file(repo, "config.json"))


def _read_json(path: Path | None, kind: type[J]) -> J | None:
    """Decode a JSON file as `kind`; return None if it does not exist or has another structure.

    Raises `EngineError` for a file that cannot be read.
    """
    if path is None or not path.is_file():
        return None
    try:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError:  # Python's json also reads numbers such as Infinity
            return msgspec.convert(json.loads(path.read_bytes()), kind)
    except msgspec.ValidationError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise EngineError(f"{path} cannot be read: {error}; download the model again") from error


def _tokens_of(tokenizer: _Tokenizer | None) -> Mapping[int, str] | None:
    if tokenizer is None:
        return None
    vocab = tokenizer.model.vocab
    if isinstance(vocab, dict):
        tokens = {token_id: text for text, token_id in vocab.items()}
    else:
        tokens = {token_id: text for token_id, (text, _) in enumerate(vocab)}
    tokens |= {added.id: added.content for added in tokenizer.added_tokens or ()}
    return _without_padding(tokens.items()) or None


def _size_of(config: _Config | None) -> int | None:
    if config is None:
        return None
    return config.vocab_size or (config.text_config.vocab_size if config.text_config else None)


def _without_padding(tokens: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the tokens by id, without padding tokens, which converters to GGUF name after their id: [PAD7]."""
    return {token_id: text for token_id, text in tokens if text[:4] != "[PAD" or text != f"[PAD{token_id}]"}


def _size_difference(target: int | None, draft: int | None) -> str | None:
    if target is None or draft is None or abs(target - draft) <= _TOLERANCE * max(target, draft):
        return None
    return f"the target's vocabulary has {target} tokens and the draft's {draft}; {_ADVICE}"


def _others(target: Mapping[int, T], draft: Mapping[int, T]) -> list[int]:
    """Return the keys that both mappings have with different values, in ascending order."""
    return sorted(key for key, value in target.items() if key in draft and draft[key] != value)


def _by_place(sample: bytes) -> dict[int, int]:
    """Return the non-zero hashes of a fingerprint by their index in it."""
    hashes = np.frombuffer(sample, dtype="<u4").tolist()
    return {place: value for place, value in enumerate(hashes) if value}


def _hash(text: str) -> bytes:
    return hashlib.blake2s(text.encode(errors="surrogatepass"), digest_size=HASH_LEN).digest()


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def token_text(model: str | None) -> Callable[[int], str]:
    """Return a function that spells a token id of a model as text, or as `#7` if the token is unknown."""
    try:
        vocabulary = read_vocabulary(model) if model else None
    except EngineError:
        vocabulary = None
    tokens = (vocabulary.tokens if vocabulary else None) or {}

    def spell(token: int) -> str:
        text = tokens.get(token)
        return f"#{token}" if text is None else _readable(text)

    return spell


def _readable(token: str) -> str:
    """Return the text that a vocabulary's entry stands for.

    Byte-level vocabularies spell each byte as a printable character, others each space as a symbol.
    """
    try:
        return bytes(_BYTES[character] for character in token).decode(errors="replace")
    except KeyError:
        return token.replace(_SPACE, " ")


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's mapping from characters to bytes.

    Printable Latin-1 characters stand for themselves, and characters from 256 on for all other bytes.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


def read_tokens(path: Path) -> list[str] | None:
    """Read the tokens of a GGUF file in order of their ids; return None if it has none or an unknown version.

    Raises `EngineError` for a file that is not GGUF, is truncated, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            return _Metadata(path, file).tokens()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}; check the path and its permissions") from error


class _Metadata:
    """A reader of the key-value pairs at the start of a GGUF file, to find the tokens among them."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._left = path.stat().st_size

    def tokens(self) -> list[str] | None:
        if self._take(4) != b"GGUF":
            raise self._broken("it does not begin with GGUF")
        version, _, num_pairs = _HEAD.unpack(self._take(_HEAD.size))
        if version not in _VERSIONS:
            return None
        if num_pairs > _MAX_PAIRS:
            raise self._broken(f"it claims {num_pairs} metadata entries")
        for _ in range(num_pairs):
            key, kind = self._string(), self._number()
            if key == _KEY and kind == _ARRAY:
                return self._tokens()
            self._skip(kind)
        return None

    def _tokens(self) -> list[str]:
        kind, count = self._items()
        if kind != _STRING:
            raise self._broken("its tokens are not strings")
        tokens, read = [], self._file.read
        for _ in range(count):  # `_string` for each would take twice as long
            length = int.from_bytes(read(8), "little")
            self._count(8 + length)
            tokens.append(read(length).decode(errors="replace"))
        return tokens

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._pass(self._length())
        elif kind == _ARRAY:
            item, count = self._items()
            if item == _STRING:
                for _ in range(count):
                    self._pass(self._length())
            else:
                self._pass(count * self._size(item))
        else:
            self._pass(self._size(kind))

    def _items(self) -> tuple[int, int]:
        """Read the header of an array: the type and the number of its items."""
        kind, count = _ITEMS.unpack(self._take(_ITEMS.size))
        if count > _MAX_ITEMS:
            raise self._broken(f"it claims an array of {count} items")
        return kind, count

    def _size(self, kind: int) -> int:
        if kind not in _FIXED:
            raise self._broken(f"it has a value of the unknown type {kind}")
        return _FIXED[kind]

    def _string(self) -> bytes:
        return self._take(self._length())

    def _length(self) -> int:
        length: int = _LENGTH.unpack(self._take(8))[0]
        return length

    def _number(self) -> int:
        number: int = _NUMBER.unpack(self._take(4))[0]
        return number

    def _take(self, length: int) -> bytes:
        self._count(length)
        data = self._file.read(length)
        if len(data) < length:  # the file was truncated while open
            raise self._broken("it ends too early")
        return data

    def _pass(self, length: int) -> None:
        self._count(length)
        self._file.seek(length, 1)

    def _count(self, length: int) -> None:
        if length > self._left:
            raise self._broken("it ends too early")
        self._left -= length

    def _broken(self, why: str) -> EngineError:
        return EngineError(f"{self._path} is not a complete GGUF file: {why}; download it again")
