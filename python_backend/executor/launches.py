"""Every kernel that serving an engine on a GPU can launch, found without one.

    python -m python_backend.executor.launches ENGINE DTYPE TARGET > variants.jsonl

The executor runs the steps that a scheduler may ask for, over meta tensors: all padded sizes, and
of what is not padded (long prefill, its draft pass, choices) numbers of every kind that a launch
can tell apart. Which kernels those launch follows from the executor, the network and the kernels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.batch import Int32Array, StepShape
from engine.config import ModelConfig
from engine.directory import BuildConfig, Engine
from engine.manifest import Manifest
from engine.network import Network, load_weights
from engine.network.block import Residual
from engine.network.decoder import DecoderOutput
from engine.network.device import moved
from engine.network.draft import DraftOutput
from engine.paged_cache import CachePools
from engine.safetensors_file import STORED_AS, TensorInfo
from engine.tensor_source import TensorSource
from plugins.device.record import Variant, recording
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.inputs import DraftInputs, DraftShape, HostDraft, HostStep, StepInputs
from python_backend.executor.pools import pools_of
from python_backend.executor.shapes import GraphSizes
from python_backend.generation.rows import LogitRows
from python_backend.settings import CoreLimits, ServeSettings

Output = TypeVar("Output")

DEVICE = "meta"
_WIDE = ("F64", "F32", "F16")
_ALL = 16  # numbers up to this one are all tried
_ROUNDS = 2  # of numbers in other company


class ShapesOnly:
    """A source whose tensors are shapes without values. What has no dims is read, and what is wider
    than bfloat16, which the released model has little of: by its values a GPU keeps it so or not
    (engine/network/device.py)."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def names(self) -> Iterable[str]:
        return self._source.names()

    def describe(self, name: str) -> TensorInfo:
        return self._source.describe(name)

    def read(self, name: str) -> torch.Tensor:
        info = self._source.describe(name)
        if not info.shape or info.dtype in _WIDE:
            return self._source.read(name)
        return torch.empty(info.shape, dtype=STORED_AS[info.dtype], device=DEVICE)


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a kernel's owner asks about the values of weights: whether something holds of a
    layer's w1 and w3, then of its w2. Layers take turns, so that every way is taken."""

    _TURNS = ((True, True), (False, False), (True, False), (False, True))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asked = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        if asks and args[0].dtype == torch.bool:
            layer, matrix = divmod(self._asked, 2)
            self._asked += 1
            return self._TURNS[layer % len(self._TURNS)][matrix]
        return func(*args, **(kwargs or {}))


class _Recorder(CudaExecutor):
    """Runs each size once: another step of the same sizes launches the same kernels."""

    def __init__(
        self,
        network: Network,
        pools: CachePools,
        limits: CoreLimits,
        known: dict[tuple[Any, ...], Any],
    ) -> None:
        """`known`: what came of the sizes that ran before."""
        super().__init__(network, pools, limits, graphs=False, device=DEVICE)
        self._known = known

    def _step(self, inputs: StepInputs) -> DecoderOutput:
        return self._once(super()._step, inputs)

    def _encode(self, inputs: StepInputs) -> Residual:
        return self._once(super()._encode, inputs)

    def _decode(self, inputs: StepInputs, encoded: Residual) -> DecoderOutput:
        return self._once(super()._decode, inputs, encoded)

    def _draft_behind(self, given: DraftInputs, features: torch.Tensor) -> DraftOutput | None:
        return self._once(super()._draft_behind, given, features)

    def run_step(self, step: HostStep) -> None:
        """A step, and the draft pass behind one of a decode size."""
        output = self._forward(step)
        if self._draft_shape is not None and self._network.drafts:
            blank: Any = self._blanks[HostDraft]
            self._draft(blank.padded(self._draft_shape), output.draft_features)

    def run_draft(self, shape: DraftShape, features: torch.Tensor) -> None:
        """A draft pass behind a step that was not one of decoding."""
        self._draft_shape = None
        blank: Any = self._blanks[HostDraft]
        self._draft(blank.padded(shape), features)

    def run_choice(self, num_rows: int, logits: torch.Tensor) -> None:
        none = np.zeros(num_rows, dtype=np.int64)
        drafts = np.empty((num_rows, 0), dtype=np.int32)
        self._sampler.draw(logits[:num_rows], LogitRows(none, none, none, drafts))

    def _once(self, run: Callable[..., Output], inputs: Any, *more: Any) -> Output:
        leaves = tree_leaves([vars(x) if is_dataclass(x) else x for x in inputs])
        sizes = (x.shape if isinstance(x, torch.Tensor) else x for x in leaves)
        key = (run.__name__, *sizes)
        if key not in self._known:
            self._known[key] = run(inputs, *more)
        made: Output = self._known[key]
        return made


