"""New guides tried out in a process of their own."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys

from python_backend.grammar.guide import Guide
from python_backend.grammar.messages import Setup, Tried

logger = logging.getLogger(__name__)


class Trials:
    """Owns the worker process, from the first guide on. For one thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._worker: subprocess.Popen[bytes] | None = None

    def try_out(self, guide: Guide, seconds: float) -> Tried:
        """In so many seconds of a processor. A worker that has ended is started again, once."""
        for last in (False, True):
            try:
                worker = self._running_worker()
                assert worker.stdin
                assert worker.stdout
                pickle.dump((guide, seconds), worker.stdin)
                worker.stdin.flush()
                tried: Tried = pickle.load(worker.stdout)
                return tried
            except Exception:
                logger.exception("grammar_worker_failed")
                self.close()
                if last:
                    raise
        raise AssertionError

    def close(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()

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
