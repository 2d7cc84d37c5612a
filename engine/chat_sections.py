"""chat_sections.json: the words of two sections of the chat format, where a checkpoint brings them.

The format tells the model about tools, and about the form of the reply, in plain words, and a
checkpoint understands those that it was trained on:

    {"tools": "… {schemas} …", "response_format": "… {schema} …"}

Each text stands behind a blank line. `{schemas}` becomes the JSON of the tools' functions, one a
line, `{schema}` the JSON of the reply's schema; other braces stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import ConfigError
from engine.json_file import read_json

CHAT_SECTIONS_NAME = "chat_sections.json"
_PLACES = {"tools": "{schemas}", "response_format": "{schema}"}


@dataclass(frozen=True)
class ChatSections:
    """Both texts with their place, exactly once."""

    tools: str
    response_format: str

    def with_schemas(self, schemas: str) -> str:
        return self.tools.replace(_PLACES["tools"], schemas)

    def with_schema(self, schema: str) -> str:
        return self.response_format.replace(_PLACES["response_format"], schema)

    @staticmethod
    def read(directory: Path) -> ChatSections | None:
        """From a checkpoint or an engine; None where it has no such file. Raises ConfigError."""
        path = directory / CHAT_SECTIONS_NAME
        if not path.is_file():
            return None
        try:
            value = read_json(path)
        except ValueError as error:
            raise ConfigError(
                f"expected JSON in {path}, but {error}; restore or remove the file"
            ) from None
        if not isinstance(value, dict) or set(value) != set(_PLACES):
            raise ConfigError(
                f"expected a JSON object of {' and '.join(_PLACES)} in {path}, got something else; "
                "restore or remove the file"
            )
        for name, place in _PLACES.items():
            if not isinstance(value[name], str) or value[name].count(place) != 1:
                raise ConfigError(
                    f"expected {name} of {path} to be a text with {place} in it once, got "
                    "something else; restore or remove the file"
                )
        return ChatSections(**value)
