"""Scales of NVFP4 inputs: ModelOpt's max calibration while our network reads the user's data.

ModelOpt sees a module with one linear layer for each weight to calibrate. Its input quantizers
collect the largest magnitude of what the network multiplies with that weight; nothing is rounded
meanwhile, so the network computes in float32 with the source's values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from builder.checkpoint import Checkpoint
from builder.forward import check_tokens
from builder.progress import Progress
from builder.quantization.modelopt import modelopt, quiet
from builder.quantization.watch import Observer, watched_weights
from builder.token_class import read_tokenizer
from engine.config import ConfigError
from engine.network import Network, load_weights
from engine.network.run import ForwardMode, run_forward
from engine.tensor_source import CheckpointError

# Longer documents are cut: the network is run on each piece from a cold cache.
PIECE_TOKENS = 512

Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class CalibrationData:
    """Pieces of token ids, each [1 … PIECE_TOKENS]."""

    pieces: tuple[Tokens, ...]

    @staticmethod
    def read(path: Path, checkpoint: Checkpoint) -> CalibrationData:
        """Text (.txt), lines of {"text": …} or {"input_ids": […]} (.jsonl), or ids [T] or [n, T]
        (.npy).

        Raises ConfigError naming the file, and the line where there are lines.
        """
        if not path.is_file():
            raise ConfigError(f"calib_dataset: expected a file at {path}, found none")
        readers = {".txt": _read_text, ".jsonl": _read_lines, ".npy": _read_array}
        if path.suffix not in readers:
            raise ConfigError(
                f"calib_dataset: expected .txt, .jsonl or .npy, got {path.name}; rename or "
                "convert the file"
            )
        pieces: list[Tokens] = []
        for document in readers[path.suffix](path, checkpoint):
            check_tokens(path, document, checkpoint.config, option="calib_dataset")
            pieces += np.split(document, range(PIECE_TOKENS, len(document), PIECE_TOKENS))
        pieces = [piece for piece in pieces if len(piece)]
        if not pieces:
            raise ConfigError(f"calib_dataset: {path} holds no tokens; give it text or token ids")
        return CalibrationData(tuple(pieces))


def input_scales(
    checkpoint: Checkpoint, names: Collection[str], data: CalibrationData, progress: Progress
) -> tuple[dict[str, float], list[str]]:
    """The scale of each module's input, amax / (6 · 448), and warnings.

    `names` are modules such as layers.0.attn.wq_a. An expert that no token chose takes the largest
    of its layer, as ModelOpt's export does. Raises ConfigError where a module saw nothing but
    zeros, CheckpointError where its inputs are not finite.
    """
    shapes = {weight.base: weight.shape for weight in checkpoint.weights}
    modules = torch.nn.ModuleDict(
        {
            _key(name): torch.nn.Linear(shapes[name][1], shapes[name][0], False, device="meta")
            for name in names
        }
    )
    mtq = modelopt()
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    # Weights are quantised piece by piece, elsewhere.
    config["quant_cfg"].append({"quantizer_name": "*weight_quantizer", "enable": False})

    def read_data(quantized: torch.nn.ModuleDict) -> None:
        observers = {name: _observer(name, quantized[_key(name)]) for name in names}
        _run(checkpoint, observers, data, progress)

    with quiet(), torch.no_grad():
        modules = mtq.quantize(modules, config, read_data)
    unchosen = _fill_unchosen({name: modules[_key(name)] for name in names})
    scales = {name: _scale(name, _input_quantizer(modules[_key(name)])) for name in names}
    warnings = []
    if unchosen:
        warnings.append(
            f"{unchosen} expert inputs saw no token and take the largest scale of their layer; "
            "more calibration data would reach them"
        )
    return scales, warnings


def _observer(name: str, module: torch.nn.Module) -> Observer:
    quantizer = _input_quantizer(module)

    def observe(rows: torch.Tensor) -> None:
        if not torch.isfinite(rows).all():
            raise CheckpointError(
                f"{name}: its inputs are not finite on the calibration data; repair the checkpoint"
            )
        quantizer(rows)

    return observe


def _run(
    checkpoint: Checkpoint,
    observers: Mapping[str, Observer],
    data: CalibrationData,
    progress: Progress,
) -> None:
    classes, _ = checkpoint.token_class(None)
    weights = load_weights(
        checkpoint.config,
        checkpoint.source,
        classes,
        torch.float32,
        activation_quant=False,
        packed=True,
    )
    network = Network(checkpoint.config, watched_weights(weights, observers))
    progress.start("calibrating", sum(map(len, data.pieces)), unit="tokens")
    for piece in data.pieces:
        run_forward(network, piece, ForwardMode.FULL)
        progress.advance(len(piece))
    progress.finish()


def _fill_unchosen(modules: Mapping[str, torch.nn.Module]) -> int:
    """Give experts without a magnitude the largest of their layer's; returns how many."""
    with quiet():
        from modelopt.torch.export.layer_utils import set_expert_quantizer_amax

        stacks: dict[tuple[str, str], list[torch.nn.Module]] = {}
        for name, module in modules.items():
            layer, found, rest = name.partition(".experts.")
            if found:
                stacks.setdefault((layer, rest.partition(".")[2]), []).append(module)
        return sum(
            len(set_expert_quantizer_amax(stack, "input_quantizer", device=torch.device("cpu")))
            for stack in stacks.values()
        )


