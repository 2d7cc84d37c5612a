"""The tokenizer: ids, digits, the fast encoder, repeatable training, Engram classes."""

import json
import unicodedata
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from builder.token_class import token_classes
from examples.tinyflash import arithmetic
from examples.tinyflash.tokenizer import (
    SPECIAL_STRINGS,
    TOKENIZER_FILE,
    VOCAB_SIZE,
    Encoder,
    encoder,
    train,
    training_texts,
)

TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))


def test_special_strings_have_the_released_spelling_and_ids() -> None:
    bar, mark = "\uff5c", "\u2581"
    assert TOKENIZER.token_to_id(f"<{bar}begin{mark}of{mark}sentence{bar}>") == 0
    assert TOKENIZER.token_to_id(f"<{bar}end{mark}of{mark}sentence{bar}>") == 1
    assert TOKENIZER.token_to_id(f"<{bar}{mark}pad{mark}{bar}>") == 2
    names = "User Assistant System latest_reminder action query authority domain title read_url"
    last = [f"<{bar}{name}{bar}>" for name in [*names.split(), "deepseek_image"]]
    last += ["<think>", "</think>", f"{bar}DSML{bar}"]
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE == 4096
    assert [TOKENIZER.token_to_id(text) for text in last] == list(range(4096 - 14, 4096))
    for text in (*last, f"<{bar}begin{mark}of{mark}sentence{bar}>"):
        assert len(TOKENIZER.encode(f"a{text}b").ids) == 3


def test_decoding_for_people_drops_control_strings_and_keeps_markup() -> None:
    ids = encoder().encode("".join(SPECIAL_STRINGS))
    assert encoder().decode(ids) == "".join(SPECIAL_STRINGS)
    assert encoder().decode(ids, keep_special=False) == "<think></think>\uff5cDSML\uff5c"


def test_every_digit_is_one_token() -> None:
    digits = {TOKENIZER.token_to_id(str(n)) for n in range(10)}
    for text in ("4729", "x12y", "7 + 305 = 312", "no1", "0.5", "\n9"):
        ids = TOKENIZER.encode(text).ids
        assert sum(i in digits for i in ids) == sum(c.isdigit() for c in text)
    for token, index in TOKENIZER.get_vocab().items():
        if set(token) & set("0123456789"):
            assert index in digits, token


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=60))
def test_any_text_survives_and_the_fast_encoder_agrees(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert Encoder(TOKENIZER).encode(text) == ids


ascii_and_special = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL_STRINGS),
        st.text(st.characters(codec="ascii"), max_size=12),
        st.sampled_from(["\n\n", "  ", " 12", "\r\n", ", which", " ####", "\t x"]),
    ),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=500)
@given(ascii_and_special)
def test_the_fast_encoder_agrees_around_spaces_and_special_strings(text: str) -> None:
    assert encoder().encode(text) == TOKENIZER.encode(text, add_special_tokens=False).ids


def test_training_again_gives_the_committed_file() -> None:
    again = train(training_texts())
    assert json.loads(again.to_str()) == json.loads(TOKENIZER_FILE.read_text())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a vocabulary of 4096 entries"):
        train(["a few words only"])


def test_tokens_per_problem() -> None:
    """Numbers of the model card; the bounds keep training and drafting budgets honest."""
    rng = Random(0)
    problems = [arithmetic.problem(rng) for _ in range(2000)]
    question = sum(len(encoder().encode(p.question)) for p in problems) / len(problems)
    solution = sum(len(encoder().encode(p.solution)) for p in problems) / len(problems)
    print(f"tokens per problem: question {question:.1f}, worked answer {solution:.1f}")
    assert question < 60
    assert solution < 100


def python_class_key(token: int) -> str:
    """The class key written out again with the standard library instead of the tokenizer's."""
    text = TOKENIZER.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return str(TOKENIZER.id_to_token(token))
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    for blank in "\t\r\n":
        folded = folded.replace(blank, " ")
    while "  " in folded:
        folded = folded.replace("  ", " ")
    stripped = folded if folded == " " else folded.strip()
    return stripped or text


def test_engram_classes_of_the_vocabulary() -> None:
    classes = token_classes(TOKENIZER, VOCAB_SIZE)
    numbers: dict[str, int] = {}
    expected = [
        numbers.setdefault(python_class_key(token), len(numbers)) for token in range(VOCAB_SIZE)
    ]
    assert classes.tolist() == expected
    assert classes[2] == 2  # the padding class is token 2's
    config = json.loads(TOKENIZER_FILE.with_name("config.json").read_text())
    assert config["engram_compressed_vocab_size"] == len(numbers)
    assert config["dspark_noise_token_id"] == TOKENIZER.token_to_id("<\uff5cSystem\uff5c>")
    assert config["vocab_size"] == VOCAB_SIZE
    assert len({int(classes[TOKENIZER.token_to_id(str(n))]) for n in range(10)}) == 10
