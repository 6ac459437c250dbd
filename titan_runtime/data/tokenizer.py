"""Text to token ids, by a ``tokenizer.json`` as Hugging Face models ship it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from titan_runtime.data.errors import DataError

TOKENIZER_FILE = "tokenizer.json"

# What models call the token that starts a text. A base model's name comes before a chat model's.
BOS_NAMES = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|startoftext|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "[BOS]",
)
# What models call the token that ends a text. A chat model's `tokenizer_config.json` names the end of a *turn*, so
# these names are looked for first.
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]")


class Tokenizer:
    """A tokenizer for pre-training text; :func:`load_tokenizer` makes one from a file.

    Text is only text: where a document contains the name of a special token, as in ``"<|end_of_text|>"``, it is
    encoded as ordinary characters, so that no document can end another one. Truncation and padding settings of the
    file are ignored for the same reason: they are about one model's prompts, not about training text.

    Attributes:
        vocab_size: the largest token id plus one, added tokens included: the least height of an embedding table.
        bos_id: id of the token that starts a text; None where the vocabulary has none.
        eos_id: id of the token that ends a text.
        sha256: hex digest of the tokenizer file.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, sha256: str, eos_name: str | None = None, bos_name: str | None = None
    ) -> None:
        """Wrap ``backend``; ``eos_name`` and ``bos_name`` are used where none of the common names is present.

        Raises :class:`DataError` when the vocabulary has no token that ends a text.
        """
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.sha256 = sha256
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(
                "The tokenizer has an empty vocabulary.",
                rule="tokenizer",
                fix="use the tokenizer.json of a trained tokenizer",
            )
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.bos_id: int | None = _find(vocabulary, BOS_NAMES, bos_name)
        eos_id = _find(vocabulary, EOS_NAMES, eos_name)
        if eos_id is None:
            raise DataError(
                f"The tokenizer has no token that ends a text (looked for {', '.join(EOS_NAMES)}).",
                rule="end-of-text",
                fix="add one of these as a special token, or name it as eos_token in tokenizer_config.json beside it",
            )
        self.eos_id: int = eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without bos and eos."""
        # A batch of one: `encode` would also compute each token's place in the text, and would hold Python's lock,
        # so that a background thread could not tokenise while the trainer runs.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``ids``; special tokens are written out by name unless ``skip_special_tokens``."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, name: str) -> int | None:
        """Id of the token called ``name``, None where the vocabulary has none."""
        return self._backend.token_to_id(name)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a ``tokenizer.json``, or the one in a folder of Hugging Face assets.

    The names of bos and eos come from the vocabulary; where it has none of the common names, from the
    ``tokenizer_config.json`` in the same folder, if there is one.

    Raises :class:`DataError` when there is no such file, it is no tokenizer, or no token ends a text.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(*_missing(path), place=str(path), rule="tokenizer", fix=_missing_fix(path))
    content = file.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception (and ValueError), with no narrower class to catch
        raise DataError(
            f"This file is not a tokenizer of the `tokenizers` library: {error}.",
            place=str(file),
            rule="tokenizer",
            fix="give a tokenizer.json as saved by `tokenizers` or `transformers`",
        ) from error
    config = _read_config(file.parent / "tokenizer_config.json")
    try:
        return Tokenizer(
            backend,
            sha256=hashlib.sha256(content).hexdigest(),
            eos_name=_token_name(config.get("eos_token")),
            bos_name=_token_name(config.get("bos_token")),
        )
    except DataError as error:
        raise DataError(error.message, place=str(file), rule=error.rule, fix=error.fix) from None


def _find(vocabulary: dict[str, int], names: Iterable[str], fallback: str | None) -> int | None:
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    return None if fallback is None else vocabulary.get(fallback)


def _missing(path: Path) -> tuple[str]:
    if path.is_dir():
        return (f"This folder has no {TOKENIZER_FILE}.",)
    return ("There is no tokenizer file here.",)


def _missing_fix(path: Path) -> str:
    if (path / "tokenizer.model").is_file():
        return "convert its tokenizer.model with `transformers` (AutoTokenizer.from_pretrained(...).save_pretrained)"
    return f"give the path of a {TOKENIZER_FILE}, or of a folder of Hugging Face assets that holds one"


def _read_config(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"This file is not valid JSON: {error}.", place=str(file), rule="tokenizer", fix="repair or remove it"
        ) from error
    return config if isinstance(config, dict) else {}


def _token_name(value: object) -> str | None:
    """A token in ``tokenizer_config.json`` is a name, or a record whose ``content`` is the name."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
