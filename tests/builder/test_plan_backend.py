"""Plans from ONNX files: what the backend builds, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from builder.plans import BACKENDS, PlanError, PlanRequest
from builder.plans.dialect import adapt
from builder.plans.ranges import Range, shapes
from engine.plans import Binding
from plugins.graph import DOMAIN
from plugins.tensorrt_library import TensorRtError

RTX = BACKENDS["tensorrt-rtx"]
RANGES = {"T": Range(0, 8, 64), "pages": Range(1, 100, 10_000)}
FLOAT, UINT8, INT64 = (getattr(onnx.TensorProto, name) for name in ("FLOAT", "UINT8", "INT64"))
SIZES = {
    "x": (FLOAT, ["T", 64]),
    "weight": (FLOAT, [64]),
    "rows": (UINT8, ["pages", 132]),
    "slots": (INT64, ["T"]),
    "y": (FLOAT, ["T", 64]),
    "rows_out": (UINT8, ["pages", 132]),
}
NORM = ("norm", ["x", "weight"], ["y"], {"eps": "1e-20"})
STORE = {"rows_region": [0, 2, 64], "rows_record": "window"}

pytestmark = pytest.mark.skipif(RTX.available() is not None, reason=str(RTX.available()))


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., PlanRequest]:
    """request_of(node, …): those nodes in a file; a node is operator, inputs, outputs, attributes.

    The directory has a space in its name.
    """
    directory = tmp_path / "an engine"
    directory.mkdir()

    def make(*nodes: tuple[str, list[str], list[str], dict[str, Any]]) -> PlanRequest:
        made = [
            onnx.helper.make_node(
                operator, inputs, outputs, f"{operator} {i}", domain=DOMAIN, **attributes
            )
            for i, (operator, inputs, outputs, attributes) in enumerate(nodes)
        ]
        written = [name for node in made for name in node.output if name in SIZES]
        used = dict.fromkeys(name for node in made for name in node.input if name in SIZES)
        read = [name for name in used if name not in written]
        inputs, outputs = (
            [onnx.helper.make_tensor_value_info(name, *SIZES[name]) for name in names]
            for names in (read, written)
        )
        graph = onnx.helper.make_graph(made, "segment", inputs, outputs)
        opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid(DOMAIN, 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        onnx.save(model, directory / "segment.onnx")
        return PlanRequest(directory / "segment.onnx", directory / "segment.plan", RANGES)

    return make


def in_child(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """Let every Python process that starts from now on run `code` first."""
    (directory / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_a_plan_of_stores_written_in_turn(request_of: Callable[..., PlanRequest]) -> None:
    """Two writes to one store, and a norm: shapes, ranges and the memory that is shared."""
    request = request_of(
        NORM,
        ("kv_write", ["x", "rows", "slots"], ["between"], STORE),
        ("kv_write", ["y", "between", "slots"], ["rows_out"], STORE),
    )
    info = RTX.build(request)
    assert (info.library, info.version) == ("tensorrt-rtx", "1.7.1.116")
    assert info.compute_capabilities == ("8.x", "12.x")
    assert request.plan.stat().st_size == info.num_bytes > 1000
    assert 0 < info.seconds < 60
    rows = ((1, 132), (100, 132), (10_000, 132))
    by_token = ((0, 64), (8, 64), (64, 64))
    assert {binding.name: binding for binding in info.bindings} == {
        "x": Binding("x", True, "float32", (-1, 64), *by_token),
        "weight": Binding("weight", True, "float32", (64,), (64,), (64,), (64,)),
        "rows": Binding("rows", True, "int8", (-1, 132), *rows),
        "slots": Binding("slots", True, "int64", (-1,), (0,), (8,), (64,)),
        "y": Binding("y", False, "float32", (-1, 64)),
        "rows_out": Binding("rows_out", False, "int8", (-1, 132), alias="rows"),
    }
    assert {path.name for path in request.plan.parent.iterdir()} == {"segment.onnx", "segment.plan"}


def test_nodes_that_nothing_can_run(request_of: Callable[..., PlanRequest]) -> None:
    """Named before the library sees them: it would build plans that fail when they run."""
    for node, complaint in (
        (("nothing", ["x"], ["y"], {}), r"node 'nothing 0' is of operator nothing, which this"),
        (("norm", ["x", "weight"], ["y"], {}), r"node 'norm 0' \(norm\) lacks eps; export"),
        (("norm", ["x"], ["y"], {"eps": "0"}), r"node 'norm 0' \(norm\) lacks weight; export"),
        (("kv_write", ["x", "rows", "slots"], [], STORE), r"node 'kv_write 0' .* lacks outputs"),
    ):
        model = onnx.load(request_of(node).onnx)
        with pytest.raises(TensorRtError, match=complaint):
            adapt(model)


def test_a_graph_that_the_parser_refuses(request_of: Callable[..., PlanRequest]) -> None:
    request = request_of(NORM)
    model = onnx.load(request.onnx)
    model.graph.node[0].input[1] = "x"  # a weight of the wrong rank
    onnx.save(model, request.onnx)
    complaint = r"segment.onnx: tensorrt-rtx refuses node 0 'norm 0' \(norm\): .+ shape computation"
    with pytest.raises(PlanError, match=complaint) as caught:
        RTX.build(request)
    assert len(str(caught.value).splitlines()) == 1
    request.onnx.write_bytes(b"hello")
    with pytest.raises(PlanError, match=r"segment.onnx: expected an ONNX model, found something"):
        RTX.build(request)


def test_a_full_disk_leaves_no_plan(
    request_of: Callable[..., PlanRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = request_of(NORM)
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (4096, 4096))"
    in_child(monkeypatch, tmp_path, limit)
    with pytest.raises(PlanError, match=r"cannot use .*: File too large"):
        RTX.build(request)
    assert [path.name for path in request.plan.parent.iterdir()] == ["segment.onnx"]


def test_a_library_that_dies_is_reported(
    request_of: Callable[..., PlanRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = request_of(NORM)
    death = "import os; os.write(2, b'terminate called'); os.kill(os.getpid(), 11)"
    in_child(monkeypatch, tmp_path, death)
    with pytest.raises(PlanError, match=r"tensorrt-rtx 1.7.1.116 ended with SIGSEGV while build"):
        RTX.build(request)


def test_interruption_stops_the_child_and_leaves_no_plan(
    request_of: Callable[..., PlanRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child begins a plan, interrupts its parent and would sleep for an hour."""
    request = request_of(NORM)
    partial = request.plan.with_name("segment.plan.partial")
    in_child(
        monkeypatch,
        tmp_path,
        f"import os, time; open({str(partial)!r}, 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid(), 2); time.sleep(3600)",
    )
    with pytest.raises(KeyboardInterrupt):
        RTX.build(request)
    assert [path.name for path in request.plan.parent.iterdir()] == ["segment.onnx"]


def test_dims_are_sizes_symbols_and_formulas() -> None:
    ranges = {"T": Range(0, 8, 64), "R": Range(1, 2, 16)}
    got = shapes("x", ["R+1", 5, "2*T"], ranges)
    assert got == ((2, 5, 0), (3, 5, 16), (17, 5, 128))
    for dims in (["K"], [""], ["T %% 2"]):
        with pytest.raises(TensorRtError, match="of input x to follow from the symbols T, R, got"):
            shapes("x", dims, ranges)


def test_full_tensorrt_says_what_it_needs() -> None:
    reason = BACKENDS["tensorrt"].available()
    assert reason is None or "not installed" in reason or "on a GPU only" in reason
