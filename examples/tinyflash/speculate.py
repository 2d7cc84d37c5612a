"""Greedy generation with DSpark drafts on the network alone: how many drafts are accepted.

    python -m examples.tinyflash.speculate --engine DIR --limit 64 --json acceptance.json

Every question is answered twice, with drafts and without. Each step with drafts verifies the anchor
and a whole block; the longest prefix of drafts that equals the network's own choices stays, and the
choice after it is the next anchor. What was rejected is overwritten by the rows that follow. The
prompt's decoder rows are trimmed to one window, as when serving.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch import DraftBatch, Int32Array, RaggedBatch, StepArrays
from engine.contiguous_cache import ContiguousCache
from engine.directory import Engine
from engine.network import Network
from engine.network.device import moved
from examples.tinyflash import device as device_operators
from examples.tinyflash.compare import check_outputs
from examples.tinyflash.evaluation import ANSWER_TOKENS, Report, digest, questions, reading
from examples.tinyflash.in_process import origin
from examples.tinyflash.tokenizer import EOS_ID, encoder
from python_backend.text.chat_input import ChatRequest

_REQUESTS_PER_BATCH = {"cpu": 64, "cuda": 512}


@dataclass
class Generation:
    """The tokens made after each prompt; `accepted[k]` verifications took k drafts."""

    outputs: list[list[int]]
    accepted: list[int] = field(default_factory=list)

    @property
    def mean_accepted(self) -> float | None:
        """Accepted drafts per verification; the choice behind them is not counted. None where
        nothing was verified, because each answer was one token."""
        if not sum(self.accepted):
            return None
        return float(np.dot(np.arange(len(self.accepted)), self.accepted) / sum(self.accepted))

    @property
    def acceptance_by_position(self) -> list[float]:
        """P(draft k is accepted), k = 1 …, all verifications counted; empty where none was."""
        if not sum(self.accepted):
            return []
        at_least = np.cumsum(self.accepted[::-1])[::-1]
        return [float(share) for share in at_least[1:] / at_least[0]]


class _Requests:
    """R requests of one batch in a contiguous cache, advanced together."""

    def __init__(self, network: Network, prompts: Sequence[Int32Array], room: int) -> None:
        config = network.config
        self._network = network
        self._device = network.weights.embed.device
        self._reach = config.engram_max_ngram_size - 1
        self.tokens = [[int(token) for token in prompt] for prompt in prompts]
        self.positions = [0] * len(prompts)  # tokens below it are in the cache for good
        self._floors = np.array([max(0, len(p) - config.sliding_window) for p in prompts])
        longest = max(len(prompt) for prompt in prompts) + room + config.dspark_block_size + 1
        self._cache = ContiguousCache(
            config, len(prompts), longest, network.dtype, quantize=True, device=self._device
        )

    def run(self, live: Sequence[int]) -> list[list[int]]:
        """The first choice behind every new decoder row of the `live` requests; nothing is kept."""
        batch = self._batch(live)
        output = self._network.forward(batch, self._cache)
        self._features, self._batch_rows = output.draft_features, batch
        choices = output.logits.argmax(-1).cpu().numpy()
        request = batch.request[batch.decoder_rows].cpu().numpy()
        return [choices[request == r].tolist() for r in live]

    def keep(self, live: Sequence[int], ends: Sequence[int]) -> None:
        """Confirm each live request's rows below its end; the tokens above it are dropped."""
        batch = self._batch_rows
        end = torch.zeros(len(self.tokens), dtype=torch.int64, device=self._device)
        end[torch.tensor(live, device=self._device)] = torch.tensor(ends, device=self._device)
        rows = batch.decoder_rows
        confirmed = batch.positions[rows] < end[batch.request[rows]]
        if self._network.drafts:
            kept = rows[confirmed]
            self._network.store_draft_context(
                self._features[confirmed], batch.request[kept], batch.positions[kept], self._cache
            )
        for r, last in zip(live, ends, strict=True):
            del self.tokens[r][last:]
            self.positions[r] = last

    def draft(self, live: Sequence[int], anchors: Sequence[int]) -> list[list[int]]:
        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._device)

        batch = DraftBatch(
            anchors=tensor(anchors),
            positions=tensor([self.positions[r] for r in live]),
            request=tensor(live),
            floor=tensor([int(self._floors[r]) for r in live]),
        )
        drafts: list[list[int]] = self._network.draft(batch, self._cache).tokens.tolist()
        return drafts

    def _batch(self, live: Sequence[int]) -> RaggedBatch:
        """The tokens of the live requests that have not run. Others take part with their last
        token, whose rows they write again, because the cache numbers requests by their place."""
        every = range(len(self.tokens))
        first = [self.positions[r] if r in set(live) else len(self.tokens[r]) - 1 for r in every]
        new = [self.tokens[r][first[r] :] for r in every]
        history = np.full((len(self.tokens), self._reach), -1, dtype=np.int32)
        for r in every:
            known = self.tokens[r][max(0, first[r] - self._reach) : first[r]]
            history[r, self._reach - len(known) :] = known
        zeros = np.zeros(len(self.tokens), dtype=np.int64)
        return StepArrays(
            tokens=np.concatenate([np.array(tokens, dtype=np.int32) for tokens in new]),
            query_start=np.cumsum([0, *map(len, new)], dtype=np.int32),
            first_position=np.array(first, dtype=np.int64),
            encoder_floor=zeros,
            decoder_floor=self._floors.astype(np.int64),
            write_floor=zeros,
            history=history,
            wants_logits=np.ones(len(self.tokens), dtype=np.bool_),
        ).to_torch(str(self._device), all_logits=True)


