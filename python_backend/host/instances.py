"""What a server of ours keeps outside its process, and how the next one cleans up after a dead one.

Each server has a folder of its own (links, model repository) whose record names the processes that
own it, and a prefix of its own for shared-memory regions. A server that dies leaves regions in
/dev/shm and stub processes that wait forever. They are removed when every recorded owner is gone;
anything without our record, of another user, another boot or another process namespace is left
alone, because "gone" cannot be known there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from python_backend.host.errors import HostError

SHARED_MEMORY = Path("/dev/shm")
STUB_NAME = "triton_python_backend_stub"
_RECORD = "owner.json"
# The server hands paths to a shell, so they must need no quoting.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")
_INSTANCE_NAME = re.compile(r"dsv41-[0-9a-f]{12}")


@dataclass(frozen=True)
class Instance:
    """One server's folder and the prefix of its shared-memory regions."""

    folder: Path

    @staticmethod
    def create() -> Instance:
        """A new folder, owned by this process until `own` says more."""
        base = state_folder()
        draft = Path(tempfile.mkdtemp(prefix="new-", dir=base))
        _write_record(draft, [os.getpid()])
        # Only a complete folder has an instance's name, so nobody judges a half-made one.
        folder = base / f"dsv41-{secrets.token_hex(6)}"
        draft.rename(folder)
        return Instance(folder)

    @property
    def region_prefix(self) -> str:
        return f"{self.folder.name}-"

    def own(self, *pids: int) -> None:
        """Record that the instance lives while any of these processes does."""
        _write_record(self.folder, list(pids))

    def stub_processes(self) -> list[psutil.Process]:
        """The model processes that use this instance's regions: named by their own command."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline() if process.uids().real == os.getuid() else []
                if (
                    words
                    and Path(words[0]).name == STUB_NAME
                    and any(word.startswith(self.region_prefix) for word in words)
                ):
                    found.append(process)
        return found

    def remove(self) -> list[str]:
        """Remove regions, stub processes and the folder; says what there was besides the folder."""
        removed = []
        for process in self.stub_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                removed.append(f"process {process.pid}")
        for region in sorted(SHARED_MEMORY.glob(f"{self.region_prefix}*")):
            with contextlib.suppress(FileNotFoundError):
                region.unlink()
                removed.append(str(region))
        shutil.rmtree(self.folder, ignore_errors=True)
        return removed


def remove_dead_instances() -> list[str]:
    """Clean up after servers of ours that died; says what was removed."""
    removed = []
    for folder in sorted(state_folder().iterdir()):
        if _INSTANCE_NAME.fullmatch(folder.name) and _is_dead(folder):
            removed += Instance(folder).remove()
    return removed


def state_folder() -> Path:
    """This user's folder for instances. Raises HostError where no usable place exists."""
    for place in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        folder = Path(place) / f"dsv41-serve-{os.getuid()}"
        if not _PLAIN_PATH.fullmatch(str(folder)):
            continue
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid():
            return folder
    raise HostError(
        "expected a temporary folder that this user may write and whose path has no spaces, found "
        f"none among {tempfile.gettempdir()}, /tmp and /var/tmp; set TMPDIR to one"
    )


def _write_record(folder: Path, pids: list[int]) -> None:
    record = {
        "boot": _boot(),
        "process_namespace": _process_namespace(),
        "processes": [[pid, _start_ticks(pid)] for pid in pids],
    }
    draft = folder / f"{_RECORD}.new"
    draft.write_text(json.dumps(record))
    draft.rename(folder / _RECORD)


def _is_dead(folder: Path) -> bool:
    """True only when the record is ours to judge and none of its processes lives."""
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        record: dict[str, Any] = json.loads((folder / _RECORD).read_text())
        if record["boot"] != _boot() or record["process_namespace"] != _process_namespace():
            return False
        return not any(_start_ticks(pid) == ticks for pid, ticks in record["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none. A process that
    ended and only waits for its parent counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
