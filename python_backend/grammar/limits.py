"""What a grammar may cost. A guide comes from outside, so each step of using it is bounded."""

from __future__ import annotations

from llguidance import LLParserLimits

COMPILE_SECONDS = 2.0  # of processor time
QUICK_SECONDS = 0.2  # after which a guide makes room for others that are new, and is tried again
COMPILE_BYTES = 256 << 20
COMPILE_STACK_BYTES = 4 << 20
# Of one mask, and what a request's lexer keeps: about 20 ms of a core at the worst, and 50 MB.
PARSER_LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=25_000,
    verbose_errors=False,  # the state of a parser is the text of an answer
)
