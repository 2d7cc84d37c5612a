"""`dsv41-build forward`: raw tokens through the reference network, results in a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from builder.checkpoint import Checkpoint
from builder.progress import Progress
from engine.config import ConfigError, ModelConfig
from engine.directory import PARTIAL_SUFFIX, Engine
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, check_forward, run_forward
from engine.tensor_source import CountedSource, total_bytes


def forward(args: argparse.Namespace) -> None:
    """Run the command; its options are those of builder/cli.py.

    Raises ConfigError for tokens, a hit or a path that cannot be used, before weights are read.
    """
    out: Path = args.out
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"out: expected a file in an existing directory, got {out}")
    tokens = read_tokens(args.tokens)
    network = _load_network(args, tokens)
    results = run_forward(
        network,
        tokens,
        ForwardMode(args.mode),
        hit=args.hit,
        replay_length=args.replay_length,
        quantize_cache=not args.no_cache_quant,
    )
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    try:
        save_file({name: tensor.contiguous() for name, tensor in results.items()}, partial)
        os.replace(partial, out)
    except SafetensorError as error:
        raise ConfigError(f"out: cannot write {out}: {error}; choose another place") from None
    finally:
        partial.unlink(missing_ok=True)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in results.items())
    print(f"{out}: {shapes}")


def _load_network(args: argparse.Namespace, tokens: npt.NDArray[np.integer[Any]]) -> Network:
    dtype, activation_quant = getattr(torch, args.dtype), not args.no_activation_quant
    progress = Progress()
    if args.engine is not None:
        if args.token_class is not None:
            raise ConfigError("token_class: an engine has its own classes; leave the option out")
        engine = Engine.open(args.engine)
        _check(args, tokens, engine.config)
        progress.start("loading weights", engine.weight_bytes())
        weights = engine.load_weights(
            dtype, activation_quant=activation_quant, advance=progress.advance
        )
        progress.finish()
        return Network(engine.config, weights)
    checkpoint = Checkpoint.open(args.checkpoint_dir)
    config = checkpoint.config
    _check(args, tokens, config)
    classes, _ = checkpoint.token_class(args.token_class)
    progress.start("loading weights", total_bytes(checkpoint.source))
    source = CountedSource(checkpoint.source, progress.advance)
    weights = load_weights(config, source, classes, dtype, activation_quant=activation_quant)
    progress.finish()
    return Network(config, weights)


def _check(
    args: argparse.Namespace, tokens: npt.NDArray[np.integer[Any]], config: ModelConfig
) -> None:
    """Raise ConfigError for what cannot be run, before any weight is read."""
    check_tokens(args.tokens, tokens, config)
    try:
        check_forward(
            config,
            tokens,
            ForwardMode(args.mode),
            hit=args.hit,
            replay_length=args.replay_length,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_tokens(path: Path) -> npt.NDArray[np.integer[Any]]:
    """Token ids [T] of a .npy file. Raises ConfigError."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ConfigError(f"tokens: expected a .npy file at {path}, found none") from None
    except (ValueError, EOFError) as error:
        raise ConfigError(f"tokens: {path} is not a .npy array: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens: expected one dimension of integers in {path}, got "
            f"{getattr(tokens, 'dtype', 'an archive')} {list(getattr(tokens, 'shape', []))}"
        )
    if tokens.size == 0:
        raise ConfigError(f"tokens: expected at least one token id in {path}, got none")
    return tokens


def check_tokens(
    path: Path,
    tokens: npt.NDArray[np.integer[Any]],
    config: ModelConfig,
    option: str = "tokens",
) -> None:
    """Raise ConfigError naming the first id that the model does not have."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= config.vocab_size))
    if outside.size:
        first = int(outside[0])
        raise ConfigError(
            f"{option}: expected ids 0 … {config.vocab_size - 1} in {path}, got {tokens[first]} "
            f"at position {first}"
        )
