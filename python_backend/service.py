"""One engine being served: network, pools, executor, core and text, built from settings.

Knows nothing of the Triton server; `triton_model` puts it behind one, and tests use it directly.

    model = ServedModel.open(Path("engine"), {"dtype": "float64"})
    model.start()
    model.warm_up()
    model.core.add_request(request)
    model.stop()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from engine.config import ModelConfig
from engine.directory import Engine
from engine.kernels import kernels_dir, read_kernels
from engine.manifest import EngineError
from engine.network import Network
from engine.network.device import moved
from engine.paged_cache import CachePools
from python_backend.core import EngineCore
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.plan import DEVICE, open_plans, refusal
from python_backend.executor.pools import pools_of
from python_backend.executor.torch_executor import PagedExecutor, TorchExecutor
from python_backend.generation.defaults import (
    NO_DEFAULTS,
    Defaults,
    DefaultsError,
    generation_defaults,
)
from python_backend.grammar.grammars import Grammars
from python_backend.request import Delta, Request, SamplingParams
from python_backend.scheduler.slots import MAX_END_IDS
from python_backend.settings import CoreLimits, ServeSettings, SettingsError
from python_backend.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from plugins.device.store import KernelStore
    from python_backend.kv_events import KvEventPublisher

logger = logging.getLogger(__name__)

STOP_SECONDS = 30.0
# That prompts add to a step on a CPU, unless the operator says how many rows it may have: pages of
# a client that left, and everybody who waits for the step's end, then wait little longer.
STEP_SECONDS = 0.5
_PROGRESS_STEPS = 20
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")

# Called with a stage's name and its share done, 0 … 1.
OnProgress = Callable[[str, float], None]


def no_progress(stage: str, share: float) -> None:
    """Show nothing."""


def settings_for(engine: Engine, options: Mapping[str, Any]) -> ServeSettings:
    """What was asked, and the engine's own limits for what was not.

    Raises SettingsError for a setting that is unknown, wrong or above what the engine is built for.
    """
    asked = ServeSettings.from_options(options)
    given = _names(options)
    changes: dict[str, Any] = {}
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        limit, value = getattr(engine.build, name), getattr(asked, name)
        if name not in given or value is None:
            changes[name] = limit
        elif value > limit:
            raise SettingsError(
                f"expected {name} of at most {limit}, what the engine {engine.path} is built for, "
                f"got {value}; lower it or build the engine with --{name}"
            )
    return replace(asked, **changes)


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(_CGROUP_USED.read_text()))
    except OSError:  # no control groups of version 2 here
        pass
    return max(available, 0)


@dataclass(frozen=True)
class CheckedEngine:
    """An engine with settings that can serve it; no weight was read. `text` None: ids only.
    `step_seconds`: see `CoreLimits`."""

    engine: Engine
    settings: ServeSettings
    text: TextTokenizer | None
    end_ids: frozenset[int]
    defaults: Defaults
    step_seconds: float | None = None

    @property
    def runs_plans(self) -> bool:
        return self.settings.executor == "plan"

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    @property
    def device(self) -> str:
        return DEVICE if self.runs_plans else self.settings.device

    def limits(self) -> CoreLimits:
        """Sized for the memory that is free now. Raises SettingsError when that is too little."""
        free = available_memory() if self.device == "cpu" else torch.cuda.mem_get_info()[0]
        limits = self.settings.resolve(self.engine.config, free)
        return replace(limits, step_seconds=self.step_seconds)

    def pools(self, limits: CoreLimits) -> CachePools:
        """The memory of the caches."""
        config, quantize = self.engine.config, self.settings.cache_quant
        return pools_of(config, limits, self.dtype, self.device, quantize=quantize)


def check(engine_dir: Path, options: Mapping[str, Any]) -> CheckedEngine:
    """Raises EngineError, SettingsError, ConfigError or TokenizerError with one sentence."""
    engine = Engine.open(engine_dir)
    if engine.build.tp_size != 1:
        raise EngineError(
            f"expected an engine of one rank, got {engine.build.tp_size} ranks in {engine.path}; "
            "build it with --tp_size 1"
        )
    text = None
    if engine.tokenizer_path is not None:
        config = engine.config
        text = TextTokenizer.from_file(
            engine.tokenizer_path, config.vocab_size, config.bos_token_id
        )
    checked = CheckedEngine(
        engine, settings_for(engine, options), text, _end_ids(engine), _defaults(engine)
    )
    reason = refusal(engine, checked.dtype) if checked.runs_plans else None
    if reason is not None:
        raise EngineError(reason)
    if checked.device != "cpu" and not torch.cuda.is_available():
        raise SettingsError("expected a CUDA device for device cuda, found none; use device cpu")
    if checked.device == "cpu" and not _names(options) & {"max_num_tokens"}:
        checked = replace(checked, step_seconds=STEP_SECONDS)
    checked.limits()
    return checked


def _names(options: Mapping[str, Any]) -> set[str]:
    return {option.replace("-", "_") for option in options}


@dataclass
class ServedModel:
    """Owns the core's thread. `text` is None for an engine without a tokenizer."""

    config: ModelConfig
    limits: CoreLimits
    core: EngineCore
    text: TextTokenizer | None
    end_ids: frozenset[int]
    grammars: Grammars
    defaults: Defaults = NO_DEFAULTS
    events: KvEventPublisher | None = None
    kernels: KernelStore | None = None  # on a GPU, of an engine that has them

    @staticmethod
    def open(
        engine_dir: Path, options: Mapping[str, Any], on_progress: OnProgress = no_progress
    ) -> ServedModel:
        """Read the engine and make the pools. Raises what `check` raises, and CheckpointError:
        each a ValueError with one sentence."""
        checked = check(engine_dir, options)  # before minutes of loading
        kernels = stored_kernels(checked)
        events = open_events(checked.settings.kv_events)
        make_executor = _load(checked, on_progress)
        limits = checked.limits()
        pools = checked.pools(limits)
        on_progress("making cache pools", 1.0)
        core = EngineCore(make_executor(pools, limits), limits, listener=events)
        config = checked.engine.config
        return ServedModel(
            config=config,
            limits=limits,
            core=core,
            text=checked.text,
            end_ids=checked.end_ids,
            grammars=Grammars(config, checked.text),
            defaults=checked.defaults,
            events=events,
            kernels=kernels,
        )

    def start(self) -> None:
        """Serve on a thread of its own until `stop`."""
        self._thread = threading.Thread(target=self._run, name="core")
        self._thread.start()

    def warm_up(self) -> None:
        """Make one token, so that ready means working. Raises RequestError when it fails."""
        ended = threading.Event()
        last: list[Delta] = []

        def on_delta(delta: Delta) -> None:
            if delta.finish_reason is not None:
                last.append(delta)
                ended.set()

        self.core.add_request(
            Request(
                request_id="warm-up",
                input_ids=np.array([self.config.bos_token_id], dtype=np.int32),
                max_tokens=1,
                sampling=SamplingParams(),
                end_ids=frozenset(),
                on_delta=on_delta,
                use_prefix_cache=False,
            )
        )
        ended.wait()
        if last[0].error is not None:
            raise last[0].error
        if self.kernels is not None:
            self.kernels.log()

    def stop(self) -> None:
        """End what runs, each request with its last delta, and the thread."""
        self.core.stop()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.error("the core's thread did not end in %s seconds", STOP_SECONDS)
        if self.events is not None:
            self.events.close()

    def _run(self) -> None:
        try:
            self.core.run()
        except Exception:  # every request was told; new ones are refused from now on
            logger.exception("core_failed")


