"""One save under way on one rank: its file, its report, and on rank 0 the completion. No collectives here.

::

    every rank   rank_N.safetensors, synced -> rank_N.json (what it wrote and where)        in the partial folder
    rank 0       all reports there -> manifest.json -> COMPLETE -> folder synced -> fence -> rename -> old ones removed

Up to the rename the folder has a name that no reader takes. Ranks meet through their reports, so all of this may run
on a thread beside training.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.checkpoint import folder
from recipes.checkpoint.disk import Disk
from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.fence import Fence
from recipes.checkpoint.manifest import FileRecord, Manifest, joined, tensor_from
from recipes.checkpoint.safe_file import Entry, chunks_of

_LOOK_AGAIN_S = 0.02


@dataclass
class Save:
    """entries: of this rank, in file order, on the host while training goes on. report: what this rank adds to the
    manifest (``records.report_of``). draft: the manifest without the reports; rank 0's is used. Both were made when the
    save began."""

    root: Path
    partial: Path
    rank: int
    world_size: int
    entries: Sequence[Entry]
    report: dict[str, Any]
    draft: Manifest
    aliases: dict[str, str]
    disk: Disk
    fence: Fence
    after: Callable[[], None]  # rank 0, when the checkpoint is complete: removes old ones
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    error: CheckpointError | None = None
    bug: BaseException | None = None
    unremoved: str | None = None  # the save is complete; what could not be cleared away after it, and why
    written: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start_thread(self) -> None:
        self.thread = threading.Thread(target=self._beside_training, name=f"checkpoint of step {self.draft.step}")
        self.thread.daemon = True  # a failing rank must not wait for it
        self.thread.start()

    def _beside_training(self) -> None:
        try:
            self.write_own()
            self.written.set()
            if self.rank == 0 and self.error is None and self._wait_for_reports():
                self.complete()
        except BaseException as bug:  # told by the training thread, which waits for ``written``
            self.bug = bug
        finally:
            self.written.set()

    def write_own(self) -> None:
        """This rank's file and report; ``error`` says what went wrong."""
        path = self.partial / folder.rank_file(self.rank)
        try:
            files = {}
            if self.entries:
                files[path.name] = asdict(self.disk.write(path, chunks_of(self.entries)))
            content = json.dumps({**self.report, "files": files}).encode()
            self.disk.write_whole(self.partial / _report_name(self.rank), content)
        except OSError as error:
            self.error = _unwritten(path, error)
        self.seconds = time.perf_counter() - self.started

    def _wait_for_reports(self) -> bool:
        """False if the save was given up meanwhile: a rank could not write."""
        missing = set(range(self.world_size))
        while missing:
            missing = {rank for rank in missing if not (self.partial / _report_name(rank)).exists()}
            if missing and self.abandoned.wait(_LOOK_AGAIN_S):
                return False
        return True

    def complete(self) -> None:
        """Rank 0, when all reports are there; ``error`` says what went wrong."""
        try:
            manifest = self._manifest().as_json()
            self.disk.write_whole(self.partial / folder.MANIFEST, manifest)
            for rank in range(self.world_size):
                (self.partial / _report_name(rank)).unlink()
            marker = folder.marker_text(self.draft.step, manifest, self.draft.eval_loss)
            self.disk.write_whole(self.partial / folder.COMPLETE, marker.encode())
            self.disk.sync_folder(self.partial)
            with self.fence.held():
                self._take_name()
            self.seconds = time.perf_counter() - self.started
        except OSError as error:
            self.error = _unwritten(self.partial, error)
        except CheckpointError as error:
            self.error = error
        except ValueError as error:
            self.error = CheckpointError(f"step {self.draft.step} was not saved: {error}")
        if self.error is None:
            self._clear_away()

    def _clear_away(self) -> None:
        """What the new checkpoint makes superfluous. It is complete, whatever happens here."""
        try:
            self.disk.remove(self.root / folder.replaced_name(folder.final_name(self.draft.step)))
            self.after()
        except OSError as error:
            self.unremoved = f"{error.filename or self.root}: cannot be removed: {error.strerror or error}"

    def _manifest(self) -> Manifest:
        reports = [json.loads((self.partial / _report_name(rank)).read_bytes()) for rank in range(self.world_size)]
        draft = self.draft
        draft.tensors.update(
            joined((name, tensor_from(one)) for report in reports for name, one in report["tensors"].items())
        )
        draft.tensors.update({alias: draft.tensors[first] for alias, first in self.aliases.items()})
        for report in reports:
            draft.files.update({name: FileRecord(**record) for name, record in report["files"].items()})
            draft.per_rank.append(report["per_rank"])
            for optimizer, values in zip(draft.optimizers, report["values"], strict=True):
                optimizer.values.update(values)
        return draft

    def _take_name(self) -> None:
        """A checkpoint of the same step that is there gives way; it comes back if this stops half-way."""
        final = self.root / folder.final_name(self.draft.step)
        replaced = self.root / folder.replaced_name(final.name)
        self.disk.remove(replaced)
        if final.exists():
            self.disk.rename(final, replaced)
        self.disk.rename(self.partial, final)


def _report_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    where = error.filename or path
    return CheckpointError(
        f"{where}: cannot be written: {error.strerror or error}; nothing of this save is kept, earlier checkpoints are "
        "untouched"
    )
