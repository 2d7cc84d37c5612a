"""The torch executor on a GPU: steps padded to few sizes, each a CUDA graph.

A step whose rows all run through the decoder (decoding, verification) is one graph. Prefill is
two: the encoder on all rows, the decoder on the rows at the end of each prompt, each with sizes of
its own; larger ones run without a graph. A graph is made at start-up, or when its size is asked for
the third time: one that comes once would cost more than it saves.

Where experts run their reference (docs/kernels/moe.md), which asks the device how many rows each of
them has, there are no graphs: none can hold a wait.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from engine.batch import StepShape
from engine.network import Network
from engine.network.block import Residual
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from engine.paged_cache import CachePools, PagedCache
from engine.upload import upload
from python_backend.executor.graphs import StepGraph
from python_backend.executor.inputs import (
    DraftInputs,
    DraftShape,
    HostDraft,
    HostStep,
    StepInputs,
)
from python_backend.executor.results import Results
from python_backend.executor.shapes import GraphSizes
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.settings import CoreLimits

logger = logging.getLogger(__name__)

CAPTURE_AFTER = 2

Host = HostStep | HostDraft
Output = TypeVar("Output", DecoderOutput, Residual, DraftOutput)


class CudaExecutor(TorchExecutor):
    """`graphs` off runs the same kernels on the same sizes one by one; the bits are equal.
    `capture_after` counts the steps of a size that run before its graph is made. A network whose
    steps wait for the device has no graphs, which is logged."""

    def __init__(
        self,
        network: Network,
        pools: CachePools,
        limits: CoreLimits,
        *,
        graphs: bool = True,
        capture_after: int = CAPTURE_AFTER,
        device: str = "cuda",
    ) -> None:
        super().__init__(network, pools, device=device)
        self._capture_after = capture_after
        self._sizes = GraphSizes.of(limits)
        self._blanks: dict[type[Host], Host] = {
            HostStep: HostStep.nothing(limits),
            HostDraft: HostDraft.nothing(limits),
        }
        self._draft_shape: DraftShape | None = None  # behind a step of a decode size
        self._graphs: dict[tuple[str, Any], StepGraph[Any, Any]] = {}
        self._uses: Counter[tuple[str, Any]] = Counter()
        self._results: Results | None = None
        if graphs and waits_for_experts(network):
            logger.warning(
                "steps run without CUDA graphs: the experts have calibrated NVFP4 inputs or "
                "several formats, or the dtype is float64, and such a step waits for the device"
            )
        elif graphs:
            self._pool = torch.cuda.graph_pool_handle()
            self._results = Results.of(network, self._sizes, device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def shapes_at_start(self) -> list[StepShape]:
        """The decode sizes to `capture` before serving; none without graphs."""
        return [] if self._results is None else list(self._sizes.at_start())

    @torch.inference_mode()
    def capture(self, shape: StepShape) -> None:
        """Make the graphs of a decode size: the step, and the draft pass behind it."""
        self._capture("step", HostStep, shape, self._step)
        drafts = DraftShape(shape.requests, shape.rows, shape.requests)
        # A draft pass is the same whatever the context.
        if self._sizes.verify_rows > 1 and ("draft", drafts) not in self._graphs:
            self._capture("draft", HostDraft, drafts, self._draft_of_results)

    def _forward(self, step: HostStep) -> DecoderOutput:
        rows = step.rows
        shape = self._sizes.decode(rows.shape) if rows.is_whole else None
        self._draft_shape = None
        if shape is None:
            output = self._prefill(step)
        else:
            output = self._run("step", step.padded(shape), self._step)
            self._draft_shape = DraftShape(shape.requests, shape.rows, shape.requests)
        return DecoderOutput(
            output.logits[: len(rows.logit_rows)], output.draft_features[: len(rows.decoder_rows)]
        )

    def _prefill(self, step: HostStep) -> DecoderOutput:
        whole, last = step.for_encoder(), step.for_decoder()
        shape = self._sizes.encoder(whole.shape)
        if shape is None:
            longer = whole.padded(self._sizes.long(whole.shape))
            encoded = self._encode(longer.upload(self._device))
        else:
            encoded = self._run("encoder", whole.padded(shape), self._encode)
        (kept,) = upload([step.rows.decoder_rows], self._device)
        encoded = encoded.rows(kept)
        shape = self._sizes.decoder(last.shape) if len(kept) else None
        if shape is None:
            longer = last.padded(self._sizes.long(last.shape))
            return self._decode(longer.upload(self._device), encoded)
        padded = last.padded(shape)
        if self._results is None:
            encoded = _extended(encoded, shape.rows)
        else:
            encoded = self._results.as_decoder_input(encoded, shape.rows)
        return self._run("decoder", padded, lambda inputs: self._decode(inputs, encoded))

    def _draft(self, draft: HostDraft, features: torch.Tensor) -> DraftOutput | None:
        count = draft.shape.anchors
        if not count:
            return super()._draft(draft, features)
        shape = self._draft_shape
        padded = draft.padded(shape or self._sizes.draft(draft.shape))
        if shape is None or self._results is None:
            made = self._draft_behind(padded.upload(self._device), features)
            assert made is not None, "a padded pass has anchors"
        else:
            made = self._run("draft", padded, self._draft_of_results)
        return DraftOutput(made.tokens[:count], made.confidence[:count])

    # -- the functions of a step -----------------------------------------------------------------

    def _step(self, inputs: StepInputs) -> DecoderOutput:
        return self._network.forward(inputs.batch, PagedCache(self._pools, inputs.tables))

    def _encode(self, inputs: StepInputs) -> Residual:
        return self._network.encoder(inputs.batch, PagedCache(self._pools, inputs.tables))

    def _decode(self, inputs: StepInputs, encoded: Residual) -> DecoderOutput:
        cache = PagedCache(self._pools, inputs.tables)
        return self._network.decoder(inputs.batch, cache, encoded)

    def _draft_of_results(self, inputs: DraftInputs) -> DraftOutput:
        """Behind the last step, whose features every graph leaves in one place."""
        assert self._results is not None
        made = self._draft_behind(inputs, self._results.features)
        assert made is not None, "a padded pass has anchors"
        return made

    # -- graphs ----------------------------------------------------------------------------------

    def _run(self, kind: str, host: Host, run: Callable[[Any], Output]) -> Output:
        """`run` of inputs in one of the sizes: by its graph, where there is one."""
        if self._results is None:
            return run(host.upload(self._device))
        key = (kind, host.shape)
        if key not in self._graphs:
            self._uses[key] += 1
            if self._uses[key] <= self._capture_after:
                return self._results.keep(run(host.upload(self._device)))
            self._capture(kind, type(host), host.shape, run)
        made: Output = self._graphs[key].replay(host)
        return made

    def _capture(
        self, kind: str, host: type[Host], shape: Any, run: Callable[[Any], Output]
    ) -> None:
        """A graph is captured with padding alone, which leaves no trace in the caches."""
        results = self._results
        assert results is not None
        blank: Any = self._blanks[host].padded(shape)
        self._graphs[kind, shape] = StepGraph(
            lambda inputs: results.keep(run(inputs)),
            blank,
            device=self._device,
            pool=self._pool,
        )


def waits_for_experts(network: Network) -> bool:
    """Whether any experts run the reference on a device."""
    from plugins.moe.device_weights import device_experts  # imports the Triton language

    weights, dtype = network.weights, network.dtype
    stages = () if weights.draft is None else weights.draft.stages
    experts = [
        one for layer in (*weights.layers, *stages) for one in (layer.moe.routed, layer.moe.shared)
    ]
    return dtype == torch.float64 or any(device_experts(one, dtype) is None for one in experts)


def _extended(residual: Residual, rows: int) -> Residual:
    """`residual` with rows of zeros up to `rows`."""
    more = rows - residual.streams.shape[0]
    streams = torch.nn.functional.pad(residual.streams, (0, 0, 0, 0, 0, more))
    return Residual(streams, torch.nn.functional.pad(residual.pre, (0, 0, 0, more)))
