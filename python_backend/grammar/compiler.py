"""From guides to grammars, on two threads and in a process of their own.

    compiler = GrammarCompiler(Setup(...))
    grammar = compiler.compile(guide)     # a future, at once
    compiler.close()

A new guide is tried out by the worker process first. One that passed is remembered, and compiled
for each answer that follows it: a lexer's states are made as texts are walked and there is a limit
to them, so answers with one lexer would use up each other's, until none could follow the guide.
Trials are one at a time; a guide that is not through in a moment is tried again, with more time,
when no other waits that was not tried yet. Of what waits to be compiled the quickest comes first.
Nothing is done for a future that nobody holds any more.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future

from llguidance import LLMatcher

from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide
from python_backend.grammar.limits import PARSER_LIMITS, QUICK_SECONDS
from python_backend.grammar.messages import Setup, Tried, open_tokenizer
from python_backend.grammar.special_tokens import without_special_names
from python_backend.grammar.trials import Trials
from python_backend.request import STOPPED, RequestError

logger = logging.getLogger(__name__)

MAX_NEW = 64  # guides that wait for their trial
KNOWN_GUIDES = 256
KNOWN_CHARS = 64 << 20
LIVE_BYTES = 512 << 20
LEAST_BYTES = 128 << 10  # what the smallest grammar takes, 80 KiB, which trials do not count
_STACK_BYTES = 16 << 20  # more than the worker's, so that what passed there passes here


_Waiter = weakref.ref[Future[Grammar]]
# Seconds, a number that no other has, what to compile and for whom; nothing at the end.
_Job = tuple[float, int, tuple[Tried, _Waiter] | None]
# The seconds it may take, a number, a guide to try out; none at the end.
_Trial = tuple[float, int, Guide | None]


class GrammarCompiler:
    """Owns the threads, the trials and what is known of guides."""

    def __init__(self, setup: Setup) -> None:
        setup = setup._replace(tokenizer_json=without_special_names(setup.tokenizer_json))
        self._end_id = setup.end_id
        self._seconds = setup.seconds
        self._tokenizer = open_tokenizer(setup)
        self._trials = Trials(setup)
        self._lock = threading.Lock()  # of the next two
        self._known: OrderedDict[bytes, Tried] = OrderedDict()
        self._waiting: dict[bytes, list[_Waiter]] = {}  # for the trial of a guide
        self._new: queue.PriorityQueue[_Trial] = queue.PriorityQueue()
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._live: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._closing = False
        self._trial_thread = threading.Thread(target=self._try_all, name="guides", daemon=True)
        self._trial_thread.start()
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def compile(self, guide: Guide) -> Future[Grammar]:
        """A grammar for one answer, or a RequestError, once it is known. Raises RequestError
        `grammar_queue_full` when too many new guides wait."""
        future: Future[Grammar] = Future()
        with self._lock:
            tried = self._known.get(guide.digest)
            if tried is not None:
                self._known.move_to_end(guide.digest)
                self._put(tried, weakref.ref(future))
                return future
            if guide.digest not in self._waiting:
                if len(self._waiting) >= MAX_NEW:
                    raise RequestError(
                        "grammar_queue_full",
                        f"expected fewer than {MAX_NEW} new guides to wait for compilation, got "
                        "one more; try again",
                    )
                self._waiting[guide.digest] = []
                self._put_new(guide, min(QUICK_SECONDS, self._seconds))
            self._waiting[guide.digest].append(weakref.ref(future))
        return future

    def close(self) -> None:
        """End the threads and the process. Who still waits is refused."""
        self._closing = True
        self._put_new(None, math.inf)
        self._trial_thread.join()
        self._trials.close()
        self._jobs.put((math.inf, next(self._numbers), None))
        self._thread.join()

    # -- the thread of trials --------------------------------------------------------------------

    def _try_all(self) -> None:
        while True:
            seconds, _, guide = self._new.get()
            if guide is None:
                return
            if self._closing:
                self._refuse(guide, *STOPPED)
            elif self._is_waited_for(guide):
                self._try_out(guide, seconds)

    def _put_new(self, guide: Guide | None, seconds: float) -> None:
        self._new.put((seconds, next(self._numbers), guide))

    def _is_waited_for(self, guide: Guide) -> bool:
        with self._lock:
            if any(waiter() is not None for waiter in self._waiting[guide.digest]):
                return True
            del self._waiting[guide.digest]
        return False

    def _try_out(self, guide: Guide, seconds: float) -> None:
        try:
            tried = self._trials.try_out(guide, seconds)
        except Exception as error:
            logger.exception("grammar_trial_failed")
            tried = Tried("", f"expected to try the guide out, but {error}", broken=True)
        if tried.late and seconds < self._seconds:
            self._put_new(guide, self._seconds)
            return
        if tried.problem:
            self._refuse(guide, "internal" if tried.broken else "invalid_grammar", tried.problem)
            return
        with self._lock:
            self._remember(guide, tried)
            for waiter in self._waiting.pop(guide.digest):
                self._put(tried, waiter)

    def _refuse(self, guide: Guide, code: str, problem: str) -> None:
        with self._lock:
            waiters = self._waiting.pop(guide.digest)
        for waiter in waiters:
            if (future := waiter()) is not None:
                future.set_exception(RequestError(code, problem))

    def _remember(self, guide: Guide, tried: Tried) -> None:
        """Refusals are not: a slow machine may be quicker the next time."""
        self._known[guide.digest] = tried
        chars = sum(len(one.grammar) for one in self._known.values())
        while len(self._known) > 1 and (len(self._known) > KNOWN_GUIDES or chars > KNOWN_CHARS):
            chars -= len(self._known.popitem(last=False)[1].grammar)

    def _put(self, tried: Tried, waiter: _Waiter) -> None:
        self._jobs.put((tried.seconds, next(self._numbers), (tried, waiter)))

    # -- the thread that compiles ----------------------------------------------------------------

    def _compile_all(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            tried, waiter = job
            if (future := waiter()) is not None:
                self._settle(tried, future)
            del future  # else the last grammar lived until the next job

    def _settle(self, tried: Tried, future: Future[Grammar]) -> None:
        try:
            if self._closing:
                raise RequestError(*STOPPED)
            future.set_result(self._compile(tried))
        except RequestError as refusal:
            future.set_exception(refusal)
        except Exception as error:
            logger.exception("grammar_compile_failed")
            problem = f"expected to compile the guide, but {error}"
            future.set_exception(RequestError("internal", problem))

    def _compile(self, tried: Tried) -> Grammar:
        num_bytes = LEAST_BYTES + tried.num_bytes
        live = sum(grammar.num_bytes for grammar in self._live)
        if live and live + num_bytes > LIVE_BYTES:
            raise RequestError(
                "grammar_queue_full",
                f"expected the guides of running and waiting answers to take at most "
                f"{LIVE_BYTES >> 20} MiB, got one more of {num_bytes >> 10} KiB; try again",
            )
        matcher = LLMatcher(self._tokenizer, tried.grammar, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():  # of a guide that passed its trial, so it is not the client's
            raise ValueError(matcher.get_error().split("\n")[0])
        grammar = Grammar(matcher, num_bytes, self._end_id)
        self._live.add(grammar)
        return grammar
