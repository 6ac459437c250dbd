"""The data path: documents, packing, batches, exact resumption, and what is said about bad data."""

from __future__ import annotations

import functools
import gc
import gzip
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch

from titan_runtime.data import (
    DataError,
    DataLoader,
    JsonLines,
    PackedStream,
    ParquetFiles,
    TextFolder,
    load_tokenizer,
    open_source,
    open_stream,
    unigram_entropy_nats,
)
from titan_runtime.data.documents import PIECE_BYTES, DocumentSource, cut
from titan_runtime.data.fingerprint import LISTED_FILES

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "sample"
TOKENIZER = ROOT / "data" / "tokenizer.json"
EOS = 1
BOS = 0

# Documents in the order of reading. The long ones have several pieces; the second is not ASCII, so that a piece's
# number of characters is not its number of bytes.
LONG = (SAMPLE / "19-psalms.txt").read_text(encoding="utf-8")[:140_000]
LONG_UNICODE = "".join(
    f"And verse {n}, by the waters: Größe, 語彙, naïve café 🙂 before the LORD\n" for n in range(1000)
)
DOCUMENTS = [
    "A short one.",
    LONG,
    "Another short one,\nin two lines\n",
    LONG_UNICODE,
    "x",
    (SAMPLE / "31-obadiah.txt").read_text(encoding="utf-8"),
]
SOURCES = ["text", "text.gz", "jsonl", "jsonl.gz", "parquet"]


@pytest.fixture(scope="module")
def tokenizer():
    return shared_tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def epoch() -> list[int]:
    """The tokens of one epoch of DOCUMENTS by the naive way: each document tokenised whole, then eos."""
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    return [token for text in DOCUMENTS for token in [*backend.encode(text).ids, EOS]]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """DOCUMENTS as every kind of source, with empty documents and files in between, which do not count."""
    root = tmp_path_factory.mktemp("corpora")
    for name in SOURCES:
        (root / name).mkdir()
    for number, text in enumerate(DOCUMENTS):
        (root / "text" / f"{number}.txt").write_bytes(text.encode())
        (root / "text.gz" / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode(), compresslevel=1))
    (root / "text" / "2-empty.txt").touch()
    (root / "text.gz" / "0-empty.txt.gz").write_bytes(gzip.compress(b""))
    (root / "text.gz" / "9-empty.txt.gz").write_bytes(gzip.compress(b""))

    records = [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)]
    lines = [json.dumps(record, ensure_ascii=record["id"] % 2 == 0) for record in records]
    first = f'\n{lines[0]}\n{{"text": ""}}\n  \n{lines[1]}\n{lines[2]}\n'.encode()
    second = f"{lines[3]}\n{lines[4]}\n{lines[5]}".encode()  # no line end after the last line
    for name, pack in (("jsonl", bytes), ("jsonl.gz", gzip.compress)):
        (root / name / f"a.{name}").write_bytes(pack(first))
        (root / name / "sub").mkdir()
        (root / name / "sub" / f"b.{name}").write_bytes(pack(second))

    table = pa.table({"id": list(range(5)), "text": [DOCUMENTS[0], "", *DOCUMENTS[1:4]]})
    pq.write_table(table, root / "parquet" / "a.parquet", row_group_size=2)
    dictionary = pa.table({"text": pa.array([*DOCUMENTS[4:], ""]).dictionary_encode()})
    pq.write_table(dictionary, root / "parquet" / "b.parquet")
    return {name: root / name for name in SOURCES}


# Loaded once: every further instance makes the `tokenizers` library slower for the rest of the process.
shared_tokenizer = functools.cache(load_tokenizer)


def stream_of(kind: str, path: Path, seq_len: int, **options) -> PackedStream:
    """What `open_stream` gives, with the shared tokenizer."""
    return PackedStream(open_source(kind, path), shared_tokenizer(TOKENIZER), seq_len, **options)


def make_stream(corpora: dict[str, Path], name: str, seq_len: int, **options) -> PackedStream:
    return stream_of(name.removesuffix(".gz"), corpora[name], seq_len, **options)


def window(epoch: list[int], sample: int, seq_len: int) -> list[int]:
    return [epoch[at % len(epoch)] for at in range(sample * seq_len, sample * seq_len + seq_len + 1)]


