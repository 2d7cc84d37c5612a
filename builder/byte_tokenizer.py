"""A byte-level tokenizer for checkpoints that come without one.

Every byte is a token, so any text round-trips. The begin, end and pad tokens sit at the ids of the
configuration, the image placeholder and the System token too (the released model uses the latter
as the draft's noise token), the other special strings of the chat format wherever there is room.
Ids that are left decode to "<id>", so that what a random model says can be read.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.config import ConfigError, ModelConfig

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
IMAGE = "<｜deepseek_image｜>"
CHAT_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    SYSTEM,
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
    "<think>",
    "</think>",
    "｜DSML｜",
)
# Tags that a reader of the output wants to see.
_VISIBLE = frozenset({"<think>", "</think>", "｜DSML｜"})


def byte_tokenizer(config: ModelConfig) -> Tokenizer:
    """Ids below config.vocab_size. Raises ConfigError when they cannot hold all bytes."""
    placed = {BEGIN: config.bos_token_id, END: config.eos_token_id, PAD: config.pad_token_id}
    if len(set(placed.values())) != len(placed):
        raise ConfigError(
            f"bos_token_id, eos_token_id, pad_token_id: expected three ids, got {placed.values()}"
        )
    taken = {number: text for text, number in placed.items()}
    wanted = {SYSTEM: config.dspark_noise_token_id, IMAGE: config.image_token_id}
    for text, number in wanted.items():
        if number is not None and number not in taken:
            taken[number] = text
    free = (number for number in range(config.vocab_size) if number not in taken)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    missing = [text for text in CHAT_TOKENS if text not in taken.values()]
    for text in [*alphabet, *missing]:
        number = next(free, None)
        if number is None:
            needed = len(alphabet) + len(CHAT_TOKENS) + len(placed)
            raise ConfigError(
                f"vocab_size: expected at least {needed} for a byte-level tokenizer, got "
                f"{config.vocab_size}; give a tokenizer file"
            )
        taken[number] = text
    vocab = {taken.get(number, f"<{number}>"): number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [*placed, *CHAT_TOKENS]
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in _VISIBLE, normalized=False) for text in specials]
    )
    return tokenizer


def tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    """The tokenizer_config.json that goes with `byte_tokenizer`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "model_max_length": config.max_position_embeddings,
    }
