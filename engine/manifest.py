"""The manifest of an engine: every file with its size and sha256, versions, how it was built.

The manifest is written last, so a directory without one was never finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.json_file import read_json

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
# Files up to this size are hashed whenever an engine is opened; larger ones when asked to.
_ALWAYS_HASHED_BYTES = 64 << 20
_READ_BYTES = 4 << 20

Advance = Callable[[int], None]


class EngineError(ValueError):
    """An engine that cannot be used; the message names the directory or file and what to do."""


@dataclass(frozen=True)
class Manifest:
    """`files`: name to (size in bytes, sha256 hex). `built`: versions and options, for humans."""

    files: Mapping[str, tuple[int, str]]
    built: Mapping[str, Any]

    @staticmethod
    def write(directory: Path, built: Mapping[str, Any], advance: Advance) -> None:
        """Hash every file below `directory` and write its manifest; `advance` gets bytes done."""
        files = {
            path.relative_to(directory).as_posix(): {
                "size": path.stat().st_size,
                "sha256": _sha256(path, advance),
            }
            for path in files_below(directory)
        }
        manifest = {"format_version": FORMAT_VERSION, "files": files, "built": dict(built)}
        (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1))

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Raises EngineError when the engine was not finished or has another format version."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            raise EngineError(
                f"{directory} is not a finished engine: expected {MANIFEST_NAME} in it, found "
                "none; build it again with dsv41-build engine"
            )
        try:
            raw = read_json(path)
            version = int(raw["format_version"])
            files = {
                str(name): (int(entry["size"]), str(entry["sha256"]))
                for name, entry in raw["files"].items()
            }
            built = dict(raw["built"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise EngineError(
                f"{path} was altered: expected a manifest, found something else; "
                "build the engine again"
            ) from None
        if version != FORMAT_VERSION:
            relation = "newer" if version > FORMAT_VERSION else "too old"
            raise EngineError(
                f"{directory} has engine format {version}, which is {relation}: this software "
                f"reads format {FORMAT_VERSION}; build the engine again with it"
            )
        return Manifest(files, built)

    def check(self, directory: Path, *, verify: bool, advance: Advance = lambda _: None) -> None:
        """Compare the files with the manifest: all sizes, and hashes of small files or of all.

        Raises EngineError naming the first file that is missing or altered.
        """
        for name, (size, _) in self.files.items():
            path = directory / name
            if not path.is_file():
                raise EngineError(f"{path} is missing from the engine; build the engine again")
            found = path.stat().st_size
            if found != size:
                raise EngineError(
                    f"{path} was altered: expected {size} bytes, found {found}; "
                    "build the engine again"
                )
            if verify or self.hashed_on_open(name):
                self.check_hash(directory, name, advance)

    def hashed_on_open(self, name: str) -> bool:
        return self.files[name][0] <= _ALWAYS_HASHED_BYTES

    def check_hash(self, directory: Path, name: str, advance: Advance) -> None:
        """Read one file whole. Raises EngineError when its content is not what was built."""
        path = directory / name
        if _sha256(path, advance) != self.files[name][1]:
            raise EngineError(
                f"{path} was altered: its sha256 is not the manifest's; build the engine again"
            )


def files_below(directory: Path) -> list[Path]:
    """Every file of a directory and of those in it, by name."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sha256(path: Path, advance: Advance) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