def stored_kernels(checked: CheckedEngine) -> KernelStore | None:
    """The engine's kernels for this GPU, from which this process launches from now on; None where
    it has none or runs none. Raises SettingsError where they are needed and not there."""
    if checked.runs_plans or checked.device == "cpu":
        return None
    from plugins.device.store import KernelStore, device_target

    engine, settings, target = checked.engine, checked.settings, device_target()
    info = read_kernels(engine.path).get(target)
    if info is not None and info.dtype == settings.dtype:
        store = KernelStore(kernels_dir(engine.path), target, only=not settings.compile_kernels)
        store.serve()
        return store
    lacking = f"kernels for {target} and {settings.dtype}"
    remedy = f"build the engine with --kernels {target} and serve in bfloat16"
    if not settings.compile_kernels:
        raise SettingsError(
            f"expected {lacking} in the engine {engine.path} with compile_kernels off, found none; "
            f"{remedy}, or turn it on"
        )
    logger.warning(
        "the engine has no %s: they are compiled when first launched, which takes minutes; %s",
        lacking,
        remedy,
    )
    return None


def _load(
    checked: CheckedEngine, on_progress: OnProgress
) -> Callable[[CachePools, CoreLimits], PagedExecutor]:
    """Read the weights, in the form that the executor has them; it then wants its pools."""
    engine, settings = checked.engine, checked.settings
    if checked.runs_plans:
        on_plans = open_plans(engine, checked.dtype)
        return lambda pools, limits: on_plans(pools)
    advance = _share_of(engine.weight_bytes(), "loading weights", on_progress)
    weights = engine.load_weights(checked.dtype, packed=True, advance=advance)
    if checked.device == "cpu":
        network = Network(engine.config, weights)
        return lambda pools, limits: TorchExecutor(network, pools)
    moved_weights = moved(weights, checked.device, engram_on_host=settings.engram_on_host)
    on_device = Network(engine.config, moved_weights)

    def executor(pools: CachePools, limits: CoreLimits) -> CudaExecutor:
        made = CudaExecutor(on_device, pools, limits, graphs=settings.cuda_graphs)
        shapes = made.shapes_at_start()
        advance = _share_of(len(shapes), "capturing graphs", on_progress)
        for shape in shapes:
            made.capture(shape)
            advance(1)
        return made

    return executor


