"""A guide: the form that a request wants its answer to have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_GUIDE_BYTES = 1 << 17
TYPE_NAME = "guided_decoding_guide_type"
GUIDE_NAME = "guided_decoding_guide"


class GuideError(ValueError):
    """A guide that cannot be read."""


class GuideKind(StrEnum):
    """TensorRT-LLM's names, and `choice`."""

    JSON = "json"  # any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "ebnf_grammar"
    CHOICE = "choice"  # one of a JSON list of texts


_ALIASES = {"grammar": GuideKind.GRAMMAR}


@dataclass(frozen=True)
class Guide:
    """`text` as it was sent, empty for JSON. With `after_reasoning` the answer is reasoning of any
    form, `</think>`, and then what the guide says."""

    kind: GuideKind
    text: str
    after_reasoning: bool = False

    @property
    def digest(self) -> bytes:
        """Equal for equal guides only."""
        head = f"{self.kind} {self.after_reasoning} ".encode()
        return hashlib.sha256(head + self.text.encode("utf-8", "surrogatepass")).digest()


def read_guide(texts: Mapping[str, Sequence[str]], *, after_reasoning: bool) -> Guide | None:
    """From a request's texts by name; None for none. Raises GuideError; whether the guide can be
    followed is the compiler's to judge."""
    name = texts.get(TYPE_NAME, [""])[0]
    text = texts.get(GUIDE_NAME, [""])[0]
    if not name:
        if text:
            raise GuideError(f"expected {TYPE_NAME} with {GUIDE_NAME}, got none; send {_names()}")
        return None
    if name not in _ALIASES and name not in list(GuideKind):
        raise GuideError(f"expected {TYPE_NAME} to be {_names()}, got {name[:40]!r}; choose one")
    kind = _ALIASES.get(name) or GuideKind(name)
    if kind == GuideKind.JSON and text:
        raise GuideError(
            f"expected no {GUIDE_NAME} with {TYPE_NAME} json, which is any JSON object, got one; "
            "send json_schema or leave it out"
        )
    if kind != GuideKind.JSON and not text:
        raise GuideError(f"expected {GUIDE_NAME} with {TYPE_NAME} {name}, got none; send it")
    size = len(text.encode("utf-8"))
    if size > MAX_GUIDE_BYTES:
        raise GuideError(
            f"expected {GUIDE_NAME} of at most {MAX_GUIDE_BYTES} bytes, got {size}; shorten it"
        )
    return Guide(kind, text, after_reasoning)


def _names() -> str:
    return ", ".join([*GuideKind, *_ALIASES])
