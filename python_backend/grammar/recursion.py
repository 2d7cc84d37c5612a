"""Which of the parts that need each other can end: rules of a grammar, or schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


def users_of(uses: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """By name, the parts that use it; every part is a key of `uses`."""
    users: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    return users


def needs_itself(
    must_end: Iterable[str],
    users: Mapping[str, list[str]],
    lack: Callable[[str, set[str]], str | None],
) -> str | None:
    """A part that always needs itself, where the first of `must_end` that has no end leads to one;
    None where all have one.

    users: of every part, as users_of gives them. lack(part, ending): one that the part cannot end
    without and that is not among the `ending` ones, None where it can end.
    """
    ending, waiting = set[str](), list(users)
    while waiting:
        name = waiting.pop()
        if name not in ending and lack(name, ending) is None:
            ending.add(name)
            waiting += users[name]
    part, passed = next((name for name in must_end if name not in ending), None), set[str]()
    while part is not None and part not in passed:
        passed.add(part)
        part = lack(part, ending)
    return part
