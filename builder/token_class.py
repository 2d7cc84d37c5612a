"""The Engram class of every token id: ids whose texts differ only in form share one.

Computed from the tokenizer as the released code does it: decode the id alone; a text with U+FFFD
stands for itself by its vocabulary string; any other text is normalised (NFKC, NFD, accents
stripped, lower case, runs of blanks to one space, outer blanks removed except when nothing else is
left). Classes are numbered in the order in which ids first show them.
"""

from __future__ import annotations

from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, normalizers

from engine.config import ConfigError, ModelConfig

Int32Array = npt.NDArray[np.int32]

# Stands for a text that is a single space while outer blanks are removed.
_SENTINEL = "\ue000"
_REPLACEMENT = "�"


def token_classes(tokenizer: Tokenizer, vocab_size: int) -> Int32Array:
    """int32 [vocab_size], classes 0, 1, … in first-seen order."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    classes = np.empty(vocab_size, dtype=np.int32)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        classes[token] = numbers.setdefault(key, len(numbers))
    return classes


def read_tokenizer(config: ModelConfig, path: Path) -> Tokenizer:
    """A tokenizer.json whose ids the model has. Raises ConfigError when it is not one."""
    if not path.is_file():
        raise ConfigError(f"tokenizer: expected a tokenizer.json at {path}, found none")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} is not a tokenizer: {error}; restore the file") from None
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ConfigError(
            f"{path}: expected at most vocab_size = {config.vocab_size} ids, got "
            f"{tokenizer.get_vocab_size()}; use the tokenizer of this model"
        )
    return tokenizer


def computed_token_class(config: ModelConfig, tokenizer_file: Path) -> Int32Array:
    """Classes from a tokenizer.json. Raises ConfigError when their number is not the model's."""
    classes = token_classes(read_tokenizer(config, tokenizer_file), config.vocab_size)
    count = int(classes.max()) + 1
    if count != config.engram_compressed_vocab_size:
        raise ConfigError(
            f"{tokenizer_file} gives {count} token classes where engram_compressed_vocab_size is "
            f"{config.engram_compressed_vocab_size}; give the classes with --token-class"
        )
    return classes


def read_token_class(config: ModelConfig, path: Path) -> Int32Array:
    """Classes from a .npy array or from the tensor token_class of a .safetensors file.

    Raises ConfigError when the file does not hold one class in range for every token id.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np") as file:
                values = file.get_tensor("token_class")
        else:
            values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile, SafetensorError) as error:
        raise ConfigError(
            f"expected token classes in {path} (.npy, or .safetensors with token_class), "
            f"but {error}"
        ) from None
    shape, dtype = getattr(values, "shape", ()), getattr(values, "dtype", None)  # not of an archive
    if dtype is None or shape != (config.vocab_size,) or dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: expected integer token classes of shape [{config.vocab_size}], got "
            f"{'an archive' if dtype is None else f'{dtype} {list(shape)}'}"
        )
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= config.engram_compressed_vocab_size:
        raise ConfigError(
            f"{path}: expected token classes 0 … {config.engram_compressed_vocab_size - 1}, "
            f"got {low} … {high}"
        )
    classes: Int32Array = values.astype(np.int32)
    return classes


def proportional_token_class(config: ModelConfig) -> Int32Array:
    """A map for random checkpoints: neighbouring ids share a class, every class is used."""
    ids = np.arange(config.vocab_size, dtype=np.int64)
    classes = ids * config.engram_compressed_vocab_size // config.vocab_size
    return classes.astype(np.int32)