def variants_of(
    config: ModelConfig, source: TensorSource, token_class: Int32Array, build: BuildConfig,
    dtype: torch.dtype, target: str,
) -> set[Variant]:  # fmt: skip
    """What serving the model can launch on `target` within the limits of `build`: drafting or not,
    with bounded replay or without."""
    network = network_of_shapes(config, source, token_class, dtype)
    known: dict[tuple[Any, ...], Any] = {}
    with torch.no_grad(), recording(target) as variants:
        for bounded in (False, True):
            _run_all(network, _limits(config, build, dtype, bounded=bounded), known)
    return variants


def network_of_shapes(
    config: ModelConfig, source: TensorSource, token_class: Int32Array, dtype: torch.dtype
) -> Network:
    """The network over meta tensors. Token classes, whose values are arguments, are read."""
    with torch.device(DEVICE):
        weights = load_weights(config, ShapesOnly(source), token_class, dtype, packed=True)
    return Network(config, replace(moved(weights, DEVICE), token_class=weights.token_class))


def _limits(
    config: ModelConfig, build: BuildConfig, dtype: torch.dtype, *, bounded: bool
) -> CoreLimits:
    """Of a server that drafts where the model can: one that does not asks for fewer sizes."""
    settings = ServeSettings(
        dtype=str(dtype).removeprefix("torch."),
        device="cuda",
        max_batch_size=build.max_batch_size,
        max_num_tokens=build.max_num_tokens,
        max_seq_len=build.max_seq_len,
        num_global_pages=2,  # no launch depends on their number
        swa_bounded_replay=bounded,
        speculative=config.num_nextn_predict_layers > 0,
    )
    return settings.resolve(config, sys.maxsize)


def _run_all(network: Network, limits: CoreLimits, known: dict[tuple[Any, ...], Any]) -> None:
    config = network.config
    pools = pools_of(config, limits, network.dtype, DEVICE)
    recorder = _Recorder(network, pools, limits, known)
    sizes = GraphSizes.of(limits)
    with Answers():
        recorder.run_step(_step(limits, Sizes(1, 1, 1, 1, sizes.contexts[0])))
    for shape in chain(_decode_sizes(sizes), _padded_sizes(sizes), _long_sizes(sizes, limits)):
        recorder.run_step(_step(limits, shape))
    choices = sizes.most_decode_rows
    wide = torch.promote_types(network.dtype, torch.float32)
    logits = torch.empty(choices, config.vocab_size, dtype=wide, device=DEVICE)
    for rows in numbers(choices):
        recorder.run_choice(rows, logits)
    if not network.drafts:
        return
    width = len(config.dspark_target_layer_ids) * config.hidden_size
    features = torch.empty(limits.max_num_tokens, width, dtype=network.dtype, device=DEVICE)
    for rows, requests in turns(numbers(limits.max_num_tokens), sizes.requests):
        recorder.run_draft(DraftShape(requests, rows, requests), features)


class Sizes(NamedTuple):
    """Of a step: all its rows, those that run through the decoder, the longest context."""

    requests: int
    rows: int
    decoder_rows: int
    logit_rows: int
    context: int


def _step(limits: CoreLimits, sizes: Sizes) -> HostStep:
    """A step whose numbers are nobody's."""
    shape = StepShape(sizes.requests, sizes.rows, sizes.logit_rows, sizes.context)
    whole = HostStep.nothing(limits).padded(shape)
    last = np.arange(sizes.rows - sizes.decoder_rows, sizes.rows)
    positions = np.full(sizes.rows, sizes.context - 1)
    return replace(whole, rows=replace(whole.rows, decoder_rows=last, positions=positions))


