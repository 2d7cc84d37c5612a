"""Mixed traffic with faults for a long time: nothing may leak, every request must be accounted for.

    python benchmarks/load/soak.py --minutes 20 --out runs/soak.json

Workers send requests of every kind at once: answers to read to the end, streams that are cancelled,
connections that are closed, slow readers, deadlines that pass, guided answers, several answers to
one prompt, log probabilities of prompts, bad inputs, requests over capacity, storms of cancelled
requests, steps whose executor fails. In rounds: after each, traffic rests until the server is
empty, and what it holds is written down. The run passes when

- every request ended as its kind allows, for the client and, by its id, exactly once in the log;
- the server's own counters add up to what was sent;
- at every rest no page is held and nothing runs or waits;
- memory and open files are flat: after the first third of the rests they grow by at most 5 % and
  16 MiB of allocated memory (resident, without the pages of library files, which the kernel maps
  as it sees fit), and by 32 files (connections that are being closed);
- SIGTERM in the end gives exit status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
from harness import ROOT, Outcome, Server, http_stream, measured_on, percentiles, stream

from builder.cli import main as build

CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
VOCAB_SIZE = 4096
FAULT_SECONDS = 5.0
FAULT_TOKEN = 4000  # begins a prompt whose first step fails
SERVER = (
    *("--max-batch-size=16", "--max-num-tokens=512", "--num-global-pages=40"),
    *("--max-queued-requests=64", "--speculative", "--max-seq-len=4096"),
)
MANY = 3  # answers to one prompt
HELD = ("dsv41_num_requests_running", "dsv41_num_requests_waiting", "dsv41_kv_pages_used")
EMPTY_SECONDS = 30.0
BAD = (
    {"input_ids": [VOCAB_SIZE]},
    {"input_ids": [5], "max_tokens": 0},
    {"input_ids": [5], "max_tokens": 1_000_000},
    {"input_ids": [5], "text_input": "both"},
    {"max_tokens": 5},
    {"input_ids": [5], "beam_width": 2},
    {"input_ids": [5], "temperature": float("nan")},
    {"messages": "no JSON"},
    {"messages": json.dumps([{"role": "nobody", "content": "x"}])},
    {"input_ids": [5], "logit_bias": json.dumps({"5": "much"})},
    {"input_ids": [5], "top_p": 2.0},
)


class Traffic:
    """Requests by kind, and how they ended. A failed step ends everybody who has rows in it, and a
    storm can fill the queue for anybody."""

    def __init__(self, server: Server, seed: int, workers: int) -> None:
        self._server = server
        self._workers = workers
        self._rng = Random(seed)
        self._count = 0
        self._next_fault = 0.0
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self._prefix = [self._rng.randrange(10, 3000) for _ in range(700)]
        self._kinds: tuple[tuple[int, Callable[[grpc.aio.Channel], Awaitable[None]]], ...] = (
            (30, self.answer),
            (10, self.prefix),
            (10, self.chat),
            (4, self.guided),
            (4, self.many),
            (4, self.prompt_log_probs),
            (8, self.cancel),
            (6, self.disconnect),
            (4, self.slow_reader),
            (4, self.deadline),
            (10, self.bad),
            (4, self.over_capacity),
            (1, self.storm),
            (2, self.fault),
        )

    async def work_until(self, until: float) -> None:
        """All workers; the round has one request of each kind at least."""
        await asyncio.gather(self._tour(), *(self._work(until) for _ in range(self._workers)))

    async def _tour(self) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._server.grpc}") as channel:
            for _, kind in self._kinds:
                await kind(channel)

    async def _work(self, until: float) -> None:
        weights = [weight for weight, _ in self._kinds]
        while time.monotonic() < until:
            async with grpc.aio.insecure_channel(
                f"127.0.0.1:{self._server.grpc}", options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                for _ in range(self._rng.randint(1, 8)):
                    (kind,) = self._rng.choices([k for _, k in self._kinds], weights)
                    await kind(channel)
                    if time.monotonic() >= until:
                        return

    async def answer(self, channel: grpc.aio.Channel) -> None:
        rng = self._rng
        await self._send(channel, "answer", self._ids(rng.randint(1, 400)) | self._options())

    async def prefix(self, channel: grpc.aio.Channel) -> None:
        rng = self._rng
        tail = [rng.randrange(10, 3000) for _ in range(rng.randint(1, 60))]
        ids = self._prefix[: rng.randrange(100, 700)] + tail
        await self._send(channel, "prefix", {"input_ids": ids, "max_tokens": rng.randint(1, 12)})

    async def chat(self, channel: grpc.aio.Channel) -> None:
        text = self._rng.choice(("What can you do?", "Grüße, 世界 🙂", "Say hello. " * 20))
        messages = json.dumps([{"role": "user", "content": text}])
        await self._send(
            channel, "chat", {"messages": messages, "max_tokens": 24, "stop_words": ["."]}
        )

    async def guided(self, channel: grpc.aio.Channel) -> None:
        """Some guides are new and some are known."""
        text = {"type": "string", "maxLength": self._rng.randint(1, 60)}
        schema = {"type": "object", "properties": {"answer": text}, "required": ["answer"]}
        values = self._ids(self._rng.randint(1, 100)) | self._options()
        guide = json.dumps(schema)
        values |= {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": guide}
        await self._send(channel, "guided", values)

    async def many(self, channel: grpc.aio.Channel) -> None:
        """Prompts of less than a page, whose answers start together, and longer ones."""
        values = self._ids(self._rng.randint(1, 400)) | self._options()
        await self._send(channel, "many", values | {"num_return_sequences": MANY})

    async def prompt_log_probs(self, channel: grpc.aio.Channel) -> None:
        values = self._ids(self._rng.randint(1, 400)) | self._options() | {"prompt_logprobs": 2}
        await self._send(channel, "prompt log probabilities", values)

    async def cancel(self, channel: grpc.aio.Channel) -> None:
        values = self._ids(self._rng.randint(1, 300)) | {"max_tokens": 300, "end_id": -1}
        leave = self._rng.randint(0, 4)
        await self._send(channel, "cancel", values, leave_after=leave, allowed={"cancelled"})

    async def disconnect(self, channel: grpc.aio.Channel) -> None:
        del channel
        values = self._ids(self._rng.randint(1, 300)) | {"max_tokens": 300, "stream": True}
        outcome = self._new("disconnect")
        await http_stream(self._server.http, outcome, values, leave_after=self._rng.randint(1, 4))
        self._ended(outcome, {"answer", "cancelled", "internal", "unavailable"})

    async def slow_reader(self, channel: grpc.aio.Channel) -> None:
        values = self._ids(20) | {"max_tokens": 12, "end_id": -1}
        await self._send(channel, "slow reader", values, pause=0.2)

    async def deadline(self, channel: grpc.aio.Channel) -> None:
        values = self._ids(50) | {"max_tokens": 300, "end_id": -1, "timeout": 300_000}
        await self._send(channel, "deadline", values, allowed={"deadline_exceeded"})

    async def bad(self, channel: grpc.aio.Channel) -> None:
        values = self._rng.choice(BAD)
        await self._send(channel, "bad", values, allowed={"invalid_argument"}, only=True)

    async def over_capacity(self, channel: grpc.aio.Channel) -> None:
        values = self._ids(3000) | {"max_tokens": 1000}
        await self._send(channel, "over capacity", values, allowed={"over_capacity"}, only=True)

    async def storm(self, channel: grpc.aio.Channel) -> None:
        """Many at once, all cancelled; a few storms together fill the queue."""
        await asyncio.gather(
            *(self.cancel(channel) for _ in range(self._rng.randint(4, 2 * self._workers)))
        )

    async def fault(self, channel: grpc.aio.Channel) -> None:
        """Never two in a row: three failed steps in a row end the server."""
        if time.monotonic() < self._next_fault:
            return
        self._next_fault = time.monotonic() + FAULT_SECONDS
        values = {"input_ids": [FAULT_TOKEN, *range(10, 30)], "max_tokens": 5}
        await self._send(channel, "fault", values, allowed={"internal", "unavailable"}, only=True)

    def _ids(self, count: int) -> dict[str, Any]:
        return {"input_ids": [self._rng.randrange(10, 3000) for _ in range(count)]}

    def _options(self) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
        for name, value in (
            ("temperature", 0.8),
            ("top_k", 40),
            ("repetition_penalty", 1.1),
            ("logprobs", 3),
            ("speculative", False),
            ("end_id", -1),
        ):
            if rng.random() < 0.3:
                options[name] = value
        return options

    def _new(self, kind: str) -> Outcome:
        self._count += 1
        return Outcome(f"soak-{self._count}", kind)

    async def _send(
        self,
        channel: grpc.aio.Channel,
        kind: str,
        values: dict[str, Any],
        *,
        allowed: set[str] = frozenset(),  # type: ignore[assignment]
        only: bool = False,
        **more: Any,
    ) -> None:
        outcome = self._new(kind)
        await stream(channel, outcome, {"stream": True, **values}, **more)
        # Everybody may share a step with a fault, or find the queue full.
        self._ended(outcome, allowed if only else {*allowed, "answer", "internal", "unavailable"})

    def _ended(self, outcome: Outcome, allowed: set[str]) -> None:
        self.outcomes.append(outcome)
        known = {"internal": "a fault was ordered", "unavailable": "queue"}
        sentence = known.get(outcome.end, "")
        if outcome.end not in allowed or sentence not in outcome.message:
            self.problems.append(
                f"{outcome.request_id} ({outcome.kind}) ended with {outcome.end}: "
                f"{outcome.message[:200]}"
            )


async def rest(server: Server) -> tuple[dict[str, float], float]:
    """The metrics once the server is empty, and how long that took."""
    started = time.monotonic()
    while True:
        values = await asyncio.to_thread(server.values)
        held = sum(value for name, value in values.items() if name.split()[0] in HELD)
        seconds = time.monotonic() - started
        if not held or seconds > EMPTY_SECONDS:
            await asyncio.sleep(0.3)  # two rounds of publishing
            return await asyncio.to_thread(server.values), seconds
        await asyncio.sleep(0.05)


async def rounds(server: Server, traffic: Traffic, seconds: float, number: int) -> list[Any]:
    rests: list[dict[str, Any]] = []
    for i in range(number):
        until = time.monotonic() + seconds / number
        await traffic.work_until(until)
        values, emptied_after = await rest(server)
        held = {n: v for n, v in values.items() if n.split()[0] in HELD}
        if any(held.values()):
            traffic.problems.append(f"rest {i}: still held after {EMPTY_SECONDS} s: {held}")
        rests.append(
            {
                "requests": len(traffic.outcomes),
                "emptied_after_s": round(emptied_after, 2),
                "prefix_cache_pages": values["dsv41_prefix_cache_pages"],
                **server.memory(),
            }
        )
        print(json.dumps(rests[-1]), flush=True)
    return rests


def growth(rests: list[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """From the end of the first third of the rests to the last one."""
    base, last = rests[(len(rests) - 1) // 3], rests[-1]
    found = {}
    for name in ("model_allocated", "server_allocated", "model_files", "server_files"):
        more = last[name] - base[name]
        slack = base[name] * 0.05 + 16 * 2**20 if name.endswith("allocated") else 32
        found[name] = {"from": base[name], "to": last[name], "more": more}
        if len(rests) >= 6 and more > slack:
            problems.append(f"{name} grew by {more}")
    return found


def accounts(
    server: Server, traffic: Traffic, before: dict[str, float], after: dict[str, float]
) -> dict[str, Any]:
    """Every request once in the log with the end that its client saw, and once in the counters."""
    problems, ends = traffic.problems, server.ends()
    unseen = 0
    for outcome in traffic.outcomes:
        events = ends.get(outcome.request_id, [])
        if len(events) > 1:
            problems.append(f"{outcome.request_id} ended {len(events)} times")
        elif not events:
            unseen += 1
            if outcome.end != "cancelled" or outcome.num_tokens:
                problems.append(f"{outcome.request_id} ({outcome.end}) is not in the log")
        elif outcome.end != "cancelled":  # who leaves may have been answered in the meantime
            answered = events[0].get("finish_reason") in ("stop", "length")
            if answered != (outcome.end == "answer"):
                problems.append(f"{outcome.request_id}: {outcome.end}, log {events[0]}")
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    by_reason = {n.split()[1]: v for n, v in more.items() if "request_success_total" in n}
    by_code = {n.split()[1]: v for n, v in more.items() if "admission_rejections_total" in n}
    counted = sum(by_reason.values()) + sum(by_code.values())
    # The core counts each answer to a prompt. The others are begun behind the first one's first
    # token, so that of a request which ended with an error they may never have been.
    whole = Counter(o.end == "answer" for o in traffic.outcomes if o.kind == "many")
    least = len(traffic.outcomes) - unseen + (MANY - 1) * whole[True]
    if not least <= counted <= least + (MANY - 1) * whole[False]:
        problems.append(
            f"{len(traffic.outcomes)} requests were sent, {unseen} left before the server took "
            f"them, {least} at least should be in its counters, {counted} are"
        )
    # A log line is of all answers to a prompt, so that reasons are compared where there is one.
    single = (e for o in traffic.outcomes if o.kind != "many" for e in ends.get(o.request_id, []))
    logged = Counter(event.get("finish_reason") for event in single)
    for reason in ("stop", "length"):
        more_of_many = by_reason[reason] - logged[reason]
        if not 0 <= more_of_many <= MANY * whole.total():
            problems.append(f"{reason}: {by_reason[reason]} counted, {logged[reason]} in the log")
    of_many = sum(by_reason[reason] - logged[reason] for reason in ("stop", "length"))
    if not MANY * whole[True] <= of_many <= MANY * whole[True] + (MANY - 1) * whole[False]:
        problems.append(f"{of_many} answers to {whole[True]} prompts with {MANY} each are counted")
    if more["dsv41_failed_steps_total"] == 0 and any(o.kind == "fault" for o in traffic.outcomes):
        problems.append("no step failed, though faults were ordered")
    return {
        "sent": len(traffic.outcomes),
        "left_before_the_server_took_them": unseen,
        "finished": by_reason,
        "refused": by_code,
        "failed_steps": more["dsv41_failed_steps_total"],
        "preemptions": more["dsv41_num_preemptions_total"],
        "prefix_hits": more["dsv41_prefix_cache_hits_total"],
        "accepted_drafts": more["dsv41_spec_decode_num_accepted_tokens_total"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, help="rests; one a minute where not given")
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("--out", type=Path, help="the report as JSON")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    engine = options.folder / "engine"
    if build(["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}"]):
        return 1
    server = Server(engine, options.folder, *SERVER, fault_token=FAULT_TOKEN)
    try:
        server.wait_until_ready()
        traffic = Traffic(server, options.seed, options.workers)
        number = options.rounds or max(2, round(options.minutes))

        async def run() -> tuple[dict[str, float], list[Any], dict[str, float]]:
            before, _ = await rest(server)
            rests = await rounds(server, traffic, options.minutes * 60, number)
            return before, rests, (await rest(server))[0]

        started = time.monotonic()
        before, rests, after = asyncio.run(run())
        seconds = time.monotonic() - started
        account = accounts(server, traffic, before, after)
        status = server.stop()
        if status:
            traffic.problems.append(f"exit status {status} after SIGTERM: {server.said()[-300:]}")
    finally:
        if server.process.poll() is None:
            server.process.kill()
    report = {
        "benchmark": "soak",
        **measured_on(),
        "seconds": round(seconds, 1),
        "workers": options.workers,
        "server": list(SERVER),
        "accounts": account,
        "ends": {
            kind: dict(Counter(o.end for o in traffic.outcomes if o.kind == kind))
            for kind in sorted({o.kind for o in traffic.outcomes})
        },
        "first_token_ms": percentiles([o.first for o in traffic.outcomes if o.first is not None]),
        "growth": growth(rests, traffic.problems),
        "rests": rests,
        "problems": traffic.problems,
        "passed": not traffic.problems,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "rests"}))
    return int(bool(traffic.problems))


if __name__ == "__main__":
    sys.exit(main())
