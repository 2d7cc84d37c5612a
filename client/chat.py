"""A conversation with the deployment: it keeps the history, the server renders and remembers it.

    with GrpcClient() as client:
        chat = Chat(client)
        with chat.ask("What is 3 * 4?") as answer:
            for chunk in answer:
                print(chunk.text_output, end="", flush=True)
        chat.ask("And doubled?").result()

Every turn sends all messages so far; what earlier turns put into the server's prefix cache is not
computed again (`cached_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from client.http import HttpClient
from client.protocol import (
    DeploymentError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
)
from client.stream import GenerateStream

if TYPE_CHECKING:
    from client.grpc import GrpcClient

THINK_END = "</think>"
DEFAULT_MAX_TOKENS = 256  # leaves room for the conversation in a small engine too


class Chat:
    """One conversation. `messages` is its history and may be changed between turns.

    system: how the assistant shall behave. thinking: the assistant reasons before it answers.
    options: more fields of each `GenerateRequest`, such as max_tokens, temperature, tools.
    """

    def __init__(
        self,
        client: GrpcClient | HttpClient,
        *,
        system: str | None = None,
        thinking: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        self.messages: list[Mapping[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._client = client
        self._thinking = thinking
        self._timeout = timeout
        self._options = {"max_tokens": DEFAULT_MAX_TOKENS} | options

    def ask(self, content: str) -> ChatAnswer:
        """Send a user message; the answer streams. It joins the history when it has ended, also
        when it was cancelled in mid-sentence; a turn that got no answer at all leaves no trace."""
        question = {"role": "user", "content": content}
        request = GenerateRequest(
            messages=[*self.messages, question], thinking=self._thinking or None, **self._options
        )
        stream = self._client.stream(request, timeout=self._timeout)

        def keep(result: GenerateResult) -> None:
            if result.output_ids.size:
                self.messages += [question, assistant_message(result.text_output, self._thinking)]

        return ChatAnswer(stream, keep)


class ChatAnswer(Iterator[GenerateChunk]):
    """A running answer: as `GenerateStream`, and its end goes to the conversation's history."""

    def __init__(self, stream: GenerateStream, keep: Callable[[GenerateResult], None]) -> None:
        self._stream = stream
        self._keep: Callable[[GenerateResult], None] | None = keep

    def __next__(self) -> GenerateChunk:
        try:
            return next(self._stream)
        except StopIteration:
            self.result()
            raise

    def cancel(self) -> None:
        self._stream.cancel()

    def result(self) -> GenerateResult:
        """Waits for the rest; the whole answer. Raises DeploymentError when it failed."""
        result = self._stream.result()
        if self._keep is not None:
            self._keep(result)
            self._keep = None
        return result

    @property
    def time_to_first_token(self) -> float | None:
        return self._stream.time_to_first_token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        if kind is None:
            self.result()


def assistant_message(text: str, thinking: bool) -> Mapping[str, str]:
    """The history's form of an answer. A thinking assistant's text is reasoning up to `</think>`;
    one that was cut short before it has no content yet."""
    if not thinking:
        return {"role": "assistant", "content": text}
    reasoning, _, content = text.partition(THINK_END)
    return {"role": "assistant", "reasoning_content": reasoning, "content": content}


def converse(chat: Chat, turns: Sequence[str] | TextIO, *, say: Callable[[str], None]) -> bool:
    """Ask turn after turn and print the answers to standard output as they come.

    `turns` is a list, or a terminal that is read line by line until /exit or its end. An interrupt
    cancels the answer that runs; on a terminal the conversation goes on. `say` gets what is not
    part of an answer. True unless a turn of a list was interrupted.
    """
    if not isinstance(turns, Sequence):
        _interactive(chat, turns, say)
        return True
    return all(_turn(chat, turn, say) for turn in turns)


def _interactive(chat: Chat, terminal: TextIO, say: Callable[[str], None]) -> None:
    say("Type a message; /exit or Ctrl-D ends, Ctrl-C cancels an answer.")
    while True:
        print("> ", end="", flush=True)
        try:
            line = terminal.readline()
        except KeyboardInterrupt:
            print()
            continue
        if not line or line.strip() == "/exit":
            break
        if line.strip():
            try:
                _turn(chat, line.strip(), say)
            except (DeploymentError, ValueError) as error:  # the next message may fare better
                say(f"dsv41-client: {error}")
            except KeyboardInterrupt:  # before there was an answer, or again while it ended
                print()


def _turn(chat: Chat, content: str, say: Callable[[str], None]) -> bool:
    """One answer, printed; False when it was interrupted."""
    answer = chat.ask(content)
    came = False
    try:
        for chunk in answer:
            came = True
            print(chunk.text_output, end="", flush=True)
    except KeyboardInterrupt:
        answer.cancel()
    finally:
        if came:
            print(flush=True)
    result = answer.result()
    shown = {
        "input": result.num_input_tokens,
        "cached": result.cached_tokens,
        "output": int(result.output_ids.size),
        "finish": result.finish_reason,
    }
    say("  ".join(f"{name} {value}" for name, value in shown.items() if value is not None))
    return result.finish_reason is not FinishReason.CANCELLED