def _decode_sizes(sizes: GraphSizes) -> Iterator[Sizes]:
    for context, requests in product(sizes.contexts, sizes.requests):
        for rows in (requests, requests * sizes.verify_rows):
            yield Sizes(requests, rows, rows, rows, context)


def _padded_sizes(sizes: GraphSizes) -> Iterator[Sizes]:
    """Prefill in the sizes of either segment. One row that runs through the decoder is enough for
    a step of the encoder's."""
    requests, contexts = sizes.requests, sizes.contexts
    of_encoder, of_decoder = (
        chain(turns(requests, rows, contexts), _shares(requests, rows, contexts))
        for rows in (sizes.encoder_rows, sizes.decoder_rows)
    )
    for some, rows, context in of_encoder:
        yield Sizes(some, rows, 1, 0, context)
    for some, rows, context in of_decoder:
        for each in (1, sizes.verify_rows):
            yield Sizes(some, rows + 1, rows, some * each, context)


def _long_sizes(sizes: GraphSizes, limits: CoreLimits) -> Iterator[Sizes]:
    """Prefill of more rows than the sizes have, all of them for the decoder too. Kernels tell apart
    multiples of 16, of rows and of their experts: every kind of rows comes with every context that
    differs in more than its number of entries, of any magnitude; and every share of rows with the
    shortest one and the longest, which alone may be no multiple of 16 pages."""
    draw = np.random.default_rng(0)
    least, most = sizes.decoder_rows[-1], limits.max_num_tokens
    contexts = _kinds_of_contexts(sizes.long_contexts)
    for context, beyond in product(contexts, (0, 1, 2, 4, 8)):
        drawn = least * (most / least) ** draw.random()
        rows = int(min(max(round(drawn / 16) * 16 + beyond, least), most))
        requests = int(draw.choice((1, 2, 3, 16)))
        yield Sizes(min(requests, limits.max_batch_size), rows, rows, 1, context)
    longer = [rows for rows in numbers(most) if rows >= least]
    for some, rows, context in _shares(sizes.requests, longer, (contexts[0], contexts[-1])):
        yield Sizes(some, rows, rows, 1, context)


def _shares(
    requests: Sequence[int], rows: Sequence[int], contexts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Requests and rows of every share of rows to a request, with each context: kernels load keys
    for as many rows at once. Of shares beyond small ones, one for each power of two."""
    kinds: dict[int, tuple[int, int]] = {}
    for some, count in product(requests, rows):
        share = -(-count // some)
        kinds[share if share <= _ALL else 1 << (share - 1).bit_length()] = some, count
    for (some, count), context in product(kinds.values(), contexts):
        yield some, count, context


def _kinds_of_contexts(contexts: Sequence[int]) -> list[int]:
    """Powers of two, one size between two of them each, and the longest."""
    kinds = {(c.bit_length(), c.bit_count() == 1): c for c in contexts}
    return sorted({*kinds.values(), contexts[-1]})


def numbers(most: int) -> list[int]:
    """From 1 to `most`: all small ones, then around powers of two and the middle between them
    multiples of 16, 8, 4, 2 and 1, since kernels know which arguments are multiples of 16."""
    found, size = set(range(1, min(_ALL, most) + 1)), _ALL
    while size < most:
        found |= {size, size * 3 // 2, *(size + more for more in (1, 2, 4, 8, 16))}
        size *= 2
    return sorted({n for n in found if n < most} | {most})


def turns(*choices: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of several kinds, each several times and in other company."""
    order = np.random.default_rng(0)
    longest = max(map(len, choices))
    for _ in range(_ROUNDS):
        columns = [order.permutation(np.resize(of_one, longest)) for of_one in choices]
        yield from zip(*(column.tolist() for column in columns), strict=True)


def main(engine_dir: str, dtype: str, target: str) -> None:
    engine = Engine.described(Path(engine_dir), Manifest({}, {}))
    found = variants_of(
        engine.config,
        engine.source(),
        engine.token_class,
        engine.build,
        getattr(torch, dtype),
        target,
    )
    for variant in sorted(found):
        print(json.dumps(variant))


if __name__ == "__main__":
    main(*sys.argv[1:])
