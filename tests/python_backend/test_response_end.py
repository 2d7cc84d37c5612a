"""What is left of a request's way back when it has ended."""

from __future__ import annotations

import gc
import weakref

from python_backend.request import RequestError
from python_backend.responses import Responder, ResponseStream
from python_backend.sequence import AnswerSequence
from tests.python_backend.test_service import Client


class Others:
    """Answers that wait for the first; they lead back to their stream."""

    def __init__(self, stream: ResponseStream) -> None:
        self.stream = stream

    def begin(self) -> None:
        raise AssertionError


def test_a_stream_that_ended_keeps_no_answers_that_never_began() -> None:
    """Each would keep its grammar."""
    client = Client()
    responder = Responder(lambda key, reason: None, lambda: None)
    responder.start()
    sequences = [AnswerSequence(f"k{i}", 1, True, None, index=i) for i in range(2)]
    stream = ResponseStream("k", client, sequences)
    others = Others(stream)
    stream.begin_others, kept = others.begin, weakref.ref(others)
    responder.open(stream)
    responder.forget(stream, RequestError("internal", "expected one"))
    assert client.ended.wait(10)
    responder.close()
    gc.disable()  # it would find what leads back to itself
    del stream, others
    gone = kept() is None
    gc.enable()
    assert gone
