"""How a deployment's state is asked for, whatever the transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from client.protocol import DeploymentError, GenerateRequest, GenerateResult, Health

# Token 0 exists in every vocabulary, and a prompt of ids needs no tokenizer on the server.
_PROBE = GenerateRequest(input_ids=np.zeros(1, np.int32), max_tokens=1)


class Generate(Protocol):
    def __call__(
        self, request: GenerateRequest, *, timeout: float | None = None
    ) -> GenerateResult: ...


def probe(
    ask: Callable[[str], bool], generate: Generate | None, model: str, timeout: float
) -> Health:
    """Asks for "live", "ready" and "model", in this order, and generates a token if all hold.

    ask: True or False, or DeploymentError when the server cannot be asked. generate: None when no
    token shall be made.
    """
    states = {"live": False, "ready": False, "model": False}
    meaning = {
        "live": "the server does not say that it is live",
        "ready": "the server is not ready for requests",
        "model": f"the model {model} is not ready: it is loading, failed to load or has "
        "another name",
    }
    generates = None if generate is None else False
    try:
        for what in states:
            states[what] = ask(what)
            if not states[what]:
                return _health(states, generates, meaning[what])
        if generate is not None:
            made = generate(_PROBE, timeout=timeout).output_ids.size
            generates = made == 1
            if not generates:
                return _health(states, generates, f"expected one token, got {made}")
    except DeploymentError as error:
        return _health(states, generates, error.message)
    return _health(states, generates, "")


def _health(states: dict[str, bool], generates: bool | None, detail: str) -> Health:
    return Health(states["live"], states["ready"], states["model"], generates, detail)
