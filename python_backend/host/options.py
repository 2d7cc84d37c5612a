"""Options of dsv41-serve: from the command line, from a YAML file, the command line winning.

Names may be written with - or _. Those of `ServeSettings` are checked by it; the others, which
concern the server around the model, are read here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from python_backend.host.errors import HostError
from python_backend.host.process import Addresses
from python_backend.settings import ServeSettings

DEFAULT_DRAIN_SECONDS = 10.0
DEFAULT_SLOW_READER_SECONDS = 60.0
SETTING_HELP = {
    "dtype": "compute type: float32, bfloat16 or float64",
    "executor": "torch, or plan: the engine's TensorRT plans, on a GPU",
    "device": "cpu, or cuda: where the torch executor computes",
    "cuda_graphs": "on a GPU: replay steps of few sizes as CUDA graphs",
    "compile_kernels": "on a GPU: compile kernels that the engine lacks, or refuse to",
    "engram_on_host": "on a GPU: leave the Engram tables in pinned host memory",
    "cache_quant": "packed FP4/FP8 cache records, as the model was trained",
    "max_batch_size": "requests that run at once (the engine's limit)",
    "max_num_tokens": "rows of one step: decode, prefill and replay (the engine's limit)",
    "max_seq_len": "tokens of one request, prompt and output (the engine's limit)",
    "kv_cache_memory_bytes": "bytes for all cache pages",
    "kv_cache_memory_fraction": "without bytes, share of the free memory for all cache pages",
    "global_page_tokens": "tokens of a global page, the granule of prefix hits (2 windows)",
    "window_page_tokens": "rows of a window page (a quarter of the window)",
    "num_global_pages": "global pages, instead of a memory budget",
    "num_window_pages": "window pages (what always suffices)",
    "prefix_cache": "keep and reuse the cache of common prompt beginnings",
    "swa_bounded_replay": "replay one window after a hit and skip the decoder for early rows",
    "replay_length": "rows replayed after a hit, from 0 on (one window)",
    "speculative": "draft tokens with the model's DSpark stages; answers stay the same",
    "max_queued_requests": "requests that wait at most; more are refused as unavailable",
    "max_queued_tokens": "tokens of waiting requests, prompts and max_tokens together",
    "kv_events": "a ZeroMQ endpoint for events of the prefix cache (none)",
    "num_speculative_tokens": "drafts verified in one step at most (the model's block)",
    "speculative_threshold": "least probability that a draft is accepted to verify it",
    "speculative_schedule": "verify only as many drafts as pay, by the measured time of steps",
}
_SWITCHES = (
    "cuda_graphs",
    "compile_kernels",
    "engram_on_host",
    "cache_quant",
    "prefix_cache",
    "swa_bounded_replay",
    "speculative",
    "speculative_schedule",
)


@dataclass(frozen=True)
class ServeOptions:
    """What was asked. `settings` are those of `ServeSettings` that were given, as given."""

    engine: Path
    addresses: Addresses
    drain_seconds: float
    slow_reader_seconds: float
    log_file: Path | None
    settings: Mapping[str, Any]

    def model_parameters(self) -> dict[str, str]:
        """The parameters of config.pbtxt that give the model these settings."""
        texts = {name: str(value) for name, value in self.settings.items()}
        return {"engine_dir": str(self.engine.resolve()), **texts}


def read_options(arguments: Sequence[str] | None = None) -> ServeOptions:
    """Raises HostError with one sentence; argparse itself ends the process for bad usage."""
    given = vars(_parser().parse_args(arguments))
    file = given.pop("config_file", None)
    values = {**(_read_yaml(file) if file is not None else {}), **given}
    known = {field.name for field in fields(ServeSettings)}
    settings = {name: values.pop(name) for name in list(values) if name in known}
    engine = values.pop("engine", None)
    if not isinstance(engine, str | Path) or not str(engine):
        raise HostError("expected --engine DIR, an engine made by dsv41-build engine, got none")
    drain = values.pop("drain_seconds", DEFAULT_DRAIN_SECONDS)
    patience = values.pop("slow_reader_seconds", DEFAULT_SLOW_READER_SECONDS)
    log_file = values.pop("log_file", None)
    addresses = {field.name: values.pop(field.name, field.default) for field in fields(Addresses)}
    if values:
        raise HostError(f"expected options of dsv41-serve, got {next(iter(values))!r}; see --help")
    return ServeOptions(
        engine=Path(engine),
        addresses=Addresses(**{name: _address(name, v) for name, v in addresses.items()}),
        drain_seconds=_seconds("drain_seconds", drain),
        slow_reader_seconds=_seconds("slow_reader_seconds", patience),
        log_file=None if log_file is None else Path(log_file),
        settings={name: value for name, value in settings.items() if value is not None},
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HostError(f"expected settings in {path}, but: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise HostError(
            f"expected {path} as UTF-8, got byte 0x{error.object[error.start]:02x} at "
            f"{error.start}; save it as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        where = f" at line {place.line + 1}" if place else ""
        raise HostError(f"expected YAML in {path}, got something else{where}; mend it") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise HostError(f"expected lines of `name: value` in {path}, got {type(raw).__name__}")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise HostError(f"expected {name} once in {path}, got it twice; drop one")
        values[name] = value
    return values


def _address(name: str, value: Any) -> Any:
    if not name.endswith("_port"):
        if isinstance(value, str) and value:
            return value
        raise HostError(f"expected {name} as an address, got {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    raise HostError(f"expected {name} from 1 to 65535, got {value!r}")


def _seconds(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and value >= 0:
        return float(value)
    raise HostError(f"expected {name} as seconds of at least 0, got {value!r}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41-serve",
        description="Serve an engine with the Triton server; prints the URLs once a token is made.",
        epilog="Settings, error codes and signals: docs/operations.md",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--engine", "--engine-dir", "--engine_dir", type=Path, metavar="DIR")
    _option(parser, "config_file", type=Path, metavar="FILE", help="YAML lines of `name: value`")
    server = parser.add_argument_group("server")
    for field in fields(Addresses):
        kind = int if field.name.endswith("_port") else str
        _option(server, field.name, type=kind, metavar="X", help=f"({field.default})")
    _option(
        server,
        "drain_seconds",
        type=float,
        metavar="X",
        help=f"at stop, time for running requests to end ({DEFAULT_DRAIN_SECONDS:g})",
    )
    _option(
        server,
        "slow_reader_seconds",
        type=float,
        metavar="X",
        help="a client that takes nothing for so long is cut, 0: never "
        f"({DEFAULT_SLOW_READER_SECONDS:g})",
    )
    _option(server, "log_file", type=Path, metavar="FILE", help="JSON log lines (stderr)")
    model = parser.add_argument_group("model")
    for field in fields(ServeSettings):
        name, default = field.name, field.default
        text = SETTING_HELP[name]
        if not text.endswith(")") and default is not None:
            text += f" ({default})"
        if name in _SWITCHES:
            _option(model, name, action=argparse.BooleanOptionalAction, help=text)
        else:
            # ServeSettings reads the text, so that every road gives the same sentence.
            _option(model, name, metavar="X", help=text)
    return parser


def _option(group: Any, name: str, **options: Any) -> None:
    group.add_argument(*dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]), **options)
