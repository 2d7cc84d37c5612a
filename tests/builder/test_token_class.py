"""Engram classes of a small vocabulary, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from builder.presets import TINY
from builder.token_class import computed_token_class, read_token_class, token_classes
from engine.config import ConfigError

# Vocabulary string of each id, in ByteLevel's alphabet: Ġ is a space, Ċ a line feed, ĉ a tab.
VOCAB = [
    ("<pad>", 0),
    ("hello", 1),
    ("Hello", 1),  # lower case
    ("Ġhello", 1),  # outer blanks removed
    ("HÃ©llo", 1),  # "Héllo": accent stripped
    ("Ġ", 2),  # a single space is kept
    ("ĠĠĊ", 2),  # a run of blanks is one space
    ("Ċ", 2),
    ("", 3),  # no text at all
    ("Ã", 4),  # half a character decodes to U+FFFD: the vocabulary string itself
    ("Â", 5),
    ("ï¬ģ", 6),  # "ﬁ": one ligature, NFKC
    ("fi", 6),
    ("aĠĠb", 7),  # inner run of blanks
    ("aĉb", 7),
    ("A B", 7),  # a raw space is outside ByteLevel's alphabet and decodes to itself
    ("Ìģ", 8),  # a lone combining accent: nothing is left, so the text stands for itself
    ("<PAD>", 0),
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    vocab = {text: number for number, (text, _) in enumerate(VOCAB)}
    result = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken("<pad>", special=True)])
    return result


def test_classes_by_hand(tokenizer: Tokenizer) -> None:
    classes = token_classes(tokenizer, len(VOCAB))
    assert classes.dtype == np.int32
    assert classes.tolist() == [expected for _, expected in VOCAB]


def test_count_that_differs_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    fitting = TINY.with_changes(vocab_size=len(VOCAB), engram_compressed_vocab_size=9)
    assert computed_token_class(fitting, path).max() == 8
    with pytest.raises(ConfigError, match=r"9 token classes.*10.*--token-class"):
        computed_token_class(fitting.with_changes(engram_compressed_vocab_size=10), path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        computed_token_class(fitting, path)


def test_classes_from_files(tmp_path: Path) -> None:
    expected = np.arange(512) // 2
    np.save(tmp_path / "a.npy", expected)
    save_file({"token_class": expected}, tmp_path / "b.safetensors")
    for name in ("a.npy", "b.safetensors"):
        assert read_token_class(TINY, tmp_path / name).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("values", "mention"),
    [
        (np.arange(511) // 2, r"\[512\].*\[511\]"),
        (np.arange(512) / 2, "float64"),
        (np.arange(512), "0 … 511"),
        (np.arange(512) // 2 - 1, "-1"),
    ],
)
def test_wrong_classes_are_refused(tmp_path: Path, values: np.ndarray, mention: str) -> None:
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(ConfigError, match=mention):
        read_token_class(TINY, tmp_path / "a.npy")


def test_file_that_holds_no_classes(tmp_path: Path) -> None:
    for name in ("missing.npy", "missing.safetensors"):
        with pytest.raises(ConfigError, match="missing"):
            read_token_class(TINY, tmp_path / name)
    (tmp_path / "x.npy").write_text("no array")
    with pytest.raises(ConfigError, match=r"x\.npy"):
        read_token_class(TINY, tmp_path / "x.npy")