@torch.no_grad()
def generate(
    network: Network,
    prompts: Sequence[Int32Array],
    *,
    max_tokens: int,
    end_id: int,
    drafts: bool,
) -> Generation:
    """At most `max_tokens` tokens after each prompt, through `end_id`, always the first choice.

    Prompts are non-empty arrays of ids. Raises ConfigError for drafts of a model without stages.
    """
    outputs: list[list[int]] = []
    accepted = [0] * (network.config.dspark_block_size + 1)
    size = _REQUESTS_PER_BATCH[network.weights.embed.device.type]
    for first in range(0, len(prompts), size):
        some = prompts[first : first + size]
        requests = _Requests(network, some, max_tokens)
        live = list(range(len(some)))
        made: list[list[int]] = [[] for _ in some]
        choices = requests.run(live)
        requests.keep(live, [len(prompt) for prompt in some])
        anchors = [own[-1] for own in choices]
        for r, anchor in zip(live, anchors, strict=True):
            made[r].append(anchor)
        while True:
            pairs = [
                (r, a)
                for r, a in zip(live, anchors, strict=True)
                if a != end_id and len(made[r]) < max_tokens
            ]
            if not pairs:
                break
            live, anchors = [r for r, _ in pairs], [a for _, a in pairs]
            blocks = requests.draft(live, anchors) if drafts else [[] for _ in live]
            for r, anchor, block in zip(live, anchors, blocks, strict=True):
                requests.tokens[r] += [anchor, *block]
            ends, following = [], []
            for r, own, block in zip(live, requests.run(live), blocks, strict=True):
                taken = _common_prefix(own, block)
                new = _until_end([*block[:taken], own[taken]], end_id, max_tokens - len(made[r]))
                accepted[min(taken, len(new))] += 1
                made[r] += new
                ends.append(requests.positions[r] + 1 + taken)
                following.append(new[-1])
            requests.keep(live, ends)
            anchors = following
        outputs += made
    return Generation(outputs, accepted if drafts else [])


def _common_prefix(choices: Sequence[int], drafts: Sequence[int]) -> int:
    agree = [choice == draft for choice, draft in zip(choices, drafts, strict=False)]
    return agree.index(False) if False in agree else len(agree)


def _until_end(tokens: list[int], end_id: int, room: int) -> list[int]:
    """Up to `room` tokens, through the first `end_id`."""
    tokens = tokens[:room]
    return tokens[: tokens.index(end_id) + 1] if end_id in tokens else tokens


def acceptance(
    engine_dir: Path, *, limit: int, seed: int, max_tokens: int, dtype: str, device: str
) -> dict[str, Any]:
    """Held-out word problems answered with drafts and without.

    `accepted[k]` verifications took k drafts; `acceptance_by_position` counts all verifications;
    `share_of_texts_that_differ` compares the tokens of the two answers. Raises ConfigError for a
    model without draft stages, ValueError for more tokens than the engine is built for.
    """
    if device != "cpu":
        device_operators.install()
    engine = Engine.open(engine_dir)
    if not 1 <= max_tokens <= engine.build.max_seq_len:
        raise ValueError(
            f"expected --max-tokens of 1 to the engine's max_seq_len = {engine.build.max_seq_len}, "
            f"got {max_tokens}"
        )
    weights = moved(engine.load_weights(getattr(torch, dtype)), device)
    network = Network(engine.config, weights)
    asked = questions("arithmetic", limit, seed)
    prompts = [
        np.array(encoder().encode(ChatRequest([_user(q.prompt)]).render()), dtype=np.int32)
        for q in asked
    ]
    drafted, plain = (
        generate(network, prompts, max_tokens=max_tokens, end_id=EOS_ID, drafts=drafts)
        for drafts in (True, False)
    )
    differ = sum(a != b for a, b in zip(drafted.outputs, plain.outputs, strict=True))
    return {
        "n": len(prompts),
        "seed": seed,
        "asked": digest([q.prompt for q in asked]),
        "settings": {"dtype": dtype, "max_tokens": max_tokens} | origin(engine_dir, device),
        "accepted_per_verification": drafted.mean_accepted,
        "acceptance_by_position": drafted.acceptance_by_position,
        "accepted": drafted.accepted,
        "share_of_texts_that_differ": differ / len(prompts),
    }


def read(path: Path) -> Report:
    """What `acceptance` made. Raises ValueError for a file that holds none of it."""
    with reading(path, "results of speculate", "make them again"):
        loaded: Report = json.loads(path.read_text())
        f"{loaded['n']:d} {loaded['seed']:d} {loaded['asked']} {loaded['settings']['engine']}"
        f"{loaded['accepted_per_verification']:f} {loaded['share_of_texts_that_differ']:f}"
        [f"{share:f}" for share in loaded["acceptance_by_position"]]
    return loaded


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tinyflash.speculate",
        description="Count the drafts that are accepted on held-out word problems.",
        allow_abbrev=False,
    )
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=64, help="arithmetic questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=ANSWER_TOKENS)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=device_operators.DEVICES, default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    try:
        check_outputs(options.json, None)
        made = acceptance(
            options.engine, limit=options.limit, seed=options.seed, max_tokens=options.max_tokens,
            dtype=options.dtype, device=options.device,
        )  # fmt: skip
        print(json.dumps(made, indent=1))
        if options.json:
            options.json.write_text(json.dumps(made, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"speculate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("speculate: interrupted", file=sys.stderr)
        return 130
    return 0


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


if __name__ == "__main__":
    sys.exit(main())
