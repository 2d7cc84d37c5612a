"""The server's files, taken from the nvidia-pytriton package, and the environment they need.

    python -m python_backend.host.files MODEL_REPOSITORY [tritonserver options]

runs the plain server on a repository. Nothing is copied: the backends are links in the instance's
folder, so a running server's files are never overwritten and its paths hold no spaces.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from python_backend.host import missing
from python_backend.host.errors import HostError

try:
    from python_backend.host.instances import Instance, remove_dead_instances
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(missing.sentence(error))

PACKAGE = "nvidia-pytriton==0.7.0"
# Run as the stub runs Python, without PYTHONPATH: its NumPy, and the version of its libpython.
_PRINT_VERSIONS = """
import ctypes, importlib.metadata, sys
print(importlib.metadata.version("numpy"))
library = ctypes.CDLL(sys.argv[1])
library.Py_GetVersion.restype = ctypes.c_char_p
print(library.Py_GetVersion().decode())
"""


@dataclass(frozen=True)
class ServerFiles:
    """Where the package keeps its parts."""

    binary: Path
    backends: Path
    caches: Path
    stub: Path
    libraries: Path

    @staticmethod
    def find() -> ServerFiles:
        """Checked to fit this interpreter. Raises HostError naming what this machine lacks."""
        spec = importlib.util.find_spec("pytriton")
        if spec is None or not spec.submodule_search_locations:
            raise HostError(
                "expected the Triton server's files in this environment, found none; install them "
                f"with pip install --no-deps {PACKAGE}"
            )
        package = Path(spec.submodule_search_locations[0])
        root = package / "tritonserver"
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        files = ServerFiles(
            binary=root / "bin" / "tritonserver",
            backends=root / "backends",
            caches=root / "caches",
            stub=root / "python_backend_stubs" / version / "triton_python_backend_stub",
            libraries=package.parent / "nvidia_pytriton.libs",
        )
        for path in (files.binary, files.backends, files.stub, files.libraries):
            if not path.exists():
                raise HostError(
                    f"expected {path} in the package that brings the Triton server, found none; "
                    f"install it again with pip install --no-deps {PACKAGE}"
                )
        _check_interpreter(files.environment())
        return files

    def link(self, folder: Path) -> None:
        """Make `folder`/backends and `folder`/caches of links; `folder` must not hold them yet."""
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for path in [*sorted((self.backends / "python").iterdir()), self.stub]:
            (backend / path.name).symlink_to(path)
        (folder / "caches").symlink_to(self.caches)

    def environment(self) -> dict[str, str]:
        """This process's environment, and what the server and its stub need.

        The stub finds its interpreter through PATH and must load that very interpreter's
        libpython; the repository's model.py imports the code that this process runs.

        Left alone, glibc raises the size from which freed memory goes back to the system whenever
        a larger block is freed, up to 32 MiB, and keeps twice as much: late in a soak a server
        held 43 MB more. With limits of its own it gives large blocks back. And it keeps an arena
        for each thread, with holes that no other thread fills: 13 to 28 MB of them in 400 guided
        requests, and rising; one arena stood still after 120.
        """
        library_path = [str(self.libraries)]
        folder = sysconfig.get_config_var("LIBDIR")
        if folder and (Path(folder) / _libpython_name()).exists():
            library_path.append(folder)
        return {
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
            **os.environ,
            "PATH": _before("PATH", str(Path(sys.executable).parent)),
            "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", *library_path),
            "PYTHONPATH": _before("PYTHONPATH", str(Path(__file__).parents[2])),
        }


def _libpython_name() -> str:
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def _check_interpreter(environment: dict[str, str]) -> None:
    """Raises HostError when the stub would crash on its NumPy, and when it would find no libpython
    or that of another interpreter."""
    name = _libpython_name()
    found = subprocess.run(
        [sys.executable, "-I", "-c", _PRINT_VERSIONS, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    numpy, _, version = found.stdout.strip().partition("\n")
    if numpy and int(numpy.split(".")[0]) >= 2:
        raise HostError(
            f"expected NumPy below 2 in this Python's own packages, got {numpy}: the server's "
            "Python stub crashes with it; install numpy==1.26.4 there (PYTHONPATH comes too late)"
        )
    package = name.removesuffix(".so.1.0")
    if found.returncode != 0:
        raise HostError(
            f"expected the shared library {name} of this Python, found none; install the "
            f"system package {package}, or use a Python built with --enable-shared"
        )
    if version != sys.version.strip():
        raise HostError(
            f"expected {name} of this Python ({sys.version}), found that of another ({version}); "
            "use a Python built with --enable-shared, or the distribution's with its "
            f"package {package}"
        )


def server_command(files: ServerFiles, instance: Instance, repository: Path) -> list[str]:
    """The command without addresses. `instance.folder` must hold what `link` makes."""
    return [
        str(files.binary),
        f"--model-repository={repository}",
        f"--backend-directory={instance.folder / 'backends'}",
        f"--cache-directory={instance.folder / 'caches'}",
        f"--backend-config=python,shm-region-prefix-name={instance.region_prefix}",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
    ]


def run_plain_server(repository: str, options: Sequence[str]) -> None:
    """Replace this process by the server on `repository`. Raises HostError before that.

    The process keeps its id, so the instance is known as its own; the next start removes it.
    """
    if not any(Path(repository).glob("*/config.pbtxt")):
        raise HostError(
            f"expected a model repository at {repository}, with a config.pbtxt in each model's "
            "folder, found none; name the folder above the models' folders"
        )
    files = ServerFiles.find()
    remove_dead_instances()
    instance = Instance.create()
    files.link(instance.folder)
    models = instance.folder / "models"  # a path that the server can hand to a shell
    models.symlink_to(Path(repository).resolve())
    addresses = [f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")]
    command = [*server_command(files, instance, models), *addresses, "--exit-timeout-secs=10"]
    os.execve(files.binary, [*command, *options], files.environment())


def _before(variable: str, *folders: str) -> str:
    """A search path that looks into `folders` first."""
    return ":".join([*folders, *filter(None, [os.environ.get(variable)])])


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print("expected a model repository: MODEL_REPOSITORY [options]", file=sys.stderr)
        return 2
    try:
        run_plain_server(words[0], words[1:])
    except HostError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