def open_events(endpoint: str | None) -> KvEventPublisher | None:
    """Raises SettingsError for an endpoint that cannot be bound, or without its package."""
    if endpoint is None:
        return None
    try:
        from python_backend.kv_events import KvEventPublisher
    except ImportError as error:
        raise SettingsError(
            f"expected the package {error.name} for kv_events, found none; install the extra "
            "kv-events, or leave the setting out"
        ) from None
    try:
        return KvEventPublisher(endpoint)
    except OSError as error:
        raise SettingsError(
            "expected kv_events to be a ZeroMQ endpoint that can be bound, such as "
            f"tcp://127.0.0.1:5557 or ipc:///run/kv-events, got {endpoint!r}: {error.strerror}"
        ) from None


def _share_of(total: int, stage: str, on_progress: OnProgress) -> Callable[[int], None]:
    """Bytes to shares of `total`, told at most twenty times."""
    done, told = 0, 0

    def advance(num_bytes: int) -> None:
        nonlocal done, told
        done += num_bytes
        step = _PROGRESS_STEPS * done // max(total, 1)
        if step > told:
            told = step
            on_progress(stage, step / _PROGRESS_STEPS)

    return advance


def _defaults(engine: Engine) -> Defaults:
    """What generation_config.json sets for requests that do not."""
    try:
        return generation_defaults(engine.generation_config, engine.config.vocab_size)
    except DefaultsError as error:
        raise EngineError(
            f"in generation_config.json of {engine.path}: {error}; mend the checkpoint's file and "
            "build the engine again"
        ) from None


def _end_ids(engine: Engine) -> frozenset[int]:
    """The configuration's end token and those of generation_config.json, where null is none."""
    given = engine.generation_config.get("eos_token_id")
    more = given if isinstance(given, list) else [] if given is None else [given]
    for token in more:
        if type(token) is not int or not 0 <= token < engine.config.vocab_size:
            raise EngineError(
                f"expected eos_token_id in generation_config.json of {engine.path} to be token ids "
                f"from 0 to {engine.config.vocab_size - 1}, got {given!r}; mend the checkpoint's "
                "file and build the engine again"
            )
    end_ids = frozenset({engine.config.eos_token_id, *more})
    if len(end_ids) > MAX_END_IDS:
        raise EngineError(
            f"expected at most {MAX_END_IDS} end tokens in generation_config.json of "
            f"{engine.path}, got {len(end_ids)}; shorten the checkpoint's list and build the "
            "engine again"
        )
    return end_ids
