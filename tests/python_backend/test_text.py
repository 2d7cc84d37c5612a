"""Text out of tokens. The oracle is the tokenizers library's own decode of the whole output."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from python_backend.text.tokenizer import TextTokenizer, TokenizerError

VOCAB_SIZE = 420
SAMPLES = [
    "The quick brown fox. Der schnelle braune Fuchs, ¿dónde está?",
    "深度求索发布了新的模型，推理速度更快。上海自来水来自海上。",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 naïve café 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 � tail",
]


def byte_level() -> Tokenizer:
    """All 256 bytes, merges that cross character borders, one special and two visible tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<｜end▁of▁sentence｜>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.add_tokens([AddedToken("｜DSML｜", special=False)])
    return tokenizer


TOKENIZER = byte_level()
TEXT = TextTokenizer(TOKENIZER, VOCAB_SIZE)
BYTE_IDS = [TOKENIZER.token_to_id(c) for c in sorted(pre_tokenizers.ByteLevel.alphabet())]

ids_of_text = st.sampled_from(SAMPLES).flatmap(
    lambda s: st.integers(0, len(s)).map(lambda cut: TOKENIZER.encode(s[cut:]).ids)
) | st.text(max_size=20).map(lambda s: TOKENIZER.encode(s).ids)
ids_at_random = st.lists(
    st.sampled_from(BYTE_IDS) | st.integers(0, VOCAB_SIZE - 1), min_size=0, max_size=40
)


def deltas(ids: list[int], cuts: list[int]) -> list[str]:
    """Feeds `ids` in pieces of the lengths `cuts`, cycled."""
    detokenizer, texts, start, turn = TEXT.detokenizer(), [], 0, 0
    while start < len(ids):
        step = cuts[turn % len(cuts)]
        texts.append(detokenizer.feed(np.array(ids[start : start + step], np.int32)))
        start, turn = start + step, turn + 1
    return [*texts, detokenizer.feed(np.array([], np.int32), last=True)]


def one_token_per_byte(text: str) -> list[int]:
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]
    return [TOKENIZER.token_to_id(character) for character in spelled]


@settings(deadline=None, max_examples=400)
@given(ids_of_text | ids_at_random, st.lists(st.integers(1, 4), min_size=1, max_size=4))
@example(TOKENIZER.encode("👩‍👩‍👧‍👦").ids[:-1], [1])  # ends within a character
def test_deltas_concatenate_to_the_whole_decode(ids: list[int], cuts: list[int]) -> None:
    assert "".join(deltas(ids, cuts)) == TOKENIZER.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(SAMPLES), st.integers(0, 50), st.integers(1, 3))
def test_valid_text_never_shows_a_replacement_character(text: str, cut: int, step: int) -> None:
    text = text[cut:].replace("�", "")
    parts = deltas(TOKENIZER.encode(text).ids, [step])
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


def test_a_character_of_four_tokens_comes_with_its_last_token() -> None:
    assert deltas(one_token_per_byte("🙂"), [1]) == ["", "", "", "🙂", ""]


def test_held_back_bytes_are_flushed_as_one_replacement_character() -> None:
    assert deltas(one_token_per_byte("深")[:2], [1]) == ["", "", "�"]


def test_a_generated_replacement_character_is_not_held_back() -> None:
    assert deltas(one_token_per_byte("�"), [1]) == ["", "", "�", ""]


def test_special_tokens_are_silent_and_visible_tags_are_not() -> None:
    end = TOKENIZER.token_to_id("<｜end▁of▁sentence｜>")
    ids = [TOKENIZER.token_to_id("<think>"), end, TOKENIZER.token_to_id("｜DSML｜"), VOCAB_SIZE - 1]
    assert "".join(deltas(ids, [1])) == "<think>｜DSML｜"


def test_other_threads_go_on_while_a_long_text_is_read() -> None:
    """The core's steps are such a thread: the library's plain call holds Python's lock for a second
    a megabyte, and nobody got a token."""
    text, turns, ended = SAMPLES[0] * 4000, [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    beside = threading.Thread(target=count)
    beside.start()
    while not turns[0]:
        time.sleep(0)
    before = turns[0]
    ids = TEXT.encode(text)
    after = turns[0]
    ended.set()
    beside.join()
    assert after - before > 100
    assert ids.tolist() == TOKENIZER.encode(text).ids


def test_encoding_gives_int32_ids_and_recognises_special_strings() -> None:
    ids = TEXT.encode("a<｜end▁of▁sentence｜>")
    assert ids.dtype == np.int32
    assert ids.tolist() == [
        TOKENIZER.token_to_id("a"),
        TOKENIZER.token_to_id("<｜end▁of▁sentence｜>"),
    ]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "model"')
    with pytest.raises(TokenizerError, match=r"expected a tokenizer at .*tokenizer\.json.*restore"):
        TextTokenizer.from_file(path, VOCAB_SIZE, 0)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        TokenizerError, match=r"expected a byte-level tokenizer .* got decoder Meta"
    ):
        TextTokenizer.from_file(tmp_path / "tokenizer.json", VOCAB_SIZE, 0)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"at most 300 ids.*got 402"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json", 300, 0)


@pytest.mark.parametrize(
    ("config", "expected"), [(None, ["a"]), ("true", ["<bos>", "a"]), ("false", ["a"])]
)
def test_the_begin_token_is_added_when_the_configuration_says_so(
    tmp_path: Path, config: str | None, expected: list[str]
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(f'{{"add_bos_token": {config}}}')
    bos = tokenizer.token_to_id("<bos>")
    text = TextTokenizer.from_file(tmp_path / "tokenizer.json", VOCAB_SIZE, bos)
    assert [tokenizer.id_to_token(id) for id in text.encode("a")] == expected
    assert text.encode("<bos>a").tolist() == [bos, tokenizer.token_to_id("a")]
