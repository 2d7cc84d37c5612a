"""Steps on plans: what they are given and give, and what is refused.

On a CPU the exported graph stands where the plan would run; names, dtypes, sizes and aliases are
those of the plans, which are really built.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.cli import main
from builder.graph.executor import GraphExecutor
from builder.plans import BACKENDS
from engine.directory import Engine
from engine.manifest import EngineError
from engine.network import Network
from engine.paged_cache import CachePools
from engine.plans import PlanInfo, plan_file, read_plans
from engine.segments import CACHES
from plugins.tensorrt_library import TENSORRT_RTX, missing
from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule
from python_backend.executor import plan as plan_module
from python_backend.executor.plan import (
    PlanExecutor,
    bind,
    check_pools,
    engram_tables,
    open_plans,
    refusal_on,
)
from python_backend.executor.torch_executor import PagedExecutor, TorchExecutor
from python_backend.service import check
from python_backend.settings import SettingsError
from tests.python_backend.real_core import VOCAB, serve, stream
from tests.python_backend.serving import limits

BOUNDS = limits(vocab_size=VOCAB, max_seq_len=128)
SEGMENTS = ["encoder", "decoder", "draft"]

pytestmark = pytest.mark.skipif(
    missing(TENSORRT_RTX) is not None, reason=str(missing(TENSORRT_RTX))
)


@dataclass(frozen=True)
class BoundGraph:
    """The exported graph behind the plan's bindings."""

    info: PlanInfo
    graph: GraphExecutor

    def run(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        bound = bind(self.info, tensors)
        # The graph holds packed rows as uint8, which is the same memory.
        given = {n: t.view(torch.uint8) if t.dtype == torch.int8 else t for n, t in bound.items()}
        outputs = self.graph.run(given)
        for binding in self.info.bindings:
            if not binding.is_input:
                made = outputs[binding.name]
                expected = given[binding.alias] if binding.alias else made
                assert made.data_ptr() == expected.data_ptr()
                assert made.dim() == len(binding.shape)
                assert all(
                    size in (-1, n) for size, n in zip(binding.shape, made.shape, strict=True)
                )
        return outputs


@dataclass(frozen=True)
class Built:
    """An engine with plans, and its network in the plans' dtype."""

    engine: Engine
    network: Network
    plans: Mapping[str, PlanInfo]
    output: str  # of the command

    def session(self, segment: str) -> BoundGraph:
        graph = plan_file(self.engine.path, segment).with_suffix(".onnx")
        return BoundGraph(self.plans[segment], GraphExecutor(graph))

    def plan_executor(self, pools: CachePools) -> PlanExecutor:
        tables = engram_tables(self.engine, self.network.dtype, "cpu")
        sessions = {segment: self.session(segment) for segment in SEGMENTS}
        return PlanExecutor(sessions, tables, pools, device="cpu")

    def torch_executor(self, pools: CachePools) -> TorchExecutor:
        return TorchExecutor(self.network, pools)


def pools_of(network: Network, **changes: int) -> CachePools:
    pages = {"global_page_tokens": BOUNDS.global_page_tokens, "window_page_rows": 2} | changes
    return CachePools(
        network.config,
        num_global_pages=BOUNDS.num_global_pages,
        num_window_pages=BOUNDS.num_window_pages,
        num_slots=BOUNDS.max_batch_size,
        dtype=network.dtype,
        quantize=True,
        **pages,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """TINY in the released FP8 and FP4, its graphs and plans in bfloat16, by the commands."""
    checkpoint = tmp_path_factory.mktemp("plans") / "checkpoint"
    path = checkpoint.with_name("an engine")
    assert main(["init", "--config", "tiny", "--output_dir", str(checkpoint), "--seed=5"]) == 0
    directories = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(path)]
    sizes = ["--max_batch_size=4", "--max_num_tokens=32", "--max_seq_len=128"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["engine", *directories, *sizes, "--plans"]) == 0
    engine = Engine.open(path, verify=True)
    network = Network(engine.config, engine.load_weights(torch.bfloat16, packed=True))
    return Built(engine, network, read_plans(path), output.getvalue())


def test_the_command_builds_all_segments(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints, what is on disk, the caches that each segment writes, and `inspect`."""
    first, *lines = built.output.splitlines()[-5:-1]
    assert first == "plans by tensorrt-rtx 1.7.1.116"
    assert [line.partition(".plan: ")[0] for line in lines] == list(built.plans) == SEGMENTS
    written = {}
    for segment, plan in built.plans.items():
        assert plan_file(built.engine.path, segment).stat().st_size == plan.num_bytes > 10**6
        written[segment] = {b.alias for b in plan.bindings if b.alias is not None}
    assert written == {
        "encoder": {"global_pages", "window_pages", "tails"},
        "decoder": {"window_pages"},
        "draft": {"window_pages"},
    }
    assert main(["inspect", "--engine", str(built.engine.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["plans"]
    assert list(told) == SEGMENTS
    assert told["draft"] == {
        "built_by": "tensorrt-rtx 1.7.1.116",
        "compute_capabilities": ["8.x", "12.x"],
        "bytes": built.plans["draft"].num_bytes,
        "build_seconds": built.plans["draft"].seconds,
    }
    assert main(["inspect", "--engine", str(built.engine.path)]) == 0
    text = capsys.readouterr().out
    assert "by tensorrt-rtx 1.7.1.116, runs on compute capability 8.x or 12.x" in text


@pytest.mark.parametrize("draft", [None, DraftRule(most=3, min_survival=0.0)])
def test_a_core_on_plans_serves_what_a_core_on_the_network_serves(
    built: Built, draft: DraftRule | None
) -> None:
    """Prefill in chunks, decode, prefix hits with replay, sampling, drafts and their verification:
    tokens and all cache bytes, the drafter's among them."""
    prompts = [np.arange(7 + i, 7 + i + size, dtype=np.int32) for i, size in enumerate((35, 3))]
    prompts.append(np.concatenate([prompts[0], prompts[1]]))  # hits the first prompt's pages
    seen: list[tuple[list[list[int]], CachePools]] = []
    for make in (built.torch_executor, built.plan_executor):
        pools = pools_of(built.network)
        executor: PagedExecutor = make(pools)
        streams = [stream(str(i), p, 4, i % 2 == 1, i) for i, p in enumerate(prompts)]
        core = EngineCore(executor, replace(BOUNDS, draft=draft))
        serve(core, streams, [0, 0, 4])
        assert (core.statistics().num_verifications > 0) == (draft is not None)
        seen.append(([list(map(int, one.output)) for one in streams], pools))
    (expected, network_pools), (tokens, plan_pools) = seen
    assert tokens == expected
    assert [len(one) for one in tokens] == [4] * 3
    for name in CACHES:
        assert torch.equal(getattr(plan_pools, name), getattr(network_pools, name))


def test_tensors_that_the_plan_was_not_built_for(built: Built) -> None:
    info = built.plans["encoder"]
    pools = pools_of(built.network)
    check_pools(info, pools)
    with pytest.raises(
        SettingsError, match=r"expected global_pages as int8 \[1 … 2147483647, \d+\]"
    ):
        check_pools(info, pools_of(built.network, global_page_tokens=32))
    with pytest.raises(SettingsError, match="the plan reads tokens, which this software does not"):
        bind(info, {})
    tokens = next(binding for binding in info.bindings if binding.name == "tokens")
    only = replace(info, bindings=(tokens,))
    assert bind(only, {"tokens": torch.arange(64)[::2]})["tokens"].is_contiguous()
    for wrong, got in (
        (torch.zeros(33, dtype=torch.int64), r"got int64 \[33\]"),
        (torch.zeros(3, dtype=torch.int32), r"got int32 \[3\]"),
        (torch.zeros(3, 1, dtype=torch.int64), r"got int64 \[3, 1\]"),
    ):
        with pytest.raises(SettingsError, match=rf"expected tokens as int64 \[1 … 32\].*{got}"):
            bind(only, {"tokens": wrong})


def test_what_a_machine_lacks(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("an engine")
    dtype = torch.bfloat16
    assert refusal_on(path, built.plans, dtype, (8, 9)) is None
    assert refusal_on(path, built.plans, dtype, (12, 0)) is None
    complaint = "expected --dtype bfloat16, which the plans of an engine compute in, got float32"
    assert refusal_on(path, built.plans, torch.float32, (8, 9)) == complaint
    for plans, capability, complaint in (
        ({}, (8, 9), "found none for encoder and decoder; build it with dsv41-build engine --plan"),
        (built.plans, None, "expected a GPU for the plans of an engine, found no CUDA device"),
        (
            built.plans,
            (9, 0),
            "runs on compute capability 8.x or 12.x, and this GPU has 9.0; build",
        ),
    ):
        assert complaint in str(refusal_on(path, plans, dtype, capability))
    older = {name: replace(plan, version="1.5.0") for name, plan in built.plans.items()}
    complaint = "built by tensorrt-rtx 1.5.0, cannot be loaded by 1.7.1.116: a plan needs the vers"
    assert complaint in str(refusal_on(path, older, dtype, (8, 9)))
    for operators in ("", "of others"):
        other = {name: replace(plan, operators=operators) for name, plan in built.plans.items()}
        complaint = "1.7.1.116, calls operators that this software has changed; build the engine"
        assert complaint in str(refusal_on(path, other, dtype, (8, 9)))
    full = {name: replace(plan, library="tensorrt") for name, plan in built.plans.items()}
    monkeypatch.setattr(plan_module, "missing", lambda library: f"{library.name} is not here")
    assert "cannot be loaded: tensorrt is not here" in str(refusal_on(path, full, dtype, (8, 9)))


def test_serving_refuses_before_it_loads(built: Built, tmp_path: Path) -> None:
    """A machine without a GPU, an engine without plans, and a name of no executor."""
    path = built.engine.path
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match=r"expected a GPU for the plans.* leave --executor"):
            check(path, {"executor": "plan", "dtype": "bfloat16"})
        with pytest.raises(EngineError, match="expected a GPU for the plans"):
            open_plans(built.engine, torch.bfloat16)
    bare = Path(shutil.copytree(path, tmp_path / "bare"))
    shutil.rmtree(bare / "plans")
    manifest = json.loads((bare / "manifest.json").read_text())
    files = {n: f for n, f in manifest["files"].items() if not n.startswith("plans/")}
    (bare / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
    with pytest.raises(EngineError, match=r"to have plans, found none.* or leave --executor out"):
        check(bare, {"executor": "plan"})
    assert check(bare, {"executor": "torch"}).engine.path == bare
    with pytest.raises(SettingsError, match="executor to be one of torch, plan, got 'onnx'"):
        check(bare, {"executor": "onnx"})


def test_no_library_no_engine(
    built: Built,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asked for plans that nothing here can build, the command says so before it writes."""
    checkpoint = built.engine.path.with_name("checkpoint")
    for backend in BACKENDS.values():
        lacking = replace(backend.library, module="no_such_module")
        monkeypatch.setitem(BACKENDS, backend.name, replace(backend, library=lacking))
    options = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert main(["engine", *options, "--plans"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("dsv41-build: no library here builds TensorRT plans: tensorrt is not ")
    assert "; or tensorrt-rtx is not installed; pip install tensorrt-rtx-cu13-bindings==1.7" in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())
