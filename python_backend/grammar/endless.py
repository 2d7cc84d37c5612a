"""JSON schemas whose recursion never ends: each of their texts would need another one inside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from python_backend.grammar.recursion import needs_itself, users_of

# Where other drafts than the newest two put names, and which of them count, differs.
_DRAFTS = ("2019-09", "2020-12")
_NO_SCHEMAS = ("const", "enum", "default", "examples")


class _Part(NamedTuple):
    """base: the URI that begins the references of a schema: its own `$id`, or of one around it."""

    schema: Any
    place: str  # its JSON pointer
    base: str


# Of each group one must have a text, or its user has none.
_Groups = list[list[_Part]]


def endless(schema: dict[str, Any]) -> str | None:
    """The JSON pointer of a schema that always needs itself, where the whole one has no text for
    that. None where it ends, and where it cannot be told: where names stand inside of one in a
    draft before 2019-09, and what is needed through an `$anchor` or a `$dynamicRef`."""
    whole = _part(schema, "", "")
    inside = list(_parts(whole))
    if not _is_known_draft(schema) and any(_has_name(part.schema) for part in inside):
        return None
    named = {whole.base: whole}
    for part in inside:
        if _has_name(part.schema):
            named.setdefault(part.base, part)
    needs: dict[str, list[list[str]]] = {}
    reached = [whole]
    while reached:
        part = reached.pop()
        if part.place not in needs:
            groups = _groups(part, named)
            needs[part.place] = [[one.place for one in group] for group in groups]
            reached += chain(*groups)

    def lack(place: str, ending: set[str]) -> str | None:
        return next((group[0] for group in needs[place] if ending.isdisjoint(group)), None)

    return needs_itself([""], users_of({place: chain(*needs[place]) for place in needs}), lack)


def escaped(name: str) -> str:
    """As a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _part(schema: Any, place: str, around: str) -> _Part:
    """`around`: the base of what is around it."""
    name = schema.get("$id") if isinstance(schema, dict) else None
    return _Part(schema, place, _joined(around, name) if isinstance(name, str) else around)


def _joined(base: str, reference: str) -> str:
    """The URI without its fragment. What is none, which the library refuses, keeps its text."""
    try:
        return urldefrag(urljoin(base, reference)).url
    except ValueError:
        return reference


def _inside(part: _Part, name: str) -> _Part | None:
    """None where there is none of that name or index."""
    schema = part.schema
    if isinstance(schema, dict) and name in schema:
        child = schema[name]
    elif isinstance(schema, list) and name in map(str, range(len(schema))):
        child = schema[int(name)]
    else:
        return None
    return _part(child, f"{part.place}/{escaped(name)}", part.base)


def _listed(part: _Part, keyword: str) -> list[_Part]:
    listed = _inside(part, keyword)
    return _children(listed) if listed is not None and isinstance(listed.schema, list) else []


def _children(part: _Part) -> list[_Part]:
    """What may be schemas, or hold some."""
    children: list[tuple[Any, Any]] = []
    if isinstance(part.schema, dict):
        children = [item for item in part.schema.items() if item[0] not in _NO_SCHEMAS]
    elif isinstance(part.schema, list):
        children = list(enumerate(part.schema))
    return [
        _part(child, f"{part.place}/{escaped(str(name))}", part.base) for name, child in children
    ]


def _parts(whole: _Part) -> Iterator[_Part]:
    """All that stands inside, from the outside inwards."""
    waiting = [whole]
    while waiting:
        children = _children(waiting.pop())
        yield from children
        waiting += children


def _is_known_draft(schema: dict[str, Any]) -> bool:
    draft = schema.get("$schema")
    return not isinstance(draft, str) or any(known in draft for known in _DRAFTS)


def _has_name(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$id", schema.get("id")), str)


def _groups(part: _Part, named: dict[str, _Part]) -> _Groups:
    """What a schema always needs; what is no schema needs nothing, and is the library's to
    refuse."""
    schema = part.schema
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        target = _target(part.base, schema["$ref"], named)
        return [] if target is None else [[target]]
    groups: _Groups = [[inside] for inside in _listed(part, "allOf")]
    groups += filter(None, (_listed(part, keyword) for keyword in ("anyOf", "oneOf")))
    if schema.get("type") in ("object", ["object"]):
        properties, required = _inside(part, "properties"), schema.get("required")
        if properties is not None and isinstance(required, list):
            names = [name for name in required if isinstance(name, str)]
            inside = [_inside(properties, name) for name in names]
            groups += [[one] for one in inside if one is not None]
    elif schema.get("type") in ("array", ["array"]):
        least = schema.get("minItems")
        least = least if isinstance(least, int) else 0
        first, others = _listed(part, "prefixItems"), _inside(part, "items")
        groups += [[inside] for inside in first[:least]]
        if least > len(first) and others is not None:
            groups.append([others])
    return groups


def _target(base: str, reference: Any, named: dict[str, _Part]) -> _Part | None:
    """None of a reference that leads out of the whole schema, or nowhere."""
    if not isinstance(reference, str):
        return None
    uri, _, pointer = reference.partition("#")
    part = named.get(_joined(base, uri) if uri else base)
    before, *steps = unquote(pointer).split("/")
    if before:
        return None  # an anchor
    for step in steps:
        if part is not None:
            part = _inside(part, step.replace("~1", "/").replace("~0", "~"))
    return part
