"""The tokenizer of TinyFlash: byte-level BPE of 4,096 entries with V4.1's special strings.

Ids 0, 1 and 2 are begin-of-sentence, end-of-sentence and padding, as released; the other special
strings are the last ids. Every digit is a token of its own: the pre-tokenizer splits digits one by
one, so no merge can join them. `System` doubles as the drafter's noise token, as released.

`Encoder` is the fast way to ids for generated text: it splits as the pre-tokenizer does and looks
whole pieces up. It gives exactly the ids of the tokenizer, which does the work on a miss.

    python -m examples.tinyflash.tokenizer        # train again and write tokenizer.json
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from python_backend.text import chat
from python_backend.text.chat import (
    ASSISTANT,
    BOS,
    DSML,
    EOS,
    SYSTEM,
    THINK_END,
    THINK_START,
    USER,
)

VOCAB_SIZE = 4096
PAD = "<｜▁pad▁｜>"

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

# Control strings are dropped when text is decoded; markup stays, because parsers read it.
_CONTROL = (
    *(USER, ASSISTANT, SYSTEM, "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>"),
    *("<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜deepseek_image｜>"),
)
_MARKUP = (THINK_START, THINK_END, DSML)
SPECIAL_STRINGS = (BOS, EOS, PAD, *_CONTROL, *_MARKUP)

TOKENIZER_FILE = Path(__file__).parent / "tokenizer.json"

# One digit; line breaks; a word or punctuation with the space before it; other spaces.
_PATTERN = r"\p{N}|[\r\n]+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PIECE = re.compile(r"[0-9]|[\r\n]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_STRINGS)) + ")")


class Encoder:
    """Text to ids by looking up whole pieces. Not shared between threads; forks copy it.

    The table grows by one entry per distinct piece, which is bounded for generated text; use the
    tokenizer itself for text from outside.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self._special: dict[str, int] = {text: vocabulary[text] for text in SPECIAL_STRINGS}
        self._pieces: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """The tokenizer's ids of `text`, special strings included; nothing is added."""
        ids: list[int] = []
        for part in _SPECIAL.split(text):
            if part in self._special:
                ids.append(self._special[part])
            elif part.isascii():
                self._extend(ids, part)
            else:
                ids.extend(self.tokenizer.encode(part, add_special_tokens=False).ids)
        return ids

    def _extend(self, ids: list[int], text: str) -> None:
        pieces = self._pieces
        for piece in _ASCII_PIECE.findall(text):
            known = pieces.get(piece)
            if known is None:
                known = tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids)
                pieces[piece] = known
            ids += known

    def decode(self, ids: Iterable[int], *, keep_special: bool = True) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=not keep_special)
        return text


@lru_cache(maxsize=1)
def encoder() -> Encoder:
    """The encoder of the committed tokenizer.json, one per process."""
    return Encoder(Tokenizer.from_file(str(TOKENIZER_FILE)))


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE entries. Equal texts give an equal tokenizer.

    Raises ValueError when the texts hold too few different words to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_CONTROL) - len(_MARKUP),
        min_frequency=2,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKUP])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"expected a vocabulary of {VOCAB_SIZE} entries, "
            f"got {tokenizer.get_vocab_size()}; give more varied text"
        )
    return tokenizer


def training_texts(seed: int = 0) -> Iterator[str]:
    """The text the vocabulary is learned from: the sentences the model will read and write.

    They are taken from the phrases, not from whole problems, so that a new template leaves the
    vocabulary as it is.
    """
    from examples.tinyflash import arithmetic, dialogue, retrieval, steps, tools

    rng = Random(f"tokenizer {seed}")
    worked = f"{steps.Line(2, '+', 3, 5)}\n{arithmetic.conclusion(5)}"
    worked += "".join(f" {op}" for op in "-*/")
    rendered = chat.render([dialogue.user("")], mode="thinking", tools=tools.TOOLS)
    rendered += "<tool_result>5</tool_result>"
    fixed = [worked, *(part for part in _SPECIAL.split(rendered) if part not in SPECIAL_STRINGS)]
    for value in dialogue.phrases().values():
        fixed += _strings(value)
    fixed += retrieval.attribute_names()  # bare, as the arguments of a call
    for _ in range(12):
        yield from arithmetic.sentences(rng)
    yield from retrieval.filler_sentences()
    for _ in range(12000):
        yield from retrieval.exchange(rng)
    yield from fixed * 200


def _strings(value: object) -> Iterator[str]:
    """All strings in nested lists and mappings, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _strings(member)
    elif isinstance(value, list):
        for member in value:
            yield from _strings(member)


def main() -> None:
    train(training_texts()).save(str(TOKENIZER_FILE))
    print(f"wrote {TOKENIZER_FILE} with {VOCAB_SIZE} entries")


if __name__ == "__main__":
    main()
