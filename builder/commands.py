"""What the commands of dsv41-build do with their parsed options."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from builder.assemble import build_engine
from builder.checkpoint import Checkpoint
from builder.forward import forward
from builder.inspection import (
    Subject,
    describe,
    parse_memory,
    render,
    subject_of_checkpoint,
    subject_of_config,
    subject_of_engine,
)
from builder.presets import find_config, slice_config
from builder.progress import Progress
from builder.quantization.calibrate import CalibrationData
from builder.quantization.quantize import quantize_checkpoint
from builder.quantization.recipe import Recipe
from builder.quantization.report import render_report
from builder.random_checkpoint import init_checkpoint
from builder.trtllm import TARGET_VERSION
from builder.trtllm.export import write_adapter
from builder.verify import verify
from engine.config import ConfigError
from engine.directory import PARTIAL_SUFFIX, BuildConfig, Engine
from engine.manifest import EngineError, files_below
from engine.tensor_source import CheckpointError
from plugins.tensorrt_library import TensorRtError


def run_command(args: argparse.Namespace) -> str | None:
    """Run `args.command`. Returns None, or the sentence that says why it could not be done."""
    try:
        _COMMANDS[args.command](args)
    except (ConfigError, CheckpointError, EngineError, TensorRtError) as error:
        return str(error)
    except OSError as error:
        where = error.filename or getattr(args, "output_dir", None)  # a full disk names no file
        return f"cannot use{f' {where}' if where else ''}: {error.strerror or error}"
    return None


def _engine(args: argparse.Namespace) -> None:
    checkpoint = Checkpoint.open(args.checkpoint_dir)
    _warn(checkpoint.warnings)
    config = checkpoint.config
    limit = config.max_position_embeddings
    build = BuildConfig(
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=limit if args.max_seq_len is None else args.max_seq_len,
        tp_size=args.tp_size,
    )
    classes, origin = checkpoint.token_class(args.token_class)
    options = {"checkpoint": args.checkpoint_dir.name, "token_class": origin}
    engine, warnings = build_engine(
        checkpoint,
        args.output_dir,
        build,
        classes,
        options=options,
        plans=args.plans,
        kernels=args.kernels,
        progress=Progress(),
    )
    _warn(warnings)
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


def _quantize(args: argparse.Namespace) -> None:
    recipe = Recipe.named(args.format)
    given = None if args.recipe is None else Recipe.read(args.recipe)
    checkpoint = Checkpoint.open(args.checkpoint_dir)
    _warn(checkpoint.warnings)
    if given is not None:
        given.check_matches(checkpoint.weights)
        recipe = given.over(recipe)
    targets, unfit = recipe.targets(checkpoint.weights, args.unfit)
    _warn(unfit)
    data = _calibration_data(args, checkpoint, needed="nvfp4-w4a4" in targets.values())
    try:
        report, warnings = quantize_checkpoint(
            checkpoint, args.output_dir, targets, progress=Progress(), data=data
        )
    except (KeyboardInterrupt, OSError):
        partial = args.output_dir.absolute().with_name(args.output_dir.name + PARTIAL_SUFFIX)
        if partial.is_dir():
            _warn(["complete shards are kept; the same command goes on with the next"])
        raise
    _warn(warnings)
    print(f"checkpoint {args.output_dir}")
    print("\n".join(render_report(report)))


def _calibration_data(
    args: argparse.Namespace, checkpoint: Checkpoint, *, needed: bool
) -> CalibrationData | None:
    """The data of --calib_dataset. Raises ConfigError when it is missing or has no use."""
    path = args.calib_dataset
    if needed and path is None:
        raise ConfigError(
            "calib_dataset: nvfp4-w4a4 measures the inputs of linear layers on data; give text "
            "(.txt, .jsonl) or token ids (.jsonl, .npy)"
        )
    if path is not None and not needed:
        raise ConfigError(
            f"calib_dataset: {args.format} quantises weights only, which takes no data; leave it "
            "out, or choose nvfp4-w4a4"
        )
    return None if path is None else CalibrationData.read(path, checkpoint)


def _inspect(args: argparse.Namespace) -> None:
    memory = None if args.memory is None else parse_memory(args.memory)
    report = describe(_subject(args), memory)
    print(json.dumps(report) if args.json else render(report))


def _subject(args: argparse.Namespace) -> Subject:
    if args.engine is not None:
        if args.verify:
            progress = Progress()
            files = files_below(args.engine)
            progress.start("hashing", sum(path.stat().st_size for path in files))
            engine = Engine.open(args.engine, verify=True, advance=progress.advance)
            progress.finish()
        else:
            engine = Engine.open(args.engine)
        return subject_of_engine(engine)
    if args.verify:
        raise ConfigError("verify: only an engine has hashes to compare; leave the option out")
    if args.checkpoint_dir is not None:
        checkpoint = Checkpoint.open(args.checkpoint_dir)
        _warn(checkpoint.warnings)
        return subject_of_checkpoint(checkpoint)
    config, warnings = find_config(args.config)
    _warn(warnings)
    return subject_of_config(args.config, config)


def _trtllm(args: argparse.Namespace) -> None:
    write_adapter(Engine.open(args.engine), args.output_dir)
    print(f"{args.output_dir}: for TensorRT-LLM {TARGET_VERSION}; next steps: docs/tensorrt-llm.md")


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _bench(args: argparse.Namespace) -> None:
    """In a process of its own: a benchmark stands above all packages."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / args.benchmark / "run.py").is_file():
        raise ConfigError(
            f"expected the benchmark {args.benchmark} beside the packages, found none; only a "
            "checkout has benchmarks: pip install -e it"
        )
    module = [sys.executable, "-m", f"benchmarks.{args.benchmark}.run"]
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    options = args.options[1:] if args.options[:1] == ["--"] else args.options
    status = subprocess.run([*module, *options], env=environment, check=False).returncode
    if status:
        raise SystemExit(status)


_COMMANDS = {
    "bench": _bench,
    "engine": _engine,
    "init": _init,
    "quantize": _quantize,
    "inspect": _inspect,
    "trtllm": _trtllm,
    "forward": forward,
    "verify": verify,
}
