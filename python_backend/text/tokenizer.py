"""The engine's tokenizer.json: text to ids, and the bytes that each id stands for.

V4.1's tokenizer is byte-level BPE: every token is a run of bytes, and a character may be cut
between tokens. So text is made from bytes, never from the text of single tokens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engine.chat_sections import ChatSections
from engine.directory import TOKENIZER_CONFIG_NAME
from python_backend.text import chat
from python_backend.text.detokenizer import Detokenizer

Int32Array = npt.NDArray[np.int32]

# Batches are of one text here, and the library complains of processes that fork beside its threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerError(ValueError):
    """A tokenizer file that cannot be used; the message says what to change."""


class TextTokenizer:
    """Reads once, then may be used from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        bos_id: int | None = None,
        sections: ChatSections = chat.OWN_SECTIONS,
    ) -> None:
        """`bos_id` starts every encoded text, None adds nothing. `sections` are what conversations
        for this tokenizer's model are rendered with."""
        self.sections = sections
        self._tokenizer = tokenizer
        self._token_bytes = _token_bytes(tokenizer, vocab_size)
        self._bos_id = bos_id

    @staticmethod
    def from_file(path: Path, vocab_size: int, bos_token_id: int) -> TextTokenizer:
        """Reads tokenizer.json, and from tokenizer_config.json beside it whether texts start with
        the begin token (`add_bos_token`; no file: they do not), and chat_sections.json.

        Raises TokenizerError for a file that is not a byte-level tokenizer of this model,
        ConfigError for chat_sections.json.
        """
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(
                f"expected a tokenizer at {path}, but {error}; restore the file"
            ) from None
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kind = None if decoder is None else decoder["type"]
        if kind != "ByteLevel":
            raise TokenizerError(
                f"expected a byte-level tokenizer (decoder ByteLevel) at {path}, got decoder "
                f"{kind}; use the tokenizer.json that was released with the model"
            )
        size = tokenizer.get_vocab_size()
        if size > vocab_size:
            raise TokenizerError(
                f"expected a tokenizer of at most {vocab_size} ids, the model's vocabulary, at "
                f"{path}, got {size}; use the tokenizer.json that was released with the model"
            )
        bos_id = bos_token_id if _adds_bos(path.with_name(TOKENIZER_CONFIG_NAME)) else None
        sections = ChatSections.read(path.parent) or chat.OWN_SECTIONS
        return TextTokenizer(tokenizer, vocab_size, bos_id, sections)

    def encode(self, text: str) -> Int32Array:
        """Ids of `text`, int32 [n]. Special strings in it become special tokens; a text that brings
        its own begin token does not get a second one."""
        ids = self._ids(text, special=True)
        if self._bos_id is not None and (not ids or ids[0] != self._bos_id):
            ids = [self._bos_id, *ids]
        return np.array(ids, dtype=np.int32)

    def encode_word(self, text: str) -> list[int]:
        """Ids of a piece of text as it stands inside another: no special tokens are added."""
        return self._ids(text)

    def encode_rendered(self, text: str) -> Int32Array:
        """Ids of a rendered chat, int32 [n]: it brings all its special strings itself.

        Raises TokenizerError where one of them is no token, so that none is read as plain text.
        """
        for special in chat.MARKERS:
            if self._tokenizer.token_to_id(special) is None:
                raise TokenizerError(
                    f"expected a tokenizer with the token {special} for messages, got one without; "
                    "send text_input or input_ids, or serve the released tokenizer.json"
                )
        return np.array(self._ids(text), dtype=np.int32)

    def _ids(self, text: str, *, special: bool = False) -> list[int]:
        """As a batch of one: alone the library would hold Python's lock, and with it every step of
        the core, for a second a megabyte."""
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def bytes_of(self, ids: Int32Array) -> list[bytes]:
        """What each id adds to the text, ids [n]; a character may be cut between two of them."""
        return [self._token_bytes[id] for id in ids.tolist()]

    def token_id(self, token: str) -> int | None:
        """The id of a token as it is spelled in tokenizer.json."""
        id: int | None = self._tokenizer.token_to_id(token)
        return id

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def detokenizer(self) -> Detokenizer:
        """A decoder for one request's output."""
        return Detokenizer(self._token_bytes)


def _adds_bos(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return bool(json.loads(path.read_text()).get("add_bos_token", False))
    except (ValueError, AttributeError):
        raise TokenizerError(
            f"expected a JSON object in {path}, got something else; restore the file"
        ) from None


def _token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """What each id adds to the text: nothing for special tokens and for ids without a token."""
    byte_of = _byte_alphabet()
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    table = [b""] * vocab_size
    for token, id in tokenizer.get_vocab(with_added_tokens=True).items():
        if id in special:
            continue
        try:
            table[id] = bytes(byte_of[character] for character in token)
        except KeyError:  # an added token such as ｜DSML｜ is spelled in plain characters
            table[id] = token.encode("utf-8")
    return table


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's printable alphabet):
    printable Latin-1 stands for itself, the other 68 bytes for U+0100 upwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
