"""Regenerate ``data/sample``: the King James Bible, one text file per book.

The text comes from the Debian packages ``bible-kjv`` and ``bible-kjv-text``, whose ``bible`` command prints every
verse as ``Ge1:1 In the beginning ...``. Two ways to run it, both giving the same bytes::

    apt-get install bible-kjv bible-kjv-text
    python scripts/make_sample.py                                          # runs `bible` itself
    bible -f "Gen1:1-Rev22:21" | python scripts/make_sample.py --stdin     # or reads what it printed

Each book starts with its name, each chapter with ``Chapter N`` (``Psalm N`` in the Psalms), then one verse a line
without its reference, so that the files read as plain English text. The script checks that the books, chapters and
verses are complete and in order before it writes anything.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

WHOLE_TEXT = "Gen1:1-Rev22:21"
EXPECTED_VERSES = 31_102
OUTPUT_FOLDER = Path(__file__).resolve().parent.parent / "data" / "sample"

# The abbreviation `bible` prints -> the book's name, in the order of the canon.
BOOKS = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Lev": "Leviticus",
    "Num": "Numbers",
    "Deu": "Deuteronomy",
    "Josh": "Joshua",
    "Jdgs": "Judges",
    "Ruth": "Ruth",
    "1Sm": "1 Samuel",
    "2Sm": "2 Samuel",
    "1Ki": "1 Kings",
    "2Ki": "2 Kings",
    "1Chr": "1 Chronicles",
    "2Chr": "2 Chronicles",
    "Ezra": "Ezra",
    "Neh": "Nehemiah",
    "Est": "Esther",
    "Job": "Job",
    "Psa": "Psalms",
    "Prv": "Proverbs",
    "Eccl": "Ecclesiastes",
    "SSol": "Song of Solomon",
    "Isa": "Isaiah",
    "Jer": "Jeremiah",
    "Lam": "Lamentations",
    "Eze": "Ezekiel",
    "Dan": "Daniel",
    "Hos": "Hosea",
    "Joel": "Joel",
    "Amos": "Amos",
    "Obad": "Obadiah",
    "Jonah": "Jonah",
    "Mic": "Micah",
    "Nahum": "Nahum",
    "Hab": "Habakkuk",
    "Zep": "Zephaniah",
    "Hag": "Haggai",
    "Zec": "Zechariah",
    "Mal": "Malachi",
    "Mat": "Matthew",
    "Mark": "Mark",
    "Luke": "Luke",
    "John": "John",
    "Acts": "Acts",
    "Rom": "Romans",
    "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians",
    "Gal": "Galatians",
    "Eph": "Ephesians",
    "Phi": "Philippians",
    "Col": "Colossians",
    "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy",
    "2Tim": "2 Timothy",
    "Titus": "Titus",
    "Phmn": "Philemon",
    "Heb": "Hebrews",
    "Jas": "James",
    "1Pet": "1 Peter",
    "2Pet": "2 Peter",
    "1Jn": "1 John",
    "2Jn": "2 John",
    "3Jn": "3 John",
    "Jude": "Jude",
    "Rev": "Revelation",
}

VERSE = re.compile(r"(?P<book>[1-3]?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) +(?P<text>\S.*)")


class SampleError(Exception):
    """The printed text is not the complete text in the expected form."""


def run_bible() -> str:
    """Return what the ``bible`` command prints for the whole text, one verse a line."""
    try:
        done = subprocess.run(["bible", "-f", WHOLE_TEXT], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except FileNotFoundError:
        raise SampleError(
            "The `bible` command is not installed; install the Debian packages bible-kjv and bible-kjv-text, "
            "or pipe their output in with --stdin."
        ) from None
    except subprocess.CalledProcessError as error:
        raise SampleError(f"`bible -f {WHOLE_TEXT}` failed with exit status {error.returncode}.") from error
    return done.stdout.decode("utf-8")


def format_books(printed: str) -> dict[str, str]:
    """Turn the printed verses into ``{file name: text}``.

    Raises :class:`SampleError` when a line is no verse, or a book, chapter or verse is missing or out of order.
    """
    lines_by_book: dict[str, list[str]] = {}
    last: tuple[str, int, int] | None = None
    verses = 0
    for number, line in enumerate(printed.splitlines(), start=1):
        match = VERSE.fullmatch(line.rstrip())
        if match is None or match["book"] not in BOOKS:
            raise SampleError(f"Line {number} of the printed text is not a verse of a known book: {line[:60]!r}.")
        book, chapter, verse = match["book"], int(match["chapter"]), int(match["verse"])
        if last is not None and book == last[0]:
            in_order = (chapter, verse) in {(last[1], last[2] + 1), (last[1] + 1, 1)}
        else:
            in_order = book not in lines_by_book and (chapter, verse) == (1, 1)
        if not in_order:
            raise SampleError(f"Line {number} of the printed text, {book}{chapter}:{verse}, does not follow {last}.")

        lines = lines_by_book.setdefault(book, [BOOKS[book]])
        if verse == 1:
            heading = "Psalm" if book == "Psa" else "Chapter"
            lines += ["", f"{heading} {chapter}", ""]
        lines.append(" ".join(match["text"].split()))
        last = (book, chapter, verse)
        verses += 1

    if list(lines_by_book) != list(BOOKS) or verses != EXPECTED_VERSES:
        raise SampleError(
            f"The printed text has {len(lines_by_book)} books and {verses} verses; "
            f"the whole text has {len(BOOKS)} books and {EXPECTED_VERSES} verses."
        )
    return {
        f"{index:02d}-{BOOKS[book].lower().replace(' ', '-')}.txt": "\n".join(lines) + "\n"
        for index, (book, lines) in enumerate(lines_by_book.items(), start=1)
    }


def write_books(books: dict[str, str], folder: Path) -> None:
    """Write the books into ``folder`` and remove text files of an earlier run that are no longer made."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.txt"):
        if stale.name not in books:
            stale.unlink()
    for name, text in books.items():
        (folder / name).write_bytes(text.encode("utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate data/sample from the Debian King James text.")
    parser.add_argument("--stdin", action="store_true", help="read the printed verses instead of running `bible`")
    parser.add_argument("--out", type=Path, default=OUTPUT_FOLDER, help="folder to write (default: data/sample)")
    options = parser.parse_args()
    try:
        books = format_books(sys.stdin.buffer.read().decode("utf-8") if options.stdin else run_bible())
    except SampleError as error:
        print(f"make_sample: {error}", file=sys.stderr)
        return 1
    write_books(books, options.out)
    size = sum(len(text.encode("utf-8")) for text in books.values())
    lines = sum(text.count("\n") for text in books.values())
    print(f"{options.out}: {len(books)} files, {size} bytes, {lines} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
