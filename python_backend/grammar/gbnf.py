"""GBNF, the grammar notation of XGrammar and llama.cpp, as Lark rules for llguidance.

    root ::= "[" [0-9]+ ("," [0-9]+)* "]"   # a comment

Rules that do not reach themselves become terminals: one regular expression each, exact and fast.
What recursive rules are made of is read as a lexer reads, each piece as long as it goes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from python_backend.grammar.recursion import needs_itself, users_of

ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<head>[A-Za-z_][\w-]*(?=\s*::=))|(?P<defines>::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<chars>\[(?:\\.|[^\]\\\n])*\])
    |(?P<many>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<any>\.)
    |(?P<sign>[()|*+?])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|([^\\])", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in "\"'\\[]-^/"}
_LAST_CODE = 0x10FFFF


class GbnfError(ValueError):
    """`offset` is where in the text."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(problem)
        self.offset = offset


class Lark(NamedTuple):
    """`offsets` [line][part]: where in the GBNF text a part of a line comes from."""

    text: str
    offsets: list[list[int]]

    def offset(self, line: int, column: int) -> int:
        """Where in the GBNF text this place comes from; both count from 1."""
        line = min(line, len(self.offsets))
        before = self.text.splitlines()[line - 1][: column - 1]
        part = min(before.count(" "), len(self.offsets[line - 1]) - 1)
        return self.offsets[line - 1][part]


class _Rule(NamedTuple):
    name: str
    offset: int
    parts: list[tuple[str, int]]  # Lark without spaces, references as names; and where it is
    references: dict[str, int]  # by name, the first offset


def to_lark(text: str) -> Lark:
    """The same language for llguidance. Raises GbnfError."""
    rules = _rules(text)
    if ROOT not in rules:
        raise GbnfError(0, f"no rule named {ROOT}")
    for rule in rules.values():
        for name, offset in rule.references.items():
            if name not in rules:
                raise GbnfError(offset, f"no rule named {name}")
    users = users_of({name: rule.references for name, rule in rules.items()})
    _check_ends(rules, users)
    terminals = _terminals(rules, users)
    spelled = {name: f"{'T' if name in terminals else 'r'}_{i}" for i, name in enumerate(rules)}
    lines, offsets = [f"start: {spelled[ROOT]}"], [[rules[ROOT].offset]]
    for rule in rules.values():
        parts = (spelled.get(part, part) for part, _ in rule.parts)
        lines.append(f"{spelled[rule.name]}: {' '.join(parts)}")
        offsets.append([rule.offset, *(offset for _, offset in rule.parts)])
    return Lark("\n".join(lines), offsets)


def _rules(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    offset = 0
    while offset < len(text):
        match = _TOKEN.match(text, offset)
        if match is None:
            raise GbnfError(offset, f"nothing begins with {text[offset]!r}")
        kind, word = match.lastgroup, match.group()
        if kind == "head":
            if word in rules:
                raise GbnfError(offset, f"a second rule named {word}")
            rule = rules[word] = _Rule(word, offset, [], {})
        elif kind == "defines":
            if rule is None or rule.parts or text[rule.offset : offset].strip() != rule.name:
                raise GbnfError(offset, "no name before ::=")
        elif kind != "space":
            if rule is None:
                raise GbnfError(offset, "no ::= behind the first name")
            if kind == "name":
                rule.references.setdefault(word, offset)
            rule.parts.append((_part(str(kind), word, offset), offset))
        offset = match.end()
    return rules


def _part(kind: str, word: str, offset: int) -> str:
    if kind == "text":
        return _literal(_characters(word[1:-1], offset + 1))
    if kind == "chars":
        return _class(word[1:-1], offset + 1)
    if kind == "any":
        return "/(?s:.)/"
    if kind == "many":
        return re.sub(r"\s", "", word)
    return word


def _characters(text: str, offset: int) -> list[tuple[str, bool]]:
    """Each character, and whether it was escaped."""
    found = []
    for match in _CHARACTER.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next((int(c, 16) for c in codes if c is not None), None)
        if code is not None:
            if code > _LAST_CODE or 0xD800 <= code < 0xE000:
                raise GbnfError(offset + match.start(), f"no character is {match.group()}")
            found.append((chr(code), True))
        elif plain is not None:
            found.append((plain, False))
        elif escaped in _ESCAPES:
            found.append((_ESCAPES[escaped], True))
        else:
            raise GbnfError(offset + match.start(), f"no escape {match.group()}")
    return found


def _literal(characters: list[tuple[str, bool]]) -> str:
    return f"/{''.join(_code(c) for c, _ in characters)}/" if characters else '""'


def _class(text: str, offset: int) -> str:
    inside = _characters(text, offset)
    negated = bool(inside) and inside[0] == ("^", False)
    if negated:
        inside = inside[1:]
    if not inside:
        raise GbnfError(offset - 1, "no characters in [ ]")
    pieces, at = [], 0
    while at < len(inside):
        first = last = inside[at][0]
        at += 1
        if at + 1 < len(inside) and inside[at] == ("-", False):
            last = inside[at + 1][0]
            at += 2
            if last < first:
                raise GbnfError(offset - 1, f"the range {first}-{last} runs backwards")
        pieces.append(_code(first) if first == last else f"{_code(first)}-{_code(last)}")
    return f"/[{'^' if negated else ''}{''.join(pieces)}]/"


def _code(character: str) -> str:
    return rf"\x{{{ord(character):x}}}"


def _terminals(rules: dict[str, _Rule], users: dict[str, list[str]]) -> set[str]:
    """The rules that reach only rules which reach no circle."""
    waits = {name: set(rule.references) for name, rule in rules.items()}
    ready = [name for name, references in waits.items() if not references]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            waits[user].discard(name)
            if not waits[user]:
                ready.append(user)
    return found


def _check_ends(rules: dict[str, _Rule], users: dict[str, list[str]]) -> None:
    """Raises GbnfError at a rule that always needs itself, where an answer can get into it."""
    entered, waiting = dict[str, None](), [ROOT]
    while waiting:
        if (name := waiting.pop()) not in entered:
            entered[name] = None
            waiting += reversed(rules[name].references)

    def lack(name: str, ending: set[str]) -> str | None:
        if _can_end(rules[name], ending):
            return None
        return next(other for other in rules[name].references if other not in ending)

    endless = needs_itself(entered, users, lack)
    if endless is not None:
        problem = f"rule {endless} always needs itself, so that no text with it is ever complete"
        raise GbnfError(rules[endless].offset, problem)


def _can_end(rule: _Rule, ending: set[str]) -> bool:
    """Whether some text of the rule is complete when texts of the `ending` ones are. Brackets that
    do not match are the library's to refuse."""
    # Of each open bracket: an alternative can end; this one up to its last item; that item.
    open_brackets = [(False, True, True)]
    for part, _ in rule.parts:
        some, before, item = open_brackets.pop()
        if part == "(":
            open_brackets += [(some, before and item, True), (False, True, True)]
        elif part == ")" and open_brackets:
            some, before, item = (*open_brackets.pop()[:2], some or (before and item))
            open_brackets.append((some, before, item))
        elif part == "|":
            open_brackets.append((some or (before and item), True, True))
        elif part in ("*", "?") or re.match(r"\{0*[,}]", part):
            open_brackets.append((some, before, True))
        elif part == "+" or part.startswith("{"):
            open_brackets.append((some, before, item))
        else:
            can_end = part in ending or part not in rule.references
            open_brackets.append((some, before and item, can_end))
    some, before, item = open_brackets[-1]
    return some or (before and item)
