"""Compiled kernels in a directory, for machines that need not compile them.

    DIRECTORY/sm_90/KEY.json, KEY.cubin      KEY as the Triton language names a variant
    DIRECTORY/launchers/KEY.NAME.so          what the host launches them with: launchers.py

Its key is a hash of the kernel's source, of all that it is specialised for, of target, options,
compiler and assembler. With another version of any of them nothing is found here, never something
wrong. `KernelStore.serve` puts a directory before the Triton language's own cache.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

from plugins.device.keys import make_keys_stable

LAUNCHERS = "launchers"

logger = logging.getLogger(__name__)


class MissingKernelError(RuntimeError):
    """A kernel would have to be compiled where that is forbidden; the message names it."""


def device_target() -> str:
    """The name of the current device's architecture, such as sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def keep(directory: Path, target: str, compiled: Any) -> int:
    """Copy a compiled kernel into `directory`; returns its bytes."""
    files = {Path(name).suffix: Path(path) for name, path in compiled.metadata_group.items()}
    key, folder = files[".cubin"].parent.name, directory / target
    folder.mkdir(exist_ok=True)
    return sum(
        (folder / f"{key}{suffix}").write_bytes(files[suffix].read_bytes())
        for suffix in (".json", ".cubin")
    )


class KernelStore:
    """What a process launches, and whether it was found in a directory. `only`: a kernel that is
    not there is refused with MissingKernelError instead of compiled."""

    def __init__(self, directory: Path, target: str, *, only: bool) -> None:
        self._folder = directory / target
        self._modules = directory / LAUNCHERS
        self._target = target
        self._only = only
        self._launched = "a kernel"
        self._told = False
        self.found: set[str] = set()
        self.missing: set[str] = set()

    def serve(self) -> None:
        """From now on, in this process: before the cache that it had."""
        make_keys_stable()
        below = knobs.cache.manager_class or FileCacheManager
        knobs.cache.manager_class = functools.partial(_Cache, self, below)
        knobs.runtime.jit_cache_hook = self._remember

    def log(self) -> None:
        """How many of the kernels that were launched so far came from the directory. From now on
        each that does not is a warning."""
        self._told = True
        count = len(self.found) + len(self.missing)
        if not self.missing:
            logger.info("all %d kernels for %s came with the engine", count, self._target)
            return
        logger.warning(
            "%d of %d kernels for %s came with the engine, the others were compiled here; build it "
            "with --kernels %s by this version of the software and of the Triton language",
            len(self.found),
            count,
            self._target,
            self._target,
        )

    def files(self, key: str, name: str) -> dict[str, str] | None:
        """The files of kernel `name`, under the names that the Triton language gives them; None
        where there are none. Raises MissingKernelError."""
        code = self._folder / f"{key}.cubin"
        if code.is_file():
            self.found.add(key)
            return {f"{name}.json": str(code.with_suffix(".json")), f"{name}.cubin": str(code)}
        self.missing.add(key)
        if self._only:
            raise MissingKernelError(
                f"expected a compiled kernel for {self._target} in the engine, found none of "
                f"{self._launched}; build the engine with --kernels {self._target} by this version "
                "of the software and of the Triton language, or serve with compile_kernels"
            )
        # Without the engine's kernels there are hundreds at a start; later each stops a step.
        level = logging.WARNING if self._told else logging.INFO
        logger.log(level, "compiling %s, which the engine lacks", self._launched)
        return None

    def module(self, key: str, filename: str) -> str | None:
        """The file of a module of the host's, None where there is none."""
        path = self._modules / f"{key}.{filename}"
        return str(path) if path.is_file() else None

    def _remember(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        names = fn.jit_function.arg_names
        constants = {names[place[0]]: value for place, value in compile["constants"].items()}
        said = [f"{name}={value}" for name, value in constants.items()]
        said += [f"{name}={compile[name]}" for name in ("num_warps", "num_stages")]
        self._launched = f"{fn.module}.{fn.name}[{', '.join(said)}]"


class _Cache(CacheManager):  # type: ignore[misc]
    """What the Triton language asks about one key."""

    def __init__(
        self, store: KernelStore, below: Callable[..., Any], key: str, **kind: bool
    ) -> None:
        self._store = store
        self._key = key
        self._make_below: Callable[[], Any] = functools.partial(below, key, **kind)

    @functools.cached_property
    def _below(self) -> Any:
        """Made when needed: it makes a directory, which a machine may not have to give."""
        return self._make_below()

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = self._store.files(self._key, filename.removesuffix(".json"))
        if found is None:
            found = self._below.get_group(filename)
        return found

    def get_file(self, filename: str) -> str | None:
        path = self._store.module(self._key, filename)
        return path or self._below.get_file(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = self._below.put(data, filename, binary)
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._below.put_group(filename, group)