def through_json(state):
    return json.loads(json.dumps(state))


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_samples_equal_the_naive_packing_over_epochs(corpora, epoch, name):
    seq_len = 997
    stream = make_stream(corpora, name, seq_len)
    for sample in range(2 * len(epoch) // seq_len + 3):
        assert stream.next_sample().tolist() == window(epoch, sample, seq_len)
    assert stream.state()["epoch"] == 2


@pytest.mark.parametrize("seq_len", [1, 13, 70_000])
def test_any_sequence_length(corpora, epoch, seq_len):
    stream = make_stream(corpora, "text", seq_len)
    for sample in range(8):
        assert stream.next_sample().tolist() == window(epoch, sample, seq_len)


def test_a_sample_longer_than_an_epoch(tmp_path):
    (tmp_path / "a.txt").write_text("In the beginning")
    stream = stream_of("text", tmp_path, 100)
    one = [*shared_tokenizer(TOKENIZER).encode("In the beginning"), EOS]
    assert len(one) < 10
    assert stream.take(3).tolist() == window(one, 0, 300)
    assert stream.state()["documents"] == 300 // len(one)


def test_bos_before_each_document_only(corpora, tokenizer):
    seq_len = 4096
    stream = make_stream(corpora, "jsonl", seq_len, add_bos=True)
    expected = [token for text in DOCUMENTS for token in [BOS, *tokenizer.encode(text), EOS]]
    for sample in range(len(expected) // seq_len + 2):
        assert stream.next_sample().tolist() == window(expected, sample, seq_len)


def test_open_stream_passes_on_what_it_is_given(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"body": "In the beginning", "text": 7}')
    stream = open_stream("jsonl", str(tmp_path), str(TOKENIZER.parent), 3, text_field="body", add_bos=True)
    assert stream.next_sample().tolist() == [BOS, *tokenizer.encode("In the beginning"), EOS][:4]
    with pytest.raises(DataError, match="'text' is of type int"):
        open_stream("jsonl", tmp_path, TOKENIZER, 3).next_sample()


def test_take_and_skip_are_the_same_walk(corpora, epoch):
    taken, skipped = make_stream(corpora, "text", 64), make_stream(corpora, "text", 64)
    one_by_one = make_stream(corpora, "text", 64)
    for count in (1, 5, 0, 700, 33, 2000, 1):
        begin = taken.samples * 64
        expected = [epoch[at % len(epoch)] for at in range(begin, begin + count * 64 + 1)]
        assert taken.take(count).tolist() == expected
        skipped.skip(count)
        for _ in range(count):
            one_by_one.next_sample()
        assert taken.state() == skipped.state() == one_by_one.state()


def test_a_stream_is_the_same_where_a_piece_ends_exactly_at_a_sample(tmp_path, tokenizer):
    texts = ["In the beginning", "God created the heaven"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    length = len(tokenizer.encode(texts[0])) + 1
    taken, skipped = (stream_of("text", tmp_path, length) for _ in range(2))
    taken.take(1)
    skipped.skip(1)
    assert taken.state() == skipped.state()
    assert taken.state()["position"] == {"file": 1, "offset": 0}
    assert (taken.state()["documents"], taken.state()["token_offset"]) == (1, 0)
    # ... and where an epoch does.
    length += len(tokenizer.encode(texts[1])) + 1
    taken, skipped = (stream_of("text", tmp_path, length) for _ in range(2))
    taken.take(1)
    skipped.skip(1)
    assert taken.state() == skipped.state()
    assert (taken.state()["epoch"], taken.state()["position"]) == (1, {"file": 0, "offset": 0})


def test_documents_are_counted_when_they_end(corpora, epoch):
    seq_len = 500
    stream = make_stream(corpora, "parquet", seq_len)
    ended = 0
    for sample in range(2 * len(epoch) // seq_len):
        # Exact although a state counts per piece: a piece ends at most one document, with its last token.
        assert stream.state()["documents"] == ended
        stream.skip(1)
        ended += sum(epoch[at % len(epoch)] == EOS for at in range(sample * seq_len, (sample + 1) * seq_len))
    assert ended > len(DOCUMENTS)


def test_epoch_tokens_leaves_the_stream_alone(corpora, epoch):
    stream = make_stream(corpora, "text", 64)
    stream.skip(10)
    before = stream.state()
    assert [token for tokens in stream.epoch_tokens() for token in tokens] == epoch
    assert stream.state() == before
    assert stream.next_sample().tolist() == window(epoch, 10, 64)


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_resuming_gives_the_next_sample_without_reading_from_the_start(corpora, epoch, name, monkeypatch):
    seq_len = 3001
    samples = 2 * len(epoch) // seq_len + 2
    tried = set(range(0, samples, 1 if name == "text" else 4))
    stream, resumed = make_stream(corpora, name, seq_len), make_stream(corpora, name, seq_len)
    encode, encoded = resumed.tokenizer.encode, []
    monkeypatch.setattr(resumed.tokenizer, "encode", lambda text: encoded.append(len(text.encode())) or encode(text))
    inside_long_document = 0
    for sample in range(samples):
        state = through_json(stream.state())
        assert (state["samples"], state["epoch"]) == (sample, sample * seq_len // len(epoch))
        if sample in tried:
            encoded.clear()
            resumed.restore(state)
            assert resumed.state() == state
            assert resumed.next_sample().tolist() == window(epoch, sample, seq_len)
            # The piece it starts in, and what the sample itself runs into.
            assert sum(encoded) <= 2 * PIECE_BYTES + 10_000
            offset = state["position"].get("byte", state["position"].get("offset"))
            inside_long_document += offset > 0 and state["token_offset"] > 0
        assert stream.next_sample().tolist() == window(epoch, sample, seq_len)
        if sample in tried:
            assert resumed.state() == stream.state()
    assert inside_long_document >= 5
    resumed.restore(stream.state())
    for later in range(samples, samples + 5):
        assert resumed.next_sample().tolist() == window(epoch, later, seq_len)


def test_resuming_at_every_token_of_an_epoch_boundary(tmp_path, tokenizer):
    for number, text in enumerate(["In the beginning", "", "God created the heaven", "and the earth."]):
        (tmp_path / f"{number}.txt").write_text(text)
    stream = stream_of("text", tmp_path, 1)
    one = [token for tokens in stream.epoch_tokens() for token in tokens]
    for sample in range(3 * len(one)):
        resumed = stream_of("text", tmp_path, 1)
        resumed.restore(through_json(stream.state()))
        assert resumed.take(4).tolist() == [one[(sample + k) % len(one)] for k in range(5)]
        stream.skip(1)


def test_a_stream_can_go_back(corpora, epoch):
    stream = make_stream(corpora, "text.gz", 300)
    stream.skip(100)
    state = stream.state()
    stream.skip(250)
    stream.restore(state)
    assert stream.next_sample().tolist() == window(epoch, 100, 300)


def test_a_state_belongs_to_the_caller(corpora, epoch):
    stream = make_stream(corpora, "text", 300)
    stream.skip(3)
    state = stream.state()
    state["position"]["offset"] = 10**6
    state["fingerprint"]["files"].clear()
    assert stream.state()["fingerprint"]["files"]
    assert stream.next_sample().tolist() == window(epoch, 3, 300)


def test_a_moved_data_set_is_the_same_data(corpora, epoch, tmp_path):
    stream = make_stream(corpora, "text", 300)
    stream.skip(200)
    for file in corpora["text"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved = stream_of("text", tmp_path, 300)
    moved.restore(stream.state())
    assert moved.next_sample().tolist() == window(epoch, 200, 300)


@pytest.fixture
def small(tmp_path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"document {name} " * 5000)
    return folder


def _rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


CHANGES = {
    "content": (lambda f: _rewrite(f / "b.txt", "document", "Document"), "the content of file 'b.txt' has changed"),
    "end": (lambda f: (f / "b.txt").write_text("document b " * 4999 + "document c "), "content of file 'b.txt'"),
    "size": (lambda f: (f / "c.txt").write_text("document"), "file 'c.txt' had 55000 bytes and now has 8"),
    "new": (lambda f: (f / "d.txt").write_text("document"), "file 'd.txt' is new"),
    "gone": (lambda f: (f / "a.txt").unlink(), "file 'a.txt' is gone"),
    "renamed": (lambda f: (f / "c.txt").rename(f / "x.txt"), "file 'c.txt' is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_of_other_data_is_refused_and_the_difference_named(small, change):
    state = stream_of("text", small, 32).state()
    action, message = CHANGES[change]
    action(small)
    stream = stream_of("text", small, 32)
    stream.skip(3)
    before = stream.state()
    with pytest.raises(DataError, match=message) as caught:
        stream.restore(state)
    assert caught.value.rule == "same-data"
    assert caught.value.fix
    assert stream.state() == before


def test_a_state_of_many_files_is_small_and_still_tells_data_apart(tmp_path):
    for number in range(LISTED_FILES + 1):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    stream = stream_of("text", tmp_path, 8)
    state = through_json(stream.state())
    assert len(json.dumps(state)) < 1000
    stream.restore(state)
    (tmp_path / "7.txt").write_text("Document 7")
    with pytest.raises(DataError, match="the content of the files was"):
        stream_of("text", tmp_path, 8).restore(state)


def test_a_state_of_another_way_of_packing_is_refused(corpora, tmp_path):
    state = make_stream(corpora, "jsonl", 32).state()
    with pytest.raises(DataError, match="seq_len = 32 and the stream has seq_len = 64"):
        make_stream(corpora, "jsonl", 64).restore(state)
    with pytest.raises(DataError, match="add_bos = False"):
        make_stream(corpora, "jsonl", 32, add_bos=True).restore(state)
    with pytest.raises(DataError, match="kind of source was 'jsonl' and is now 'text'"):
        make_stream(corpora, "text", 32).restore(state)
    with pytest.raises(DataError, match="field that holds the text was 'text' and is now 'body'"):
        open_stream("jsonl", corpora["jsonl"], TOKENIZER, 32, text_field="body").restore(state)
    other = tmp_path / "tokenizer.json"
    other.write_text(TOKENIZER.read_text() + "\n")
    with pytest.raises(DataError, match="tokenizer file"):
        open_stream("jsonl", corpora["jsonl"], other, 32).restore(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.clear(),
        lambda s: s.update(format=99),
        lambda s: s.pop("documents"),
        lambda s: s.update(samples=-1),
        lambda s: s.update(token_offset="3"),
        lambda s: s.update(fingerprint=None),
        lambda s: s.update(position={"file": 0}),
        lambda s: s.update(position={"file": 99, "offset": 0}),
        lambda s: s.update(position={"file": 0, "offset": 0.5}),
        lambda s: s.update(token_offset=10**6),
        lambda s: s.update(position={"file": 6, "offset": 0}, token_offset=2),
    ],
)
def test_a_damaged_state_is_refused(corpora, epoch, change):
    stream = make_stream(corpora, "text", 32)
    stream.skip(5)
    state = through_json(stream.state())
    change(state)
    with pytest.raises(DataError):
        stream.restore(state)
    assert stream.next_sample().tolist() == window(epoch, 5, 32)


# --- pieces of long documents --------------------------------------------------------------------------------------


def write_source(tmp_path: Path, kind: str, text: str) -> DocumentSource:
    if kind == "text":
        (tmp_path / "a.txt").write_bytes(text.encode())
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    else:
        pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    return open_source(kind, tmp_path)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "text",
    [
        *("." * shift + "語🙂é" * 20_000 for shift in range(9)),  # no place to cut but between two characters
        "word " * 40_000,
        "line\n\n" * 40_000,
        " " * 200_000,
        "\n" * 200_000,
        "a\nb" + "語" * 60_000,
        "x" * PIECE_BYTES,
        "x" * (PIECE_BYTES + 1),
        "x" * (PIECE_BYTES - 1) + "é",
        "x" * (PIECE_BYTES - 1) + "\nx",
    ],
    ids=lambda text: f"{text[:4]!r}x{len(text)}",
)
def test_pieces_are_bounded_and_make_up_the_document(tmp_path, kind, text):
    source = write_source(tmp_path, kind, text)
    pieces = list(source.pieces(source.start()))
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text.encode()) <= PIECE_BYTES for piece in pieces)
    assert [piece.begins_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for number, piece in enumerate(pieces):
        assert list(source.pieces(piece.start)) == pieces[number:]
        assert list(source.pieces(piece.end)) == pieces[number + 1 :]


def test_a_piece_is_cut_where_the_tokens_do_not_change(tokenizer):
    data = LONG.encode()
    start, tokens = 0, []
    while start < len(data):
        end = cut(data, start)
        if end < len(data):
            assert data[end - 1 : end] == b"\n"
            assert data[end - 2 : end - 1] != b"\n"
        tokens += tokenizer.encode(data[start:end].decode())
        start = end
    assert tokens == tokenizer.encode(LONG)


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("one two\nthree\n\n  \n" * 10_000, "two\n", "three"),
        ("one\n\n" * 20_000, "\n", ""),
        ("one two  three   " * 10_000, "one", " two"),
    ],
)
def test_a_piece_is_not_cut_between_two_spaces_if_it_can_be_helped(text, before, after):
    end = cut(text.encode())
    assert PIECE_BYTES - 20 < end <= PIECE_BYTES
    assert text[:end].endswith(before)
    assert text[end:].startswith(after)


@pytest.mark.parametrize("name", SOURCES)
def test_reading_starts_at_any_piece(corpora, name):
    source = open_source(name.removesuffix(".gz"), corpora[name])
    pieces = list(source.pieces(source.start()))
    assert len(pieces) == len(DOCUMENTS) + 3  # LONG has three pieces and LONG_UNICODE two
    for number, piece in enumerate(pieces):
        assert list(source.pieces(piece.start)) == pieces[number:]
        assert list(source.pieces(piece.end)) == pieces[number + 1 :]


def test_a_large_file_is_not_read_whole(tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "wb") as stream:
        stream.truncate(1 << 40)  # sparse: zeros, which are valid text, where any reader of the whole would give up
    source = TextFolder(path)
    pieces = source.pieces({"file": 0, "offset": 1 << 39})
    assert next(pieces).end == {"file": 0, "offset": (1 << 39) + PIECE_BYTES}


# --- bad data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"text": "cut off', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["text"]', "a JSON list, not an object"),
        (b'{"body": "x", "id": 3}', "no field 'text'; it has 'body', 'id'"),
        (b"{}", "no field 'text'; it has no field"),
        (b'{"text": 7}', "'text' is of type int, not a string"),
        (b'{"text": null}', "of type NoneType"),
        (b'{"text": "caf\xe9"}', "0xe9 at column 14 is not UTF-8"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_bad_json_line_is_named(tmp_path, bad, message, suffix):
    path = tmp_path / f"a.{suffix}"
    data = b'{"text": "good"}\n\n' + bad + b'\n{"text": "good"}\n'
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    pieces = JsonLines(path).pieces({"file": 0, "offset": 0, "line": 0, "byte": 0})
    assert next(pieces).text == "good"
    with pytest.raises(DataError, match=message) as caught:
        next(pieces)
    assert caught.value.place == f"{path}:3"
    assert caught.value.fix
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize("lines", [1, 40_000])
def test_text_that_is_not_utf8_is_named_by_line(tmp_path, suffix, lines):
    path = tmp_path / f"a.{suffix}"
    data = b"good line\n" * (lines - 1) + b"caf\xe9\n" + b"good line\n" * 10_000
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        list(TextFolder(path).pieces({"file": 0, "offset": 0}))
    assert caught.value.place == f"{path}:{lines}"


def test_text_that_ends_inside_a_character_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes("語".encode()[:2])
    with pytest.raises(DataError, match="not UTF-8"):
        list(TextFolder(tmp_path).pieces({"file": 0, "offset": 0}))


@pytest.mark.parametrize("suffix", ["txt.gz", "jsonl.gz"])
def test_a_damaged_gzip_file_is_named(tmp_path, suffix):
    packed = bytearray(gzip.compress(os.urandom(200_000).hex().encode()))
    cases = {"short": packed[:-1000], "flipped": packed[:1000] + b"\0" * 50 + packed[1050:], "plain": b"some text"}
    for name, data in cases.items():
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(data)
        source = open_source(suffix.removesuffix(".gz").replace("txt", "text"), path)
        with pytest.raises(DataError, match="cannot be read") as caught:
            list(source.pieces(source.start()))
        assert caught.value.place == str(path)


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"

    def read(**options):
        source = ParquetFiles(path, **options)
        return list(source.pieces(source.start()))

    path.write_bytes(b"this is not Parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read()
    pq.write_table(pa.table({"text": ["a", "b", None], "n": [1, 2, 3]}), path, row_group_size=2)
    with pytest.raises(DataError, match="of type NoneType") as caught:
        read()
    assert caught.value.place == f"{path}: row 3"
    with pytest.raises(DataError, match="of type NoneType") as caught:
        next(ParquetFiles(path).pieces({"file": 0, "row_group": 1, "row": 0, "byte": 0}))
    assert caught.value.place == f"{path}: row 3"
    with pytest.raises(DataError, match="no column 'body'; it has 'text', 'n'"):
        read(text_field="body")
    with pytest.raises(DataError, match="of type int64, not string"):
        read(text_field="n")
    broken = pa.StringArray.from_buffers(
        4, pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 2, 3, 4))), pa.py_buffer(b"ab\xe9c")
    )
    pq.write_table(pa.table({"text": broken}), path, row_group_size=2)
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read()
    assert caught.value.place == f"{path}: row 3"


def test_missing_pyarrow_is_said(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="needs the package pyarrow"):
        open_source("parquet", tmp_path)


def test_a_bad_record_does_not_move_the_stream_or_end_the_epoch(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "In the beginning God created"}\n{"text": 5}\n{"text": "the earth"}\n')
    stream = stream_of("jsonl", path, 2)
    first = tokenizer.encode("In the beginning God created")
    assert stream.next_sample().tolist() == first[:3]
    state = stream.state()
    for _ in range(3):
        with pytest.raises(DataError, match="type int") as caught:
            stream.take(10)
        assert caught.value.place == f"{path}:2"
    assert stream.state() == state
    assert stream.next_sample().tolist() == first[2:5]
    # Skipping stops at the last sample before the bad record; its last token is the first one of the next sample.
    whole = len(first) // 2
    assert whole > 2
    for _ in range(3):
        with pytest.raises(DataError, match="type int"):
            stream.skip(10)
        assert stream.samples == whole


def test_data_without_text_is_an_error_and_no_endless_loop(tmp_path):
    cases = {
        "text": {"a.txt.gz": gzip.compress(b"")},
        "jsonl": {"a.jsonl": b'\n  \n{"text": ""}\n', "b.jsonl": b"\n"},
    }
    for kind, files in cases.items():
        folder = tmp_path / kind
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        stream = stream_of(kind, folder, 4)
        for read in (stream.next_sample, lambda stream=stream: list(stream.epoch_tokens())):
            with pytest.raises(DataError, match="no text"):
                read()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no text"):
        stream_of("parquet", tmp_path / "a.parquet", 4).next_sample()
    path = tmp_path / "vanishing.jsonl"
    path.write_text('{"text": "In the beginning"}\n')
    stream = stream_of("jsonl", path, 4)
    stream.skip(10)
    path.write_text("\n")
    with pytest.raises(DataError, match="no text"):
        stream.skip(10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(DataError, match="no text"):
        TextFolder(tmp_path / "empty")


def test_a_wrong_path_or_kind_is_said(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        TextFolder(tmp_path / "nowhere")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / ".hidden.txt").write_text("left by a tool")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "a.txt").write_text("left by a tool")
    with pytest.raises(DataError, match=r"no file that ends in \.txt or \.txt\.gz"):
        TextFolder(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        TextFolder(tmp_path)
    with pytest.raises(DataError, match="no data source 'csv'") as caught:
        open_source("csv", tmp_path)
    assert "'parquet'" in caught.value.fix
    with pytest.raises(DataError, match="not a name"):
        JsonLines(tmp_path, text_field="")
    for seq_len in (0, -1, 2.0, True):
        with pytest.raises(DataError, match="not a positive integer"):
            stream_of("text", SAMPLE, seq_len)


# --- batches -------------------------------------------------------------------------------------------------------

SEQ_LEN = 128
GLOBAL_BATCH = 8


def make_loader(corpora, *, rank=0, dp=1, local=GLOBAL_BATCH, prefetch=0, name="jsonl") -> DataLoader:
    return DataLoader(
        make_stream(corpora, name, SEQ_LEN),
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_degree=dp,
        local_batch_size=local,
        prefetch=prefetch,
    )


def global_batch(loaders: list[DataLoader]) -> tuple[torch.Tensor, torch.Tensor]:
    """The next batch of all ranks in the order of ranks and microbatches."""
    parts = [microbatch for loader in loaders for microbatch in loader.next_batch()]
    return torch.cat([part.tokens for part in parts]), torch.cat([part.labels for part in parts])


def expected_batch(epoch: list[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    rows = torch.tensor([window(epoch, sample, SEQ_LEN) for sample in samples])
    return rows[:, :-1], rows[:, 1:]


def assert_batch(actual, expected) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_any_parallelism_sees_the_same_global_batches(corpora, epoch, dp, prefetch):
    for local in (1, 2, GLOBAL_BATCH // dp):
        loaders = [make_loader(corpora, rank=rank, dp=dp, local=local, prefetch=prefetch) for rank in range(dp)]
        for step in range(6):
            assert_batch(global_batch(loaders), expected_batch(epoch, step))
        assert all(loader.state_dict() == loaders[0].state_dict() for loader in loaders)
        for loader in loaders:
            loader.close()


def test_the_shape_of_a_batch(corpora):
    loader = make_loader(corpora, rank=1, dp=2, local=2)
    assert loader.accumulation_steps == 2
    batch = next(iter(loader))
    assert len(batch) == 2
    for tokens, labels in batch:
        assert tokens.shape == labels.shape == (2, SEQ_LEN)
        assert tokens.dtype == labels.dtype == torch.int64
        assert tokens.is_contiguous()
        assert labels.is_contiguous()
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        labels.fill_(-100)
        assert (tokens >= 0).all()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_under_another_parallelism(corpora, epoch, prefetch):
    step, state = 0, None
    for dp, local in ((1, 4), (4, 1), (2, 4), (8, 1), (1, 1)):
        loaders = [make_loader(corpora, rank=rank, dp=dp, local=local, prefetch=prefetch) for rank in range(dp)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            assert loader.step == step
        for _ in range(7):
            assert_batch(global_batch(loaders), expected_batch(epoch, step))
            step += 1
        state = through_json(loaders[-1].state_dict())
        for loader in loaders:
            loader.close()


def test_the_state_is_of_what_was_consumed_not_of_what_was_read_ahead(corpora, epoch):
    with make_loader(corpora, prefetch=3) as ahead:
        plain = make_loader(corpora)
        assert ahead.state_dict() == plain.state_dict()
        for step in range(5):
            assert_batch(global_batch([ahead]), expected_batch(epoch, step))
            plain.next_batch()
            wait_until(lambda step=step: ahead._reader.stream.samples >= (step + 4) * GLOBAL_BATCH)
            assert ahead.state_dict() == plain.state_dict()
        state = ahead.state_dict()
        assert state["step"] == 5
        assert state["stream"]["samples"] == 5 * GLOBAL_BATCH
        # Going on, going back, and going on from there, with batches read ahead at each turn.
        assert_batch(global_batch([ahead]), expected_batch(epoch, 5))
        ahead.load_state_dict(state)
        for step in (5, 6):
            assert_batch(global_batch([ahead]), expected_batch(epoch, step))


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the background thread does not get there"
        time.sleep(0.001)


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "titan-data-prefetch"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_record_reaches_the_consumer_at_its_step(tmp_path, tokenizer, prefetch):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{"In the beginning " * 100}"}}\n{{"text": 5}}\n')
    tokens = len(tokenizer.encode("In the beginning " * 100)) + 1
    stream = stream_of("jsonl", path, 8)
    steps = (tokens - 1) // 8 // 4
    assert steps > 5
    sizes = {"global_batch_size": 4, "dp_rank": 0, "dp_degree": 2, "local_batch_size": 1}
    with DataLoader(stream, **sizes, prefetch=prefetch) as loader:
        for _ in range(steps):
            loader.next_batch()
        state = loader.state_dict()
        for _ in range(2):
            with pytest.raises(DataError, match="type int") as caught:
                loader.next_batch()
            assert caught.value.place == f"{path}:2"
        assert loader.state_dict() == state
        assert loader.step == steps
        loader.load_state_dict({**state, "stream": stream_of("jsonl", path, 8).state()})
        assert loader.step == 0
        assert loader.next_batch()[0].tokens.tolist() == [tokenizer.encode("In the beginning " * 100)[:8]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_inside_a_batch_no_batch_is_made_of_two_steps(corpora, epoch, prefetch, monkeypatch):
    with make_loader(corpora, rank=1, dp=2, local=4, prefetch=prefetch, name="text") as loader:
        loader.next_batch()
        state = loader.state_dict()

        # One failure, after this rank's samples of a step and before those of the next step.
        skip, calls = loader._reader.stream.skip, []

        def skip_or_fail(count: int) -> None:
            calls.append(count)
            if len(calls) == 10:
                raise OSError("the file system is away for a moment")
            skip(count)

        monkeypatch.setattr(loader._reader.stream, "skip", skip_or_fail)
        with pytest.raises(OSError, match="away for a moment"):
            list(itertools.islice(loader, 20))
        step = loader.step
        assert step > 2
        with pytest.raises(OSError, match="away for a moment"):
            loader.next_batch()
        assert loader.state_dict()["step"] == step
        loader.load_state_dict(loader.state_dict())
        assert torch.equal(loader.next_batch()[0].tokens, expected_batch(epoch, step)[0][4:])
        loader.load_state_dict(state)
        assert torch.equal(loader.next_batch()[0].tokens, expected_batch(epoch, 1)[0][4:])


def test_the_thread_ends_with_the_loader(corpora):
    assert not data_threads()
    with make_loader(corpora, prefetch=2) as loader:
        assert not data_threads()
        loader.next_batch()
        assert len(data_threads()) == 1
        loader.load_state_dict(loader.state_dict())
        assert not data_threads()
        loader.next_batch()
        wait_until(lambda: loader._reader.stream.samples >= 3 * GLOBAL_BATCH)  # it now waits for room
    assert not data_threads()
    loader.close()
    assert loader.state_dict()["step"] == 2
    with pytest.raises(DataError, match="closed"):
        loader.next_batch()

    forgotten = make_loader(corpora, prefetch=1)
    forgotten.next_batch()
    assert len(data_threads()) == 1
    del forgotten
    gc.collect()
    assert not data_threads()


def test_a_program_that_forgets_to_close_ends():
    program = (
        "from titan_runtime.data import *\n"
        f"s = open_stream('text', {str(SAMPLE)!r}, {str(TOKENIZER)!r}, 64)\n"
        "l = DataLoader(s, global_batch_size=4, dp_rank=0, dp_degree=1, local_batch_size=4)\n"
        "l.next_batch(); print('done')\n"
    )
    done = run_python("-c", program, timeout=60)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def run_python(*arguments: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=env)


def test_waiting_is_measured(corpora):
    for prefetch in (0, 1):
        with make_loader(corpora, prefetch=prefetch) as loader:
            assert loader.wait_s == 0
            read = loader._reader.read
            loader._reader.read = lambda read=read: (time.sleep(0.1), read())[1]
            loader.next_batch()
            assert 0.1 <= loader.wait_s < 5
            if prefetch:
                wait_until(lambda loader=loader: loader._prefetcher._ready.full())
                before = loader.wait_s
                loader.next_batch()
                assert loader.wait_s - before < 0.08


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 6}, "does not split into 2 ranks with microbatches of 2"),
        ({"dp_rank": 2}, "dp_rank 2 is none of 2 ranks"),
        ({"dp_rank": -1}, "dp_rank is -1"),
        ({"dp_degree": 0}, "dp_degree is 0"),
        ({"local_batch_size": 0}, "local_batch_size is 0"),
        ({"global_batch_size": 8.0}, "global_batch_size is 8.0"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(corpora, change, message):
    sizes = {"global_batch_size": 8, "dp_rank": 0, "dp_degree": 2, "local_batch_size": 2}
    with pytest.raises(DataError, match=message):
        DataLoader(make_stream(corpora, "text", 8), **{**sizes, **change})


def test_a_loader_starts_and_resumes_at_step_boundaries_only(corpora, epoch):
    sizes = {"dp_rank": 0, "dp_degree": 1, "local_batch_size": 1, "prefetch": 0}
    stream = make_stream(corpora, "jsonl", SEQ_LEN)
    stream.skip(GLOBAL_BATCH)
    assert_batch(global_batch([DataLoader(stream, global_batch_size=8, **sizes)]), expected_batch(epoch, 1))
    with pytest.raises(DataError, match="inside a global batch of 12"):
        DataLoader(stream, global_batch_size=12, **sizes)

    with make_loader(corpora, prefetch=2) as loader:
        loader.next_batch()
        state = loader.state_dict()
        other = DataLoader(make_stream(corpora, "jsonl", SEQ_LEN), global_batch_size=4, **sizes)
        with pytest.raises(DataError, match="global batch of 8 samples and the loader has one of 4"):
            other.load_state_dict(state)
        inside = {**state, "stream": {**state["stream"], "samples": 9}}
        elsewhere = {**state, "stream": make_stream(corpora, "text", SEQ_LEN).state()}
        for step, bad in enumerate((elsewhere, inside, {**state, "stream": {}}, {**state, "format": 0}, {}), start=1):
            state = loader.state_dict()
            with pytest.raises(DataError):
                loader.load_state_dict(bad)
            assert loader.state_dict() == state
            assert_batch(global_batch([loader]), expected_batch(epoch, step))


def test_pytorch_is_imported_for_the_loader_only():
    program = (
        "import sys, titan_runtime.data as data\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules\n"
        "assert data.IGNORE_INDEX == -100 and 'torch' in sys.modules\n"
        "assert all(hasattr(data, name) for name in data.__all__) and not hasattr(data, 'nothing')\n"
    )
    assert run_python("-c", program).returncode == 0


# --- entropy -------------------------------------------------------------------------------------------------------


def test_entropy_of_known_distributions(corpora, epoch):
    assert unigram_entropy_nats([0, 1, 2, 3] * 5, 4) == pytest.approx(math.log(4))
    assert unigram_entropy_nats([3] * 10, 4) == 0
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unigram_entropy_nats(iter([0, 1, 1, 1]), 2) == pytest.approx(expected)
    assert unigram_entropy_nats(torch.tensor([0, 1, 1, 1]), 2) == pytest.approx(expected)
    stream = make_stream(corpora, "text", 16)
    assert unigram_entropy_nats(stream, 2048) == pytest.approx(unigram_entropy_nats(epoch, 2048), abs=0)
    with pytest.raises(DataError, match="Token 4 is outside the vocabulary of 4"):
        unigram_entropy_nats([1, 4], 4)
    with pytest.raises(DataError, match="Token -100 is outside"):
        unigram_entropy_nats([1, -100], 4)
    with pytest.raises(DataError, match="no tokens"):
        unigram_entropy_nats([], 4)


# --- tokenizer -----------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_the_debug_model(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, BOS, EOS)
    assert tokenizer.token_id("<|pad|>") == 2
    for text in ("In the beginning", "\r\n\t\0 caf\u0301 \u8a9e\U0001f642", "", " ", LONG[:5000]):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_a_document_cannot_contain_special_tokens(tokenizer):
    text = "a<|end_of_text|>b<|begin_of_text|>"
    ids = tokenizer.encode(text)
    assert EOS not in ids
    assert BOS not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([EOS, *tokenizer.encode("x")]) == "<|end_of_text|>x"
    assert tokenizer.decode([EOS, *tokenizer.encode("x")], skip_special_tokens=True) == "x"


def test_training_the_tokenizer_again_gives_the_same_bytes(tmp_path):
    # Whatever the number of threads and the seed of Python's hashes.
    for number, seed in (("1", "1"), ("3", "2")):
        out = tmp_path / f"{number}.json"
        script = str(ROOT / "scripts" / "make_tokenizer.py")
        done = run_python(script, "--out", str(out), RAYON_NUM_THREADS=number, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
        assert out.read_bytes() == TOKENIZER.read_bytes()


def test_too_little_text_for_the_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="of 2048 entries"):
        load_script("make_tokenizer").train_tokenizer(["a few words"])


def make_tokenizer(folder: Path, *special: str, config: object = None, **settings) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    record = json.loads(backend.to_str())
    for old, new in zip(("<|begin_of_text|>", "<|end_of_text|>"), special, strict=True):
        record["model"]["vocab"][new] = record["model"]["vocab"].pop(old)
        record["added_tokens"] = [
            {**token, "content": new if token["content"] == old else token["content"]}
            for token in record["added_tokens"]
        ]
    (folder / "tokenizer.json").write_text(json.dumps({**record, **settings}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_ends_of_a_text_are_found_by_their_names(tmp_path):
    found = load_tokenizer(make_tokenizer(tmp_path, "<s>", "</s>"))
    assert (found.bos_id, found.eos_id) == (BOS, EOS)
    found = load_tokenizer(make_tokenizer(tmp_path, "<|nothing|>", "<|endoftext|>"))
    assert (found.bos_id, found.eos_id) == (None, EOS)
    found = load_tokenizer(
        make_tokenizer(tmp_path, "<|a|>", "<|b|>", config={"eos_token": {"content": "<|b|>"}, "bos_token": "<|a|>"})
    )
    assert (found.bos_id, found.eos_id) == (BOS, EOS)
    # A chat model's end of a turn is not the end of a text.
    found = load_tokenizer(make_tokenizer(tmp_path, "<|turn|>", "<|end_of_text|>", config={"eos_token": "<|turn|>"}))
    assert found.eos_id == EOS
    with pytest.raises(DataError, match="no token that ends a text") as caught:
        load_tokenizer(make_tokenizer(tmp_path, "<|a|>", "<|b|>", config={"eos_token": None}))
    assert caught.value.place == str(tmp_path / "tokenizer.json")


def test_a_tokenizers_truncation_and_padding_are_not_about_training_text(tmp_path, tokenizer):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 4096},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    names = ("<|begin_of_text|>", "<|end_of_text|>")
    found = load_tokenizer(make_tokenizer(tmp_path, *names, truncation=truncation, padding=padding))
    assert found.encode(LONG[:2000]) == tokenizer.encode(LONG[:2000])


def test_a_file_that_is_no_tokenizer_is_said(tmp_path):
    with pytest.raises(DataError, match="no tokenizer file here"):
        load_tokenizer(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert "convert its tokenizer.model" in caught.value.fix
    for content in ("{}", "not JSON", '{"model": {"type": "BPE"}}', ""):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match="not a tokenizer"):
            load_tokenizer(tmp_path)
    make_tokenizer(tmp_path, "<s>", "</s>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        load_tokenizer(tmp_path)


# --- the sample ----------------------------------------------------------------------------------------------------


def test_the_sample_is_clean_text():
    files = sorted(SAMPLE.iterdir())
    assert len(files) == 66
    assert (files[0].name, files[-1].name) == ("01-genesis.txt", "66-revelation.txt")
    for file in files:
        data = file.read_bytes()
        assert data.isascii()
        assert data.endswith(b"\n")
        assert not data.endswith(b"\n\n")
        assert not re.search(rb"[ \t\r]\n|  |\r|\t|\n\n\n", data)


def test_the_sample_is_what_its_script_makes():
    script = load_script("make_sample")
    printed = []
    for short, file in zip(script.BOOKS, sorted(SAMPLE.iterdir()), strict=True):
        title, *lines = file.read_text(encoding="utf-8").splitlines()
        assert title == script.BOOKS[short]
        chapter = verse = 0
        for line in filter(None, lines):
            if heading := re.fullmatch(r"(?:Chapter|Psalm) (\d+)", line):
                chapter, verse = int(heading[1]), 0
            else:
                verse += 1
                printed.append(f"{short}{chapter}:{verse} {line} ")
    assert script.format_books("\n".join(printed)) == {
        file.name: file.read_text(encoding="utf-8") for file in SAMPLE.iterdir()
    }
    for broken in (printed[1:], printed[:-1], printed[:50] + printed[51:], [*printed[:5], "no verse", *printed[5:]]):
        with pytest.raises(script.SampleError):
            script.format_books("\n".join(broken))


def test_the_readme_states_the_measured_facts(capsys):
    load_script("sample_facts").main()
    facts = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert len(facts) == 8
    for name, value in facts.items():
        assert f"| {name} | {value} |" in readme
