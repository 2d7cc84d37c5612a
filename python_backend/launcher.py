"""dsv41-serve: check everything, start the Triton server, prove that it works, stop it cleanly.

Progress and addresses go to stdout for people, JSON log lines to stderr or --log-file. Exit status
0 after SIGTERM or SIGINT, 1 with one sentence when something cannot work or the server ended.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from python_backend.host import missing

try:
    from python_backend.host.errors import HostError
    from python_backend.host.files import ServerFiles
    from python_backend.host.instances import remove_dead_instances
    from python_backend.host.options import ServeOptions, read_options
    from python_backend.host.process import ServerProcess
    from python_backend.host.repository import MODEL_NAME
except ModuleNotFoundError as error:
    sys.exit(f"dsv41-serve: {missing.sentence(error)}")

_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = read_options(arguments)
        return _serve(options)
    except ModuleNotFoundError as error:  # the numerical library is imported late
        print(f"dsv41-serve: {missing.sentence(error)}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:  # every refusal of ours is a ValueError
        print(f"dsv41-serve: {error}", file=sys.stderr)
        return 1


def _serve(options: ServeOptions) -> int:
    stop_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_asked.set())
    started = time.monotonic()
    for removed in remove_dead_instances():
        _say(f"removed {removed}, left behind by a server that died")
    files = ServerFiles.find()
    options.addresses.check_free()
    core_failed = threading.Event()
    shown = started

    def on_event(event: dict[str, Any]) -> None:
        nonlocal shown
        if event["event"] == "load_progress":
            now = time.monotonic()
            if event["share"] == 1 or now - shown >= _PROGRESS_SECONDS:
                shown = now
                _say(f"{event['stage']}: {event['share']:.0%}")
        elif event["event"] == "core_failed":
            core_failed.set()

    with _open_log(options.log_file) as log:
        limits = _check_engine(options)
        server = ServerProcess.start(
            files,
            options.addresses,
            {**options.model_parameters(), **limits},
            drain_seconds=options.drain_seconds,
            slow_reader_seconds=options.slow_reader_seconds,
            log=log,
            on_event=on_event,
        )
        try:
            if server.wait_until_ready(stop_asked.is_set):
                _cut_slow_readers(server, options.slow_reader_seconds)
                _say_ready(options, time.monotonic() - started)
            while not stop_asked.wait(_POLL_SECONDS):
                reason = "the serving core failed" if core_failed.is_set() else server.failure()
                if reason is not None:
                    raise HostError(reason)
            _say("stopping: running requests may end, new ones are refused")
            server.stop()
        finally:
            server.kill()
    _say("stopped")
    return 0


def _open_log(path: Path | None) -> contextlib.AbstractContextManager[TextIO]:
    if path is None:
        return contextlib.nullcontext(sys.stderr)
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise HostError(
            f"expected log_file to be a file that can be written, got {path}: {error.strerror}; "
            "correct the path"
        ) from None


def _check_engine(options: ServeOptions) -> dict[str, str]:
    """Everything that can be known before the server starts, so that it is said at once. Returns
    the settings that clients read from the model's configuration, also where nobody set them."""
    # The numerical library loads here and takes seconds, so what is cheap was checked before.
    from python_backend.service import check, open_events

    _say(f"checking {options.engine}")
    checked = check(options.engine, options.settings)
    events = open_events(checked.settings.kv_events)
    if events is not None:  # the model opens them again
        events.close()
    config, limits = checked.engine.config, checked.limits()
    _say(
        f"engine with {config.num_hidden_layers} layers; up to {limits.max_batch_size} requests at "
        f"once, {limits.max_seq_len} tokens each; caches of "
        f"{(limits.num_global_pages - 1) * limits.global_page_tokens} tokens"
    )
    if checked.text is None:
        _say("the engine has no tokenizer.json: it takes and gives token ids only")
    return {n: str(getattr(limits, n)) for n in ("max_batch_size", "max_queued_requests")}


def _cut_slow_readers(server: ServerProcess, seconds: float) -> None:
    if seconds:
        try:
            server.cut_slow_readers(seconds)
        except OSError as error:
            _say(f"HTTP clients that do not read are not cut: {error.strerror}")


def _say_ready(options: ServeOptions, seconds: float) -> None:
    http, grpc = options.addresses.url("http"), options.addresses.url("grpc")
    _say(f"ready after {seconds:.1f} s: one token was made")
    _say(f"  HTTP     http://{http}/v2/models/{MODEL_NAME}/generate_stream")
    _say(f"  gRPC     {grpc}, model {MODEL_NAME}")
    _say(f"  metrics  http://{options.addresses.url('metrics')}/metrics")


def _say(sentence: str) -> None:
    print(f"dsv41-serve: {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
