"""dsv41-build: make, describe and run engines and checkpoints.

    dsv41-build init    --config tiny --output_dir ckpt
    dsv41-build engine  --checkpoint_dir ckpt --output_dir engine
    dsv41-build quantize --checkpoint_dir ckpt --format nvfp4 --output_dir ckpt-nvfp4
    dsv41-build inspect --engine engine --memory 80GiB
    dsv41-build verify  --engine engine --checkpoint ckpt --tokens t.npy --min_agreement 0.95
    dsv41-build trtllm  --engine engine --output_dir trtllm
    dsv41-build forward --checkpoint ckpt --tokens t.npy --mode both --hit 40 --out o.safetensors
    dsv41-build bench   forward decode=32*1@8192 --config full --experts-per-rank 48

Options are spelled as trtllm-build spells them, with - or _. Bad input ends the command with one
sentence on stderr and status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_MAX_BATCH_SIZE = 64
DEFAULT_MAX_NUM_TOKENS = 8192
_NEEDED = ("torch", "safetensors", "tokenizers", "yaml")  # the client's installation has none
CONFIG_HELP = "tiny, medium, full or a configuration file"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0 or 1. SIGTERM ends it as Ctrl-C does."""
    args = _parser().parse_args(argv)
    complaint: str | None
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from builder.commands import run_command  # loads torch, which --help can do without

        complaint = run_command(args)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        complaint = f"{error.name} is not installed; in a checkout, pip install '.[server]'"
    except KeyboardInterrupt:  # also while torch is loaded
        complaint = "interrupted"
    finally:
        signal.signal(signal.SIGTERM, before)
    if complaint is None:
        return 0
    print(f"dsv41-build: {complaint}", file=sys.stderr)
    return 1


# -- options ---------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dsv41-build", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    engine = _command(commands, "engine", "make an engine from a checkpoint")
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
    _option(
        engine,
        "plans",
        nargs="?",
        choices=("bfloat16", "float32"),
        const="bfloat16",
        metavar="DTYPE",
        help="also make ONNX graphs and TensorRT plans, bfloat16 or float32 (%(const)s)",
    )
    _option(
        engine,
        "kernels",
        nargs="+",
        default=(),
        metavar="sm_90",
        help="also compile the kernels that serving in bfloat16 launches on these GPUs",
    )

    init = _command(commands, "init", "write a random checkpoint")
    _option(init, "config", required=True, help=CONFIG_HELP)
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

    quantize = _command(commands, "quantize", "requantise a checkpoint with NVIDIA ModelOpt")
    _option(quantize, "checkpoint_dir", "checkpoint", type=Path, required=True)
    _option(quantize, "output_dir", type=Path, required=True, help="checkpoint directory to make")
    _option(
        quantize,
        "format",
        choices=("nvfp4", "nvfp4-w4a4", "mxfp8", "nvfp4-experts", "as-released"),
        required=True,
        help="all weights, or the experts only; w4a4 with inputs; as-released is FP8 and FP4",
    )
    _option(quantize, "recipe", type=Path, metavar="FILE.yaml", help="changes by class or by name")
    _option(
        quantize,
        "calib_dataset",
        type=Path,
        metavar="FILE",
        help="text or token ids for nvfp4-w4a4: .txt, .jsonl or .npy",
    )
    _option(
        quantize,
        "unfit",
        choices=("keep", "refuse"),
        default="keep",
        help="a weight whose rows are not whole groups of the format (%(default)s)",
    )

    inspect = _command(commands, "inspect", "describe an engine, a checkpoint, a model")
    subject = inspect.add_mutually_exclusive_group(required=True)
    _option(subject, "engine", "engine_dir", type=Path)
    _option(subject, "checkpoint_dir", "checkpoint", type=Path)
    _option(subject, "config", help=CONFIG_HELP)
    _option(inspect, "memory", metavar="SIZE", help="capacity with this much, such as 80GiB")
    _option(inspect, "verify", action="store_true", help="compare all hashes of an engine")
    _option(inspect, "json", action="store_true", help="one JSON object, sizes in bytes")

    trtllm = _command(commands, "trtllm", "write what TensorRT-LLM needs to serve an engine")
    _option(trtllm, "engine", "engine_dir", type=Path, required=True)
    _option(trtllm, "output_dir", type=Path, required=True, help="directory to make")

    forward = _command(commands, "forward", "run the reference network")
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
    _option(
        forward,
        "dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float32",
        help="(%(default)s)",
    )
    _option(forward, "no_cache_quant", action="store_true", help="keep cache rows unrounded")
    _option(
        forward,
        "no_activation_quant",
        action="store_true",
        help="diagnostic: do not round the inputs of quantised linears",
    )
    _option(forward, "out", type=Path, metavar="FILE.safetensors", required=True)

    verify = _command(commands, "verify", "compare an engine with a checkpoint")
    _option(verify, "engine", "engine_dir", type=Path, required=True)
    _option(verify, "checkpoint_dir", "checkpoint", type=Path, required=True)
    _option(verify, "tokens", type=Path, metavar="FILE.npy", required=True, help="token ids")
    _option(
        verify,
        "dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float32",
        help="(%(default)s)",
    )
    _option(verify, "max_error", type=float, help="fail above this difference of a logit")
    _option(verify, "min_cosine", type=float, help="fail below this, at any position")
    _option(verify, "min_agreement", type=float, help="fail below this share of equal arg max")
    _option(verify, "max_kl", type=float, help="fail above this mean, in nats")
    _option(verify, "json", action="store_true", help="one JSON object, with KL per position")

    bench = _command(commands, "bench", "time exact batches through the executor, in a checkout")
    bench.add_argument("benchmark", choices=("forward",))
    bench.add_argument("options", nargs=argparse.REMAINDER, help="its own; -- --help lists them")
    return parser


def _command(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    parser.set_defaults(command=name)
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
