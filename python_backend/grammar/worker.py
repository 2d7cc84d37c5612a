"""The process that tries guides out, so that none can hang or crash the server.

Guides come on standard input and results leave on standard output, both pickled; the first thing
that comes is the setup. Each guide is compiled in a fork of this process with bounds on processor
time, memory and stack: whatever a hostile one does ends with the fork. Nothing else runs here, so
forking is safe.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
import traceback

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from python_backend.grammar.guide import Guide, GuideError, GuideKind
from python_backend.grammar.limits import (
    COMPILE_BYTES,
    COMPILE_STACK_BYTES,
    PARSER_LIMITS,
)
from python_backend.grammar.messages import Setup, Tried, open_tokenizer
from python_backend.grammar.translate import translate

_PAGE = resource.getpagesize()


def main() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    setup: Setup = pickle.load(source)
    tokenizer = open_tokenizer(setup)
    # Memory that any guide makes a fork touch, and that costs the server nothing.
    floor = _try_in_fork(Guide(GuideKind.JSON, ""), setup.seconds, setup, tokenizer).num_bytes
    while True:
        try:
            guide, seconds = pickle.load(source)
        except EOFError:
            return
        tried = _try_in_fork(guide, seconds, setup, tokenizer)
        pickle.dump(tried._replace(num_bytes=max(0, tried.num_bytes - floor)), sink)
        sink.flush()


def _try_in_fork(guide: Guide, seconds: float, setup: Setup, tokenizer: LLTokenizer) -> Tried:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            _bound(seconds)
            with os.fdopen(write_end, "wb") as pipe:
                pickle.dump(_try(guide, setup, tokenizer), pipe)
            os._exit(0)
        except MemoryError:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status == 0:
        tried: Tried = pickle.loads(result)
        return tried
    if os.waitstatus_to_exitcode(status) == 2:
        problem = "expected to compile the guide, but that failed; look at the log"
        return Tried("", problem, broken=True)
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    if late:
        reason = f"one that takes more than {seconds:g} seconds"
    else:
        reason = f"one too deep or that takes more than {COMPILE_BYTES >> 20} MiB"
    return Tried("", f"expected a guide that can be compiled, got {reason}; simplify it", late=late)


def _bound(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (_held(0) + COMPILE_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (COMPILE_STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(guide: Guide, setup: Setup, tokenizer: LLTokenizer) -> Tried:
    before = _held(1)

    def check(grammar: str) -> str:
        return LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS).get_error()

    try:
        grammar = translate(guide, check, setup.reasoning_end)
    except GuideError as error:
        return Tried("", str(error))
    begun = time.process_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
    seconds = time.process_time() - begun
    mask = allocate_token_bitmask(1, setup.vocab_size)
    fill_next_token_bitmask(matcher, mask)
    if matcher.is_error() or not np.any(mask):
        reason = matcher.get_error().split("\n")[0]
        if matcher.stop_reason() != "ParserTooComplex":
            reason = "one that no text follows"
        return Tried("", f"expected a guide that can be followed, got {reason}; correct it")
    return Tried(grammar, "", _held(1) - before, seconds)


def _held(column: int) -> int:
    """Bytes of this process: column 0 all its addresses, 1 what is in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * _PAGE


if __name__ == "__main__":
    main()
