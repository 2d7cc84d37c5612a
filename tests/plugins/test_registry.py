"""Every operator is described once, and its description fits its reference."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import plugins
from plugins.capability import describe, probe
from plugins.registry import OPERATORS, Operator, operator
from plugins.schema import OperatorSchema, TensorSpec

FOLDERS = sorted(
    module.name
    for module in pkgutil.iter_modules(plugins.__path__)
    if module.ispkg and module.name not in ("device", "formats")
)
for folder in FOLDERS:
    importlib.import_module(f"plugins.{folder}")


def schema(name: str) -> OperatorSchema:
    x = TensorSpec("x", ("T",))
    return OperatorSchema(name, (x,), (x,), ("n",), ties="none", deterministic="yes", source="test")


@pytest.fixture
def scratch_name() -> str:
    name = "scratch"
    yield name
    OPERATORS.pop(name, None)


def test_the_simple_operators_are_there() -> None:
    assert {"norm", "rope", "linear", "wo_a", "kv_write", "sample"} <= set(OPERATORS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_schema_reference_and_cases(folder: str) -> None:
    for part in ("schema", "reference", "cases"):
        importlib.import_module(f"plugins.{folder}.{part}")
    assert any(
        entry.reference.__module__.startswith(f"plugins.{folder}.") for entry in OPERATORS.values()
    )
    cases = vars(importlib.import_module(f"plugins.{folder}.cases"))
    lists = [value for name, value in cases.items() if name.endswith("CASES")]
    assert lists
    assert all(len(entries) >= 2 for entries in lists)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_schema_operands_are_the_reference_parameters(name: str) -> None:
    entry = OPERATORS[name]
    assert entry.schema.name == name
    described = [spec.name for spec in entry.schema.inputs] + list(entry.schema.attributes)
    parameters = inspect.signature(entry.reference).parameters
    assert described == list(parameters)
    for spec in entry.schema.inputs:
        hint = str(parameters[spec.name].annotation)
        assert spec.optional == ("None" in hint), f"{name}.{spec.name}: {hint}"
    assert entry.schema.ties
    assert entry.schema.deterministic
    assert entry.schema.source


def test_registering_a_name_twice_fails(scratch_name: str) -> None:
    @operator(schema(scratch_name))
    def first(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n

    assert OPERATORS[scratch_name] == Operator(schema(scratch_name), first.__wrapped__)
    with pytest.raises(ValueError, match="operator scratch is registered twice"):
        operator(schema(scratch_name))(first)


def test_an_operator_accepts_positions_and_keywords(scratch_name: str) -> None:
    @operator(schema(scratch_name))
    def add(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n

    x = torch.tensor([1, 2])
    assert add(x, 3).tolist() == add(x=x, n=3).tolist() == add(x, n=3).tolist() == [4, 5]


def test_an_operator_without_a_kernel_says_so() -> None:
    assert OPERATORS["kv_write"].reference.__module__ == "plugins.kv_write.reference"
    assert Operator(schema("plain"), describe).kernel is None


@pytest.mark.parametrize(
    ("found", "triton_language", "device", "kernels", "why"),
    [
        (None, True, "cpu", False, "no CUDA device was found"),
        ((8, 0), True, "cuda", False, "compute capability 8.0 is below 8.9"),
        ((9, 0), False, "cuda", False, "Triton language package is not installed"),
        ((9, 0), True, "cuda", True, "Triton-language kernels on CUDA (compute capability 9.0)"),
        ((10, 0), True, "cuda", True, "compute capability 10.0"),
    ],
)
def test_the_chosen_path_is_explained(
    found: tuple[int, int] | None, triton_language: bool, device: str, kernels: bool, why: str
) -> None:
    got = describe(found, triton_language)
    assert (got.device, got.compute_capability, got.kernels) == (device, found, kernels)
    assert why in got.reason


def test_the_probe_fits_this_machine() -> None:
    got = probe()
    assert got is probe()
    assert (got.device == "cuda") == torch.cuda.is_available()
    assert not got.kernels or got.triton_language
