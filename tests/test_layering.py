"""Imports point one way: plugins ← engine ← {builder, python_backend}; client stands alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("plugins", "engine", "builder", "python_backend", "client")
MAY_IMPORT = {
    "plugins": {"plugins"},
    "engine": {"engine", "plugins"},
    "builder": {"builder", "engine", "plugins"},
    "python_backend": {"python_backend", "engine", "plugins"},
    "client": {"client"},
}
# The scheduling half of the backend runs and is tested without the numerical library.
TORCH_FREE = (
    "python_backend/request.py",
    "python_backend/step_plan.py",
    "python_backend/replay.py",
    "python_backend/core.py",
    "python_backend/settings.py",
    "python_backend/kv",
    "python_backend/metrics",
    "python_backend/scheduler",
    "engine/config.py",
    "engine/batch.py",
    "client",
)


def imported_modules(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Absolute module names that `path` imports; optionally only those run on import."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if (
            at_import_time
            and isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def python_files(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_upward_import(package: str) -> None:
    files = python_files(package)
    assert files, f"{package} has no Python files"
    for path in files:
        ours = {m.split(".")[0] for m in imported_modules(path)} & (set(PACKAGES) | {"tests"})
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {ours}"


def test_torch_free_files_reach_no_torch() -> None:
    """Walks imports transitively, so that a helper module cannot smuggle torch in."""
    by_module = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in python_files(package)
    }
    by_module |= {
        name.removesuffix(".__init__"): path
        for name, path in by_module.items()
        if name.endswith(".__init__")
    }
    for place in TORCH_FREE:
        pending, seen = list(python_files(place)), set()
        while pending:
            path = pending.pop()
            if path in seen:
                continue
            seen.add(path)
            for module in imported_modules(path, at_import_time=True):
                assert module.split(".")[0] != "torch", f"{place} reaches torch through {path}"
                pending += [by_module[m] for m in _with_parents(module) if m in by_module]


def test_one_function_says_which_tensors_run_kernels() -> None:
    """Meta tensors do too, which is how an engine's kernels are found (docs/adr/0010): who asks for
    is_cuda instead leaves some of them out. Two ask where memory lies, not which code runs."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for package in ("plugins", "engine")
        for path in python_files(package)
        if any(node.attr == "is_cuda" for node in _attributes(path))
    }
    memory = {"plugins/engram/kernel.py", "engine/network/engram.py"}
    assert asking == {"plugins/registry.py", *memory}, "use plugins.registry.runs_kernels"


def test_kernels_ask_the_device_in_one_place() -> None:
    """Where kernels are compiled ahead there is no device to ask."""
    for path in ROOT.glob("plugins/*/kernel*.py"):
        asked = [
            one for one in map(ast.unparse, _attributes(path)) if one.startswith("torch.cuda.")
        ]
        assert not asked, f"{path} asks {asked}; let plugins.device.launch ask it"


def _attributes(path: Path) -> list[ast.Attribute]:
    found = ast.walk(ast.parse(path.read_text()))
    return [node for node in found if isinstance(node, ast.Attribute)]


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def test_the_model_repository_is_a_door() -> None:
    lines = (ROOT / "model_repository/deepseek_v41/1/model.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    assert len(code) <= 8, "model.py re-exports python_backend.triton_model and does nothing else"
