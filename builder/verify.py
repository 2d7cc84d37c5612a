"""`dsv41-build verify`: an engine's logits against those of the checkpoint it should stand for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from builder.checkpoint import Checkpoint
from builder.forward import check_tokens, read_tokens
from builder.progress import Progress
from engine.config import ConfigError
from engine.directory import Engine
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, check_forward, run_forward
from engine.tensor_source import CountedSource, total_bytes


@dataclass(frozen=True)
class Limits:
    """What may at most differ; None is not checked."""

    max_error: float | None
    min_cosine: float | None
    min_agreement: float | None
    max_kl: float | None


@dataclass(frozen=True)
class Comparison:
    """Logits [T, V] of an engine against the reference; one entry per position in `kl`."""

    positions: int
    max_error: float  # largest |difference| of a logit
    mean_error: float  # mean |difference|
    min_cosine: float  # of a position's logits, the least similar position
    mean_cosine: float
    agreement: float  # share of positions with the same arg max
    mean_kl: float  # KL(reference ‖ engine) in nats
    max_kl: float
    kl: tuple[float, ...]

    def failures(self, limits: Limits) -> list[str]:
        """One sentence part for each limit that is not kept. NaN keeps none."""
        checks = (
            ("max_error", self.max_error, limits.max_error, 1),
            ("min_cosine", self.min_cosine, limits.min_cosine, -1),
            ("agreement", self.agreement, limits.min_agreement, -1),
            ("mean_kl", self.mean_kl, limits.max_kl, 1),
        )
        return [
            f"{name} is {value:.6g}, expected {'at most' if sign > 0 else 'at least'} {limit:g}"
            for name, value, limit, sign in checks
            if limit is not None and not sign * value <= sign * limit
        ]


def compare_logits(reference: torch.Tensor, engine: torch.Tensor) -> Comparison:
    """Both [T, V], any float dtype; everything is computed in float64."""
    reference, engine = reference.double(), engine.double()
    difference = (engine - reference).abs()
    cosine = torch.nn.functional.cosine_similarity(reference, engine, dim=-1)
    log_p, log_q = reference.log_softmax(-1), engine.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = reference.argmax(-1) == engine.argmax(-1)
    return Comparison(
        positions=reference.shape[0],
        max_error=float(difference.max()),
        mean_error=float(difference.mean()),
        min_cosine=float(cosine.min()),
        mean_cosine=float(cosine.mean()),
        agreement=float(same.double().mean()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        kl=tuple(kl.tolist()),
    )


def verify(args: argparse.Namespace) -> None:
    """Run the command; its options are those of builder/cli.py.

    Raises ConfigError for tokens or configurations that do not fit, for a checkpoint whose logits
    are not finite, and with what differs too much where a limit is not kept.
    """
    tokens = read_tokens(args.tokens)
    engine, checkpoint = Engine.open(args.engine), Checkpoint.open(args.checkpoint_dir)
    if engine.config != checkpoint.config:
        raise ConfigError(
            f"expected an engine of the model in {args.checkpoint_dir}, and {args.engine} has "
            "another configuration; compare an engine with the checkpoint of the same model"
        )
    check_tokens(args.tokens, tokens, engine.config)
    try:
        check_forward(engine.config, tokens, ForwardMode.FULL)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    dtype = getattr(torch, args.dtype)
    reference = _reference_logits(checkpoint, engine, tokens, dtype)
    _check_finite(reference, args.checkpoint_dir)
    progress = Progress()
    progress.start("loading the engine", engine.weight_bytes())
    weights = engine.load_weights(dtype, packed=True, advance=progress.advance)
    progress.finish()
    comparison = compare_logits(reference, _logits(Network(engine.config, weights), tokens))
    print(json.dumps(asdict(comparison)) if args.json else "\n".join(_lines(comparison)))
    limits = Limits(args.max_error, args.min_cosine, args.min_agreement, args.max_kl)
    failures = comparison.failures(limits)
    if failures:
        raise ConfigError(f"verify: {'; '.join(failures)}")


def _reference_logits(
    checkpoint: Checkpoint,
    engine: Engine,
    tokens: npt.NDArray[np.integer[Any]],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The checkpoint's own weights with the engine's Engram classes. Packed, which changes no bit:
    a large checkpoint fits in memory no other way."""
    progress = Progress()
    progress.start("loading the checkpoint", total_bytes(checkpoint.source))
    source = CountedSource(checkpoint.source, progress.advance)
    weights = load_weights(checkpoint.config, source, engine.token_class, dtype, packed=True)
    progress.finish()
    return _logits(Network(checkpoint.config, weights), tokens)


def _check_finite(logits: torch.Tensor, checkpoint: Path) -> None:
    """An engine that is not finite keeps no limit; a reference that is not finite has no say."""
    wrong = (~torch.isfinite(logits)).any(-1).nonzero()
    if len(wrong):
        raise ConfigError(
            f"expected finite logits of {checkpoint}, got a NaN or an infinity at position "
            f"{int(wrong[0])}; repair the checkpoint, or choose another --dtype"
        )


def _logits(network: Network, tokens: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    return run_forward(network, tokens, ForwardMode.FULL)["logits"]


def _lines(comparison: Comparison) -> Iterable[str]:
    worst = int(np.argmax(comparison.kl))
    yield f"positions          {comparison.positions:>12,}"
    yield f"logit error        {comparison.mean_error:>12.5g} mean {comparison.max_error:.5g} max"
    yield f"cosine             {comparison.mean_cosine:>12.6f} mean {comparison.min_cosine:.6f} min"
    yield f"arg max agreement  {comparison.agreement:>12.2%}"
    yield (
        f"KL in nats         {comparison.mean_kl:>12.5g} mean {comparison.max_kl:.5g} max, "
        f"at position {worst}"
    )
