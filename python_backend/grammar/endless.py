"""JSON schemas whose recursion never ends: each of their texts would need another one inside."""

from __future__ import annotations

from itertools import chain
from typing import Any
from urllib.parse import unquote

from python_backend.grammar.recursion import needs_itself, users_of

# Schemas by their JSON pointers. Of each group one must have a text, or its user has none.
_Groups = list[dict[str, Any]]


def endless(schema: dict[str, Any]) -> str | None:
    """The JSON pointer of a schema that always needs itself, where the whole one has no text for
    that. None where it ends, and where it cannot be told: inside of schemas with names of their
    own pointers begin elsewhere."""
    if any(_has_name(value) for value in schema.values()):
        return None
    needs: dict[str, _Groups] = {}
    reached: list[tuple[str, Any]] = [("", schema)]
    while reached:
        place, part = reached.pop()
        if place not in needs:
            needs[place] = _groups(schema, place, part)
            reached += [item for group in needs[place] for item in group.items()]

    def lack(place: str, ending: set[str]) -> str | None:
        return next((next(iter(g)) for g in needs[place] if ending.isdisjoint(g)), None)

    return needs_itself([""], users_of({place: chain(*needs[place]) for place in needs}), lack)


def escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _groups(schema: dict[str, Any], place: str, part: Any) -> _Groups:
    """What the schema `part` at `place` always needs; what is no schema needs nothing, and is the
    library's to refuse."""
    if not isinstance(part, dict):
        return []
    if "$ref" in part:
        return _target(schema, part["$ref"])
    groups: _Groups = [{inside: child} for inside, child in _listed(part, place, "allOf")]
    for keyword in ("anyOf", "oneOf"):
        if alternatives := _listed(part, place, keyword):
            groups.append(dict(alternatives))
    if part.get("type") in ("object", ["object"]):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            inside = f"{place}/properties/"
            names = [n for n in required if isinstance(n, str) and n in properties]
            groups += [{inside + escaped(name): properties[name]} for name in names]
    elif part.get("type") in ("array", ["array"]):
        least = part.get("minItems")
        least = least if isinstance(least, int) else 0
        first = _listed(part, place, "prefixItems")
        groups += [{inside: child} for inside, child in first[:least]]
        if least > len(first):
            groups.append({f"{place}/items": part.get("items")})
    return groups


def _listed(part: dict[str, Any], place: str, keyword: str) -> list[tuple[str, Any]]:
    value = part.get(keyword)
    children = value if isinstance(value, list) else []
    return [(f"{place}/{keyword}/{i}", child) for i, child in enumerate(children)]


def _target(schema: dict[str, Any], reference: Any) -> _Groups:
    """None of a reference that is no pointer, or leads nowhere."""
    if not isinstance(reference, str) or reference[:2] not in ("#", "#/"):
        return []
    place, part = "", schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name in map(str, range(len(part))):
            part = part[int(name)]
        else:
            return []
        place += f"/{escaped(name)}"
    return [{place: part}]


def _has_name(value: Any) -> bool:
    inside = [value]
    while inside:
        value = inside.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$id", value.get("id")), str):
                return True
            inside += value.values()
        elif isinstance(value, list):
            inside += value
    return False
