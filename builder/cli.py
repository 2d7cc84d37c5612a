"""dsv41-build: make, describe and run engines and checkpoints.

    dsv41-build init    --config tiny --output_dir ckpt
    dsv41-build engine  --checkpoint_dir ckpt --output_dir engine
    dsv41-build inspect --engine engine --memory 80GiB
    dsv41-build forward --checkpoint ckpt --tokens t.npy --mode both --hit 40 --out o.safetensors

Options are spelled as trtllm-build spells them, with - or _. Bad input ends the command with one
sentence on stderr and status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from builder.assemble import build_engine
from builder.checkpoint import Checkpoint
from builder.forward import DTYPES, run_forward_command
from builder.inspection import (
    Subject,
    describe,
    parse_memory,
    render,
    subject_of_checkpoint,
    subject_of_config,
    subject_of_engine,
)
from builder.presets import PRESETS, find_config, slice_config
from builder.progress import Progress
from builder.random_checkpoint import init_checkpoint
from engine.config import ConfigError
from engine.directory import BuildConfig, Engine
from engine.manifest import EngineError
from engine.tensor_source import CheckpointError

DEFAULT_MAX_BATCH_SIZE = 64
DEFAULT_MAX_NUM_TOKENS = 8192


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0 or 1."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.run
    try:
        command(args)
    except (ConfigError, CheckpointError, EngineError) as error:
        return _fail(str(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _fail(f"cannot use{where}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _fail("interrupted")
    return 0


def _fail(sentence: str) -> int:
    print(f"dsv41-build: {sentence}", file=sys.stderr)
    return 1


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


# -- commands --------------------------------------------------------------------------------------


def _engine(args: argparse.Namespace) -> None:
    checkpoint = Checkpoint.open(args.checkpoint_dir)
    _warn(checkpoint.warnings)
    config = checkpoint.config
    build = BuildConfig(
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=args.max_seq_len or config.max_position_embeddings,
        tp_size=args.tp_size,
    )
    classes, origin = checkpoint.token_class(args.token_class)
    options = {"checkpoint": args.checkpoint_dir.name, "token_class": origin}
    engine = build_engine(
        checkpoint, args.output_dir, build, classes, options=options, progress=Progress()
    )
    print(f"engine {engine.path}: token classes from {origin}, {args.tp_size} rank(s)")
    if engine.tokenizer_path is None:
        print("the checkpoint has no tokenizer.json: this engine takes and gives token ids only")
    if args.tp_size > 1:
        _warn(["an engine of several ranks can be inspected, but not yet run"])


def _init(args: argparse.Namespace) -> None:
    config, warnings = find_config(args.config)
    _warn(warnings)
    if args.layer_ids is not None or args.experts is not None or args.engram_rows is not None:
        config = slice_config(
            config,
            layer_ids=args.layer_ids,
            num_experts=args.experts,
            engram_rows=args.engram_rows,
        )
    init_checkpoint(
        config,
        args.output_dir,
        seed=args.seed,
        format=args.format,
        tokenizer_file=args.tokenizer,
        progress=Progress(),
    )
    print(f"checkpoint {args.output_dir}: random weights, {args.format} layout, seed {args.seed}")


def _inspect(args: argparse.Namespace) -> None:
    memory = None if args.memory is None else parse_memory(args.memory)
    report = describe(_subject(args), memory)
    print(json.dumps(report) if args.json else render(report))


def _subject(args: argparse.Namespace) -> Subject:
    if args.engine is not None:
        return subject_of_engine(Engine.open(args.engine, verify=args.verify))
    if args.checkpoint_dir is not None:
        checkpoint = Checkpoint.open(args.checkpoint_dir)
        _warn(checkpoint.warnings)
        return subject_of_checkpoint(checkpoint)
    config, warnings = find_config(args.config)
    _warn(warnings)
    return subject_of_config(args.config, config)


# -- options ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dsv41-build", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    engine = _command(commands, "engine", "make an engine from a checkpoint", _engine)
    _option(engine, "checkpoint_dir", "checkpoint", type=Path, required=True)
    _option(engine, "output_dir", type=Path, required=True, help="engine directory to make")
    _option(
        engine,
        "max_batch_size",
        type=int,
        default=DEFAULT_MAX_BATCH_SIZE,
        help="requests in one step (%(default)s)",
    )
    _option(
        engine,
        "max_num_tokens",
        type=int,
        default=DEFAULT_MAX_NUM_TOKENS,
        help="rows in one step, at least two windows (%(default)s)",
    )
    _option(engine, "max_seq_len", type=int, help="prompt and output (the model's limit)")
    _option(engine, "tp_size", type=int, default=1, help="ranks (%(default)s)")
    _option(
        engine,
        "token_class",
        type=Path,
        metavar="FILE",
        help="Engram classes, .npy or .safetensors (token_class.npy, then the tokenizer)",
    )

    init = _command(commands, "init", "write a random checkpoint", _init)
    _option(init, "config", required=True, help=f"{', '.join(PRESETS)} or a configuration file")
    _option(init, "output_dir", type=Path, required=True, help="checkpoint directory to make")
    _option(init, "layer_ids", type=_layer_ids, metavar="0,1,2,…", help="keep these layers")
    _option(init, "experts", type=int, help="routed experts of a layer")
    _option(init, "engram_rows", type=int, help="rows of an Engram table, about")
    _option(init, "seed", type=int, default=0, help="(%(default)s)")
    _option(
        init,
        "format",
        choices=("released", "float32"),
        default="released",
        help="FP8 and FP4 as released, or unquantised (%(default)s)",
    )
    _option(init, "tokenizer", type=Path, metavar="FILE", help="tokenizer.json (byte-level)")

    inspect = _command(commands, "inspect", "describe an engine, a checkpoint, a model", _inspect)
    subject = inspect.add_mutually_exclusive_group(required=True)
    _option(subject, "engine", "engine_dir", type=Path)
    _option(subject, "checkpoint_dir", "checkpoint", type=Path)
    _option(subject, "config", help=f"{', '.join(PRESETS)} or a configuration file")
    _option(inspect, "memory", metavar="SIZE", help="capacity with this much, such as 80GiB")
    _option(inspect, "verify", action="store_true", help="compare all hashes of an engine")
    _option(inspect, "json", action="store_true", help="one JSON object, sizes in bytes")

    forward = _command(commands, "forward", "run the reference network", run_forward_command)
    subject = forward.add_mutually_exclusive_group(required=True)
    _option(subject, "checkpoint_dir", "checkpoint", type=Path)
    _option(subject, "engine", "engine_dir", type=Path)
    _option(forward, "tokens", type=Path, metavar="FILE.npy", required=True, help="token ids")
    _option(
        forward,
        "mode",
        choices=("full", "decoder-replay", "encoder-replay", "both"),
        default="full",
        help="(%(default)s)",
    )
    _option(forward, "hit", type=int, default=0, help="length of the cached prefix")
    _option(forward, "replay_length", type=int, help="rows to replay (the sliding window)")
    _option(forward, "token_class", type=Path, metavar="FILE", help="Engram classes")
    _option(forward, "dtype", choices=tuple(DTYPES), default="float32", help="(%(default)s)")
    _option(forward, "no_cache_quant", action="store_true", help="keep cache rows unrounded")
    _option(
        forward,
        "no_activation_quant",
        action="store_true",
        help="diagnostic: do not round the inputs of quantised linears",
    )
    _option(forward, "out", type=Path, metavar="FILE.safetensors", required=True)
    return parser


def _command(
    commands: Any, name: str, summary: str, run: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _option(target: Any, name: str, *aliases: str, **settings: Any) -> None:
    """Add --name and its aliases, each with - and with _."""
    spellings = dict.fromkeys(
        f"--{spelling}" for one in (name, *aliases) for spelling in (one, one.replace("_", "-"))
    )
    target.add_argument(*spellings, dest=name, **settings)


def _layer_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected layer numbers such as 0,1,2, got {text}"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
