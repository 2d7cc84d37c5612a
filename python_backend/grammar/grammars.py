"""The grammars of one served model; llguidance is optional and loaded here."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.config import ModelConfig
from python_backend.grammar.guide import Guide
from python_backend.request import RequestError
from python_backend.text.chat import THINK_END
from python_backend.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from python_backend.grammar.compiler import GrammarCompiler
    from python_backend.grammar.grammar import Grammar


class Grammars:
    """`text` None: the engine has no tokenizer, so no answer has a form."""

    def __init__(self, config: ModelConfig, text: TextTokenizer | None) -> None:
        self._missing = "a tokenizer.json; build the engine from a checkpoint that has one"
        self._compiler: GrammarCompiler | None = None
        if text is None:
            return
        self._missing = "llguidance; install the extra grammar of this package"
        if importlib.util.find_spec("llguidance") is None:
            return
        from python_backend.grammar.compiler import GrammarCompiler
        from python_backend.grammar.messages import Setup

        self._compiler = GrammarCompiler(
            Setup(text.to_json(), config.vocab_size, config.eos_token_id, text.token_id(THINK_END))
        )

    def compile(self, guide: Guide) -> Future[Grammar]:
        """At once; the future has the grammar, or the RequestError that refuses the guide.

        Raises RequestError where nothing is compiled here, or too many guides wait.
        """
        if self._compiler is None:
            raise RequestError(
                "invalid_argument",
                f"expected no guided_decoding_guide, got one: this server lacks {self._missing}",
            )
        return self._compiler.compile(guide)

    def close(self) -> None:
        """End the compiler's thread and process."""
        if self._compiler is not None:
            self._compiler.close()
