"""The one seam to the file system while saving: tests put a disk here that is full, or a machine that dies.

Nothing counts until it is on the disk: files and the folders that name them are synced before the next step relies
on them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from recipes.checkpoint.checksum import Checksum
from recipes.checkpoint.manifest import FileRecord


class Disk:
    """All methods raise OSError."""

    def free_bytes(self, folder: Path) -> int:
        """What an ordinary user may still write there; quotas are not seen."""
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """A new file; its checksum is computed on the way, of what was meant to be written."""
        running, size = Checksum(), 0
        with path.open("xb", buffering=0) as file:
            for chunk in chunks:
                running.add(chunk)
                size += len(chunk)
                self._write_all(file.fileno(), chunk)
            os.fsync(file.fileno())
        return FileRecord(size, running.text)

    def _write_all(self, descriptor: int, chunk: bytes | memoryview) -> None:
        left = memoryview(chunk)
        while left:
            left = left[os.write(descriptor, left) :]

    def write_whole(self, path: Path, content: bytes) -> None:
        """A small file that others may look for at any moment: they see all of it or nothing."""
        growing = path.with_name(f"{path.name}.part")
        growing.unlink(missing_ok=True)
        self.write(growing, [content])
        growing.rename(path)

    def sync_folder(self, path: Path) -> None:
        """The names in it survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """``new`` must not exist."""
        old.rename(new)
        self.sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        """A folder with all in it; one that is gone is no error. Of a link the link alone: what it leads to belongs to
        whoever moved it there."""
        if path.is_symlink():
            path.unlink()
            return
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            shutil.rmtree(path)  # says what is in the way
