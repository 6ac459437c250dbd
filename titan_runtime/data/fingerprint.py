"""Which data a state belongs to: a small record of the files, and what differs between two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from titan_runtime.data.files import DataFile

# Up to here the record lists each file, so that a difference can be named; a digest covers all files in any case.
LISTED_FILES = 128

_DESCRIPTIONS = {
    "kind": "the kind of source",
    "text_field": "the field that holds the text",
    "piece_bytes": "the size of a document's pieces",
    "tokenizer_sha256": "the tokenizer file",
    "bos_id": "the token put before each document",
    "eos_id": "the token put after each document",
    "file_count": "the number of files",
    "total_bytes": "the size of the files",
    "files_sha256": "the content of the files",
}


def fingerprint_files(files: Sequence[DataFile]) -> dict[str, Any]:
    """A JSON-able record of names, sizes in bytes and digests of ``files`` (of a bounded part of their content)."""
    rows = [(file.name, file.size, file.digest()) for file in files]
    digest = hashlib.sha256()
    for name, size, content in rows:
        digest.update(f"{len(name)}:{name}:{size}:{content}\n".encode())
    return {
        "file_count": len(rows),
        "total_bytes": sum(file.size for file in files),
        "files_sha256": digest.hexdigest(),
        # 16 hex digits are enough to tell which file differs; `files_sha256` holds the whole digests.
        "files": [[name, size, content[:16]] for name, size, content in rows] if len(rows) <= LISTED_FILES else None,
    }


def difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Say in words the first thing in which ``saved`` differs from ``current``; None when they are equal."""
    if saved == current:
        return None
    # Settings first: another tokenizer or source explains more than a file it does not read in the same way.
    for key in ("kind", "text_field", "piece_bytes", "tokenizer_sha256", "bos_id", "eos_id"):
        if saved.get(key) != current.get(key):
            return f"{_DESCRIPTIONS[key]} was {saved.get(key)!r} and is now {current.get(key)!r}"
    if saved.get("files") is not None and current.get("files") is not None:
        before = {name: (size, content) for name, size, content in saved["files"]}
        now = {name: (size, content) for name, size, content in current["files"]}
        for name in sorted(before.keys() | now.keys()):
            if name not in now:
                return f"file {name!r} is gone"
            if name not in before:
                return f"file {name!r} is new"
            if before[name][0] != now[name][0]:
                return f"file {name!r} had {before[name][0]} bytes and now has {now[name][0]}"
            if before[name] != now[name]:
                return f"the content of file {name!r} has changed"
    for key in ("file_count", "total_bytes", "files_sha256"):
        if saved.get(key) != current.get(key):
            return f"{_DESCRIPTIONS[key]} was {saved.get(key)!r} and is now {current.get(key)!r}"
    return "the state describes its data in a form that this version does not know"
