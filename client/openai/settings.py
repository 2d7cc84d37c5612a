"""What an operator sets, and who may call."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from client.protocol import DEFAULT_MODEL

KEYS_VARIABLE = "DSV41_API_KEYS"
MIB = 2**20


@dataclass(frozen=True)
class ProxySettings:
    """deployment: host:port of the server's gRPC endpoint; model: its model there.

    served_name: the model's name in the API. request_timeout: seconds for one generation, None is
    no limit. most_body_bytes: of a request. requests_per_minute: of each key, of each client
    address where there are no keys; None is no limit. most_in_flight: generations at once; more are
    told to come back. cors_origins: pages of other origins that may call; none by default.
    """

    deployment: str = "localhost:8001"
    model: str = DEFAULT_MODEL
    served_name: str = DEFAULT_MODEL
    request_timeout: float | None = None
    most_body_bytes: int = 16 * MIB
    requests_per_minute: int | None = None
    most_in_flight: int = 1024
    cors_origins: tuple[str, ...] = ()


class ApiKeys:
    """Known keys, as digests. No keys: everybody may call."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @staticmethod
    def read(path: Path | None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
        """From a file, a key a line, # comments; from DSV41_API_KEYS, separated by commas.

        Raises ValueError for a file that cannot be read, and for either without a key: a mistake
        must not open the door.
        """
        keys: list[str] = []
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"expected a file of API keys at {path}, but {error}; correct the path"
                ) from None
            keys += _some(f"in {path}", (line.partition("#")[0] for line in lines))
        if KEYS_VARIABLE in environment:
            keys += _some(f"in {KEYS_VARIABLE}", environment[KEYS_VARIABLE].split(","))
        return ApiKeys(tuple(keys))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name(self, key: str) -> str | None:
        """A known key's name for counting, None for an unknown key. The time that it takes depends
        neither on which key it is nor on how much of it is right."""
        digest = _digest(key)
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return str(found.index(True)) if any(found) else None


def _some(where: str, words: Iterable[str]) -> list[str]:
    keys = [key for word in words if (key := word.strip())]
    if not keys:
        raise ValueError(
            f"expected at least one API key {where}, got none; add one or leave it out"
        )
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
