"""From guides to grammars, on a thread and in a process of their own.

    compiler = GrammarCompiler(Setup(...))
    grammar = compiler.compile(guide)     # a future, at once
    compiler.close()

A new guide is tried out by the worker process first, then compiled here; one that was compiled
lately is at hand. One guide is compiled at a time, so a slow one delays other new ones, and nobody
else.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from llguidance import LLMatcher

from python_backend.grammar.guide import Guide
from python_backend.grammar.limits import PARSER_LIMITS
from python_backend.grammar.messages import Setup, Tried, open_tokenizer
from python_backend.grammar.special_tokens import without_special_names
from python_backend.request import RequestError

logger = logging.getLogger(__name__)

MAX_WAITING = 64
CACHED_GRAMMARS = 256
CACHED_BYTES = 512 << 20
_STACK_BYTES = 16 << 20  # more than the worker's, so that what passed there passes here


class Grammar:
    """A compiled guide, of so many bytes. `end_id` stands for the end of a complete text."""

    def __init__(self, prototype: LLMatcher, num_bytes: int, end_id: int) -> None:
        self._prototype = prototype
        self.num_bytes = num_bytes
        self.end_id = end_id

    def matcher(self) -> LLMatcher:
        """At the start of an answer."""
        return self._prototype.deep_copy()


class _Job(NamedTuple):
    guide: Guide
    future: Future[Grammar]


class GrammarCompiler:
    """Owns the thread, the worker process (from the first guide on) and the cache."""

    def __init__(self, setup: Setup) -> None:
        hidden = without_special_names(setup.tokenizer_json)
        self._setup = setup._replace(tokenizer_json=hidden)
        self._tokenizer = open_tokenizer(self._setup)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Future[Grammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._worker: subprocess.Popen[bytes] | None = None
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def compile(self, guide: Guide) -> Future[Grammar]:
        """The guide's grammar, or a RequestError, once it is known. Raises RequestError
        `grammar_queue_full` when too many new guides wait."""
        with self._lock:
            future = self._cache.get(guide.digest)
            if future is not None:
                self._cache.move_to_end(guide.digest)
                return future
            if self._num_waiting >= MAX_WAITING:
                raise RequestError(
                    "grammar_queue_full",
                    f"expected fewer than {MAX_WAITING} new guides to wait for compilation, got "
                    "one more; try again",
                )
            future = self._cache[guide.digest] = Future()
            self._num_waiting += 1
        self._jobs.put(_Job(guide, future))
        return future

    def close(self) -> None:
        """End the thread, once it has answered what waits, and the process."""
        self._jobs.put(None)
        self._thread.join()
        self._end_worker()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                grammar = self._compile(job.guide)
            except Exception as problem:
                self._settle(job, None)
                job.future.set_exception(_as_request_error(problem))
            else:
                self._settle(job, grammar)
                job.future.set_result(grammar)

    def _compile(self, guide: Guide) -> Grammar:
        tried = self._try(guide)
        if tried.problem:
            raise RequestError("internal" if tried.broken else "invalid_grammar", tried.problem)
        matcher = LLMatcher(self._tokenizer, tried.grammar, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise RequestError("invalid_grammar", matcher.get_error().split("\n")[0])
        return Grammar(matcher, tried.num_bytes, self._setup.end_id)

    def _settle(self, job: _Job, grammar: Grammar | None) -> None:
        """Keep a grammar as long as there is room; refusals are not kept."""
        with self._lock:
            self._num_waiting -= 1
            if grammar is None:
                self._cache.pop(job.guide.digest, None)
                return
            known = [f.result().num_bytes for f in self._cache.values() if f.done()]
            held = sum(known) + grammar.num_bytes
            for digest, future in list(self._cache.items()):
                if held <= CACHED_BYTES and len(self._cache) <= CACHED_GRAMMARS:
                    break
                if future.done():
                    held -= future.result().num_bytes
                    del self._cache[digest]

    # -- the worker process ----------------------------------------------------------------------

    def _try(self, guide: Guide) -> Tried:
        """A worker that has ended is started again, once."""
        for last in (False, True):
            try:
                worker = self._running_worker()
                assert worker.stdin
                assert worker.stdout
                pickle.dump(guide, worker.stdin)
                worker.stdin.flush()
                tried: Tried = pickle.load(worker.stdout)
                return tried
            except Exception:
                logger.exception("grammar_worker_failed")
                self._end_worker()
                if last:
                    raise
        raise AssertionError

    def _running_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "python_backend.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert self._worker.stdin
            pickle.dump(self._setup, self._worker.stdin)
        return self._worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()


def _as_request_error(problem: Exception) -> RequestError:
    if isinstance(problem, RequestError):
        return problem
    return RequestError("internal", f"expected to compile the guide, but {problem}")