def _scale(name: str, quantizer: Any) -> float:
    amax = quantizer.amax
    if amax is None or float(amax) == 0:
        raise ConfigError(
            f"calib_dataset: expected data on which the inputs of {name} are not all zero; give "
            "more data, or the format nvfp4 to it in a recipe"
        )
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return float(NVFP4QTensor.get_activation_scaling_factor(quantizer))


def _input_quantizer(module: Any) -> Any:
    return module.input_quantizer


def _key(name: str) -> str:
    return name.replace(".", "/")  # the name of a torch module has no dots


def _read_text(path: Path, checkpoint: Checkpoint) -> Iterator[Tokens]:
    yield _encode(path.read_bytes(), path.name, checkpoint)


def _read_lines(path: Path, checkpoint: Checkpoint) -> Iterator[Tokens]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield _encode(entry["text"].encode(), where, checkpoint)
        elif isinstance(entry, dict) and _is_ids(entry.get("input_ids")):
            yield np.array(entry["input_ids"], dtype=np.int64)
        else:
            raise ConfigError(
                f'calib_dataset: expected {{"text": "…"}} or {{"input_ids": [1, 2, …]}} in {where}'
            )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and abs(one) < 1 << 62 for one in value)


def _read_array(path: Path, _: Checkpoint) -> Iterator[Tokens]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"calib_dataset: {path} is not a .npy array: {error}") from None
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iu"
        or array.ndim not in (1, 2)
    ):
        raise ConfigError(
            f"calib_dataset: expected integers [T] or [n, T] in {path}, got "
            f"{getattr(array, 'dtype', 'an archive')} {list(getattr(array, 'shape', []))}"
        )
    yield from array if array.ndim == 2 else [array]


def _encode(text: bytes, where: str, checkpoint: Checkpoint) -> Tokens:
    """The ids of a text as it stands: special strings in it become special tokens."""
    if checkpoint.tokenizer_file is None:
        raise ConfigError(
            f"calib_dataset: {where} is text, and {checkpoint.directory} has no tokenizer.json; "
            "give token ids (.npy, or input_ids in .jsonl)"
        )
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"calib_dataset: expected UTF-8 text in {where}; convert it") from None
    tokenizer = read_tokenizer(checkpoint.config, checkpoint.tokenizer_file)
    return np.array(tokenizer.encode(decoded).ids, dtype=np.int64)
