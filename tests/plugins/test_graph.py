"""The graph form of every operator against its reference, on the operators' own cases."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import onnx
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.engram import engram_layout
from plugins.formats.records import index_record, nvfp4_engram_record, window_record
from plugins.formats.rows import PackedRows, Region, RowStore, ValueRows
from plugins.graph import DOMAIN, graph_operator, graph_operators
from plugins.graph_dims import bind, evaluate, shape_of
from plugins.graph_values import GraphRows, Pages
from plugins.mega_mhc.cases import ATTRIBUTES as MIX_ATTRIBUTES

NAMES = [operator.name for operator in graph_operators()]


def engram_arguments(name: str, case: Any, dtype: torch.dtype) -> dict[str, Any]:
    layout = engram_layout(
        [1], max_ngram_size=4, n_heads=2, vocab_size=101, compressed_vocab_size=256
    )[1]
    return case.operands() | {"layout": layout} if name == "engram_rows" else case.operands(dtype)


def lookups(dtype: torch.dtype) -> list[dict[str, Any]]:
    record = nvfp4_engram_record(32, 0.3)
    rows = torch.randint(0, 256, (9, record.bytes_per_row), dtype=torch.uint8)
    rows[:, record.data_bytes :] = 0x38
    wanted = torch.tensor([[0, 8, 3], [8, 8, 1]])
    stores: list[RowStore] = [ValueRows(torch.randn(9, 5)), PackedRows(rows, record)]
    return [{"table": one, "rows": wanted, "dtype": dtype} for one in stores]


def arguments_of(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Arguments of the reference, by name, for the cases of the operator's folder."""
    reference = graph_operator(name).entry.reference
    cases = importlib.import_module(f"{reference.__module__.rpartition('.')[0]}.cases")
    if name == "engram_lookup":
        return lookups(dtype)
    if name == "round_queries":
        return [{"queries": torch.randn(3, 4, 64, dtype=dtype), "layout": index_record(64)}]
    kind = {"engram_rows": "HASH_", "engram_gate": "INJECT_", "previous_rows": "PREVIOUS_"}
    found = []
    for case in getattr(cases, f"{kind.get(name, '')}CASES"):
        if name.startswith("engram"):
            operands = engram_arguments(name, case, dtype)
        else:
            operands = {**vars(case), **MIX_ATTRIBUTES, **case.operands(dtype)}
        if name in ("hc_collapse", "hc_expand"):
            shape = operands["streams"].shape
            operands |= {
                "pre": torch.rand(shape[:2], dtype=dtype),
                "post": torch.rand(shape[:2], dtype=dtype),
                "comb": torch.rand(*shape[:2], shape[1], dtype=dtype),
                "y": case.output(dtype),
            }
        if name == "topk_of_blocks":
            blocks = -(-operands["scores"].shape[1] // case.block_size)
            operands["blocks"] = torch.arange(0, blocks, 2).repeat(case.rows, 1)
        if name == "candidate_topk":
            blocks = torch.arange(0, -(-operands["key_slots"].shape[1] // 4), 2)
            operands |= {
                "blocks": blocks.repeat(operands["queries"].shape[0], 1), "k": 5, "block_size": 4,
            }  # fmt: skip
        found.append({k: operands[k] for k in inspect.signature(reference).parameters})
    return found


def as_tuple(made: Any) -> tuple[torch.Tensor, ...]:
    if made is None:
        return ()
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def store_tensor(store: Any) -> torch.Tensor:
    return store.data if isinstance(store, PackedRows) else store.values


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_node_gives_what_the_reference_gives(name: str, dtype: torch.dtype) -> None:
    """Bitwise: by `run` in place, by the copying custom op, and by shapes and dtypes alone."""
    operator = graph_operator(name)
    for arguments in arguments_of(name, dtype):
        expected_arguments = copy.deepcopy(arguments)
        expected = as_tuple(operator.entry.reference(**expected_arguments))
        written = [
            store_tensor(expected_arguments[spec.name])
            for spec in operator.entry.schema.inputs
            if spec.aliased
        ]
        tensors, attributes = operator.flatten(arguments)
        before = [None if tensor is None else tensor.clone() for tensor in tensors]
        values = [attributes.get(one.name) for one in operator.attributes]
        copied = as_tuple(operator.torch_op(*tensors, *values))
        for tensor, old in zip(tensors, before, strict=True):
            if old is not None:
                same(tensor, old)  # the custom op copies what it writes
        assert len(copied) == len(operator.outputs) == len(expected) + len(written)
        outputs = operator.run(tensors, attributes)
        for got, also, wanted in zip(outputs, copied, [*expected, *written], strict=True):
            same(got, wanted)
            same(also, wanted)
        for one, got in zip(operator.outputs, outputs, strict=True):
            assert one.alias is None or got is tensors[one.alias]
        with FakeTensorMode() as mode:
            fakes = [None if t is None else mode.from_tensor(t) for t in before]
            for fake, wanted in zip(
                as_tuple(operator.torch_op(*fakes, *values)), outputs, strict=True
            ):
                assert (fake.shape, fake.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_onnx_node_keeps_every_operand_and_attribute(name: str) -> None:
    operator = graph_operator(name)
    assert operator.onnx_schema.domain == DOMAIN
    assert onnx.defs.get_schema(name, domain=DOMAIN).name == name
    assert [one.name for one in operator.onnx_schema.inputs] == [o.name for o in operator.inputs]
    for arguments in arguments_of(name, torch.float32)[:2]:
        tensors, attributes = operator.flatten(arguments)
        node = onnx.helper.make_node(
            name,
            ["" if t is None else f"i{i}" for i, t in enumerate(tensors)],
            [one.name for one in operator.outputs],
            domain=DOMAIN,
            **{k: v for k, v in operator.onnx_attributes(attributes).items() if v != []},
        )
        onnx.checker.check_node(node, _context())
        read = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert operator.from_onnx_attributes(read) == attributes


def _context() -> onnx.checker.C.CheckerContext:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = 10
    context.opset_imports = {"": 23, DOMAIN: 1}
    return context


def test_a_float_attribute_survives_to_the_last_bit() -> None:
    """ONNX keeps FLOAT attributes in float32, where 512 ** −0.5 is off by 3e-9."""
    operator = graph_operator("mega_attention")
    text = operator.onnx_attributes({"scale": 512**-0.5})
    assert operator.from_onnx_attributes(text) == {"scale": 0.04419417382415922}


def test_stores_share_one_page_without_touching_each_other() -> None:
    """Two stores in pages of 40 bytes; a hand-computed byte range changes, the rest does not."""
    pages = torch.full((3, 40), 7, dtype=torch.uint8)
    record = window_record(32)  # 32 codes and one scale byte
    assert record.bytes_per_row == 33
    node = graph_operator("kv_write")
    values = torch.full((1, 32), 448.0)
    attributes = {"rows_region": [5, 1, 32], "rows_record": "window"}
    (written,) = node.run([values, pages, torch.tensor([2])], attributes)
    assert written is pages
    assert pages[:2].eq(7).all()
    # 448 is the largest E4M3 code, at scale 2^0.
    assert pages[2].tolist() == [7] * 5 + [0x7E] * 32 + [127] + [7] * 2


def test_a_traced_write_is_seen_by_the_reads_after_it() -> None:
    """Two stores over one memory: the graph is a chain, and slot = page · rows + row."""

    def network(values: torch.Tensor, memory: torch.Tensor, slots: torch.Tensor) -> Any:
        from plugins.engram import engram_lookup
        from plugins.kv_write import kv_write

        pages = Pages(memory)
        low, high = (GraphRows(pages, Region(offset, 2, 3), None) for offset in (0, 6))
        kv_write(values, low, slots)
        kv_write(values + 1, high, slots)
        return engram_lookup(low, slots.unsqueeze(1), values.dtype), pages.tensor

    class Module(torch.nn.Module):
        def forward(self, *operands: torch.Tensor) -> Any:
            return network(*operands)

    operands = (torch.ones(2, 3), torch.zeros(2, 12), torch.tensor([3, 0]))
    rows = torch.export.Dim("rows")
    shapes = (({0: rows}, None, {0: rows}),)
    program = torch.export.export(Module(), operands, dynamic_shapes=shapes)
    targets = [str(n.target) for n in program.graph.nodes if "dsv41" in str(n.target)]
    assert targets == ["dsv41.kv_write.default"] * 2 + ["dsv41.engram_lookup.default"]
    values = torch.tensor([[1.0, 2.0, 3.0]])
    read, memory = program.module()(values, torch.zeros(2, 12), torch.tensor([3]))
    assert read.tolist() == [[1.0, 2.0, 3.0]]
    assert memory.tolist() == [[0.0] * 12, [0, 0, 0, 1, 2, 3, 0, 0, 0, 2, 3, 4]]


def test_rows_over_pages_cannot_enter_a_graph_by_themselves() -> None:
    store = ValueRows(torch.zeros(2, 2, 3))
    with pytest.raises(TypeError, match="got ValueRows over pages; give GraphRows"):
        graph_operator("kv_write").flatten({"values": None, "rows": store, "slots": None})


@pytest.mark.parametrize(
    ("formula", "size"),
    [
        ("T", 6),
        ("R+1", 3),
        ("n-1", 8),
        ("S*(2+S)", 24),
        ("H/groups*d", 40),
        ("min(k,n)", 5),
        ("ceil(n/block_size)", 3),
        ("len(layout.primes)", 3),
        ("12", 12),
    ],
)
def test_formulas(formula: str, size: int) -> None:
    sizes = {"T": 6, "R": 2, "n": 9, "S": 4, "H": 8, "groups": 2, "d": 10, "k": 5}
    assert evaluate(formula, {**sizes, "block_size": 4, "layout_primes": [2, 3, 5]}) == size


def test_an_ellipsis_takes_what_the_others_leave() -> None:
    sizes: dict[str, Any] = {}
    bind(("T", "...", "d"), (2, 3, 4, 5), sizes)
    assert sizes == {"T": 2, "...": [3, 4], "d": 5}
    assert shape_of(("d", "...", "T"), sizes) == [5, 3, 4, 2]


def test_what_is_no_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a formula of sizes, got T % 2"):
        evaluate("T % 2", {"T": 4})
