"""What the model wrote, told apart as it comes: reasoning, content, tool calls.

An answer in thinking mode is reasoning up to `</think>`, then content. Tool calls stand behind the
content in this form, every tag on its own line (｜ is U+FF5C):

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="NAME">
    <｜DSML｜ parameter name="KEY" string="true|false">VALUE</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A value with string="true" is text as it stands, up to its closing tag; with "false" it is JSON.
However the text is cut, the pieces join to the same reasoning, content, names and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, NoReturn

from client.chat import THINK_END

_DSML = "｜DSML｜"
BLANK_LINE = "\n\n"
CALLS, END_CALLS = f"<{_DSML} calls>", f"</{_DSML} calls>"
INVOKE, END_INVOKE = f'<{_DSML} invoke name="', f"</{_DSML} invoke>"
PARAMETER, END_PARAMETER = f'<{_DSML} parameter name="', f"</{_DSML} parameter>"
END_OF_TAG = '">'
_KIND = re.compile(r'(.*)" string="(true|false)', re.DOTALL)

Kind = Literal["reasoning", "content", "name", "arguments"]


class Piece(NamedTuple):
    """A stretch of one kind. `call` counts the tool calls of the answer from 0; a call starts with
    its whole `name`, then its `arguments` come as fragments of one JSON object."""

    kind: Kind
    text: str
    call: int = -1


class AnswerReader:
    """One answer. `reasons`: it begins with reasoning. `calls`: tool calls are looked for;
    otherwise their markup is content like any other text.

    Held back between two calls of `feed`: what may be the beginning of a tag, and a JSON value
    until it is whole. What a tag should stand in place of is content outside of a call and is
    dropped inside of one; a call whose end never came has arguments that never end.
    """

    def __init__(self, *, reasons: bool, calls: bool) -> None:
        self._looks_for_calls = calls
        self._state = self._in_reasoning if reasons else self._in_content
        self._rest = ""
        self._pieces: list[Piece] = []
        self._call = -1
        self._parameters = 0

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """The pieces that are certain after `text`; with `last`, all that is left."""
        self._rest += text
        self._pieces = []
        while self._state():
            pass
        if last:
            if self._state in (self._in_reasoning, self._in_content, self._in_text_value):
                self._say(self._rest)
            self._rest = ""
        return self._pieces

    # Each state takes what it can from the rest, and says whether another may go on with it.

    def _in_reasoning(self) -> bool:
        return self._up_to(THINK_END, self._in_content)

    def _in_content(self) -> bool:
        if not self._looks_for_calls:
            self._say(self._take(len(self._rest)))
            return False
        before, tag, after = self._rest.partition(CALLS)
        if not tag:
            held = _beginning_of(self._rest, (BLANK_LINE + CALLS, CALLS))
            self._say(self._take(len(self._rest) - held))
            return False
        self._say(before.removesuffix(BLANK_LINE))
        return self._go_on(after, self._between_calls)

    def _between_calls(self) -> bool:
        self._rest = self._rest.lstrip()
        if self._rest.startswith(INVOKE):
            name, ended, after = self._rest[len(INVOKE) :].partition(END_OF_TAG)
            if not ended:
                return False
            self._call += 1
            self._parameters = 0
            self._add("name", name)
            return self._go_on(after, self._in_call)
        if self._rest.startswith(END_CALLS):
            return self._go_on(self._rest[len(END_CALLS) :], self._in_content)
        if any(tag.startswith(self._rest) for tag in (INVOKE, END_CALLS)):
            return False
        return self._go_on(self._rest, self._in_content)

    def _in_call(self) -> bool:
        tags = (PARAMETER, END_INVOKE, END_CALLS)
        found = [(place, tag) for tag in tags if (place := self._rest.find(tag)) >= 0]
        if not found:
            self._take(len(self._rest) - _beginning_of(self._rest, tags))
            return False
        place, tag = min(found)
        if tag != PARAMETER:
            self._add("arguments", "{}" if not self._parameters else "}")
            after = self._rest[place:].removeprefix(END_INVOKE)
            return self._go_on(after, self._between_calls)
        self._take(place)
        header, ended, after = self._rest[len(PARAMETER) :].partition(END_OF_TAG)
        if not ended:
            return False
        match = _KIND.fullmatch(header)
        name, is_text = (match[1], match[2] == "true") if match else (header, True)
        start = ", " if self._parameters else "{"
        self._parameters += 1
        quote = '"' if is_text else ""
        self._add("arguments", f"{start}{_json(name)}: {quote}")
        return self._go_on(after, self._in_text_value if is_text else self._in_json_value)

    def _in_text_value(self) -> bool:
        if self._up_to(END_PARAMETER, self._in_call):
            self._add("arguments", '"')
            return True
        return False

    def _in_json_value(self) -> bool:
        value, tag, after = self._rest.partition(END_PARAMETER)
        if not tag:
            return False
        self._add("arguments", value.strip() if _is_json(value) else _json(value))
        return self._go_on(after, self._in_call)

    def _up_to(self, tag: str, then: Callable[[], bool]) -> bool:
        before, found, after = self._rest.partition(tag)
        if found:
            self._say(before)
            return self._go_on(after, then)
        self._say(self._take(len(self._rest) - _beginning_of(self._rest, (tag,))))
        return False

    def _go_on(self, rest: str, state: Callable[[], bool]) -> bool:
        self._rest, self._state = rest, state
        return True

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _say(self, text: str) -> None:
        """Text of the state that holds now."""
        if not text:
            return
        if self._state == self._in_text_value:
            self._add("arguments", _json(text)[1:-1])
        else:
            self._add("reasoning" if self._state == self._in_reasoning else "content", text)

    def _add(self, kind: Kind, text: str) -> None:
        call = self._call if kind in ("name", "arguments") else -1
        self._pieces.append(Piece(kind, text, call))


def _beginning_of(text: str, tags: tuple[str, ...]) -> int:
    """How many last characters of `text` may be the beginning of a tag."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0
    )


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
