"""``Checkpointer``: saves a run into its folder and loads it again. All methods are collective over all ranks.

What a save costs training: the wait for the save before it, one copy of this rank's share into host memory, and a few
small collectives. Writing runs on a thread (``checkpoint.asynchronous``), which takes part in no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.checkpoint import fit, folder, restore
from recipes.checkpoint.agreement import longest, raise_together, together
from recipes.checkpoint.disk import Disk
from recipes.checkpoint.errors import CheckpointError, Superseded, Unsaved
from recipes.checkpoint.fence import Fence
from recipes.checkpoint.manifest import Manifest
from recipes.checkpoint.parts import State, own_share, state_of
from recipes.checkpoint.rank_state import load_own_buffers, own_buffers, rank_parts, read_rank_state
from recipes.checkpoint.reader import CheckpointReader
from recipes.checkpoint.records import entries_of, optimizer_records, plain, plain_settings, report_of
from recipes.checkpoint.retention import to_remove
from recipes.checkpoint.safe_file import header_of, in_file_order
from recipes.checkpoint.save import Save
from recipes.checkpoint.snapshot import HostCopy
from recipes.ranks import Ranks
from recipes.schema.training import CheckpointConfig
from recipes.step import Trainee

_ROOM_PER_RANK = 1 << 20  # bytes for reports and manifest beside the tensors


@dataclass
class TrainState:
    """What a run knows beside its tensors. step: steps done. shared: plain values, equal on all ranks. per_rank: plain
    values or tensors of this rank alone; null when loaded at another number of ranks."""

    step: int
    shared: dict[str, Any]
    per_rank: dict[str, Tensor | Any] | None


class Checkpointer:
    """Of one run on one rank.

    Args:
        root: ``checkpoints`` of the run folder; made if it is not there.
        attempt: number of this start of the run; an earlier one can no longer complete a save once this exists.
        config_tree: the run's config as plain data, kept in every checkpoint.
        say: takes lines for the user; called on rank 0 only.
        disk: the seam to the file system.

    Raises:
        Superseded: a later attempt has the folder. CheckpointError: it cannot be written.
    """

    def __init__(
        self,
        root: Path,
        trainee: Trainee,
        ranks: Ranks,
        config: CheckpointConfig,
        attempt: int,
        config_tree: dict[str, Any],
        *,
        say: Callable[[str], None] = lambda line: None,
        disk: Disk | None = None,
    ) -> None:
        self.root = Path(root)
        self.last_save_s: float | None = None  # of the last complete save, from its beginning to the rename
        self.saved_step: int | None = None  # of the last complete save
        self._trainee, self._ranks, self._config, self._say = trainee, ranks, config, say
        self._config_tree = plain(config_tree, "the config")
        self._disk = disk or Disk()
        self._fence = Fence(self.root, attempt)
        self._host = HostCopy(ranks.device)
        self._in_flight: Save | None = None
        self._built = [[plain_settings(group) for group in one.param_groups] for one in trainee.optimizers]
        raise_together(ranks, self._take_over() if ranks.is_main else None)
        self._token = self._shared_token()

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, state: TrainState, *, eval_loss: float | None = None, must_succeed: bool = False) -> None:
        """Save everything as of now, under ``state.step``. Returns when training may go on: with
        ``checkpoint.asynchronous`` before the checkpoint is complete. Waits for the save before it first.

        must_succeed: complete when this returns, and an error is raised whatever ``checkpoint.on_error`` says; for the
        last save of a run.

        Raises:
            Unsaved: this save or the one before it failed (``checkpoint.on_error=stop``), on all ranks alike.
            The model and earlier checkpoints are untouched. Superseded: a later attempt of the run has taken over.
        """
        self.wait()
        error = self._begin(state, eval_loss)
        if error is None and (must_succeed or not self._config.asynchronous):
            error = self._conclude()
        self._tell(error, must_succeed)

    def wait(self) -> None:
        """Until the save in flight is complete; raises as ``save`` does."""
        self._tell(self._conclude(), must_succeed=False)

    def _tell(self, error: CheckpointError | None, must_succeed: bool) -> None:
        if error is None:
            return
        if must_succeed or self._config.on_error == "stop" or isinstance(error, Superseded):
            raise error if isinstance(error, Superseded) else Unsaved(str(error))
        if self._ranks.is_main:
            self._say(f"checkpoint not saved, training goes on (checkpoint.on_error=continue): {error}")

    def _begin(self, run: TrainState, eval_loss: float | None) -> CheckpointError | None:
        """Everything that has to happen while training stands still."""
        ranks, trainee = self._ranks, self._trainee
        state = state_of(trainee)
        tensors, values = rank_parts(run.per_rank or {}, ranks.rank)
        share = own_share(state.parts, ranks.rank) + tensors + own_buffers(state.parts, ranks)
        entries = in_file_order(entries_of(share))
        partial = self.root / folder.partial_name(run.step, self._fence.attempt, self._token)
        error, save = None, None
        try:
            report = report_of(share, state, trainee.optimizers, plain(values, "a rank's state"), ranks.rank)
            draft = self._draft(run, state, eval_loss)
            own_bytes = len(header_of(entries)) + sum(entry.num_bytes for entry in entries) + _ROOM_PER_RANK
        except CheckpointError as unsavable:
            error, own_bytes = unsavable, 0
        needed = int(ranks.sum(torch.tensor(own_bytes, dtype=torch.int64, device=ranks.device)).item())
        if ranks.is_main and error is None:
            error = self._make_room(partial, needed)
        error = together(ranks, error)
        if error is not None:
            return error
        if self._config.asynchronous:
            entries = self._host.take(entries)
        save = Save(
            root=self.root,
            partial=partial,
            rank=ranks.rank,
            world_size=ranks.world_size,
            entries=entries,
            report=report,
            draft=draft,
            aliases=state.aliases,
            disk=self._disk,
            fence=self._fence,
            after=self._remove_old,
        )
        self._in_flight = save
        if self._config.asynchronous:
            save.start_thread()
        else:
            save.write_own()
        return None

    def _draft(self, run: TrainState, state: State, eval_loss: float | None) -> Manifest:
        extra = {name: plain(module.get_extra_state(), f"extra state '{name}'") for name, module in state.extra.items()}
        return Manifest(
            step=run.step,
            world_size=self._ranks.world_size,
            attempt=self._fence.attempt,
            tensors={},
            files={},
            optimizers=optimizer_records(self._trainee.optimizers, state, self._built),
            config=self._config_tree,
            shared=plain(run.shared, "the run's state"),
            per_rank=[],
            extra=extra,
            eval_loss=eval_loss,
        )

    def _make_room(self, partial: Path, needed: int) -> CheckpointError | None:
        """Rank 0: all ranks write into one folder, so one look at its file system is enough for all of them."""
        try:
            free = self._disk.free_bytes(self.root)
            if free < needed:
                return CheckpointError(
                    f"{self.root}: a checkpoint needs {needed:,} bytes and {free:,} are free there; nothing was "
                    "written. Remove something, keep fewer (checkpoint.keep_last), or use another run.dir"
                )
            self._disk.make_folder(partial)
        except OSError as error:
            return CheckpointError(f"{partial}: cannot be made: {error.strerror or error}; nothing was saved")
        return None

    def _conclude(self) -> CheckpointError | None:
        """See the save in flight through; what went wrong, the same on all ranks."""
        save, self._in_flight = self._in_flight, None
        if save is None:
            return None
        if save.thread is not None:
            save.written.wait()
            error = self._agree_on(save)
            if error is not None:
                save.abandoned.set()
            save.thread.join()
        else:
            error = self._agree_on(save)
            if error is None and self._ranks.is_main:
                save.complete()
        if error is None:
            error = self._agree_on(save)
        if error is None:
            self.last_save_s = longest(self._ranks, save.seconds)
            self.saved_step = save.draft.step
            if save.unremoved is not None:  # on rank 0
                self._say(f"checkpoint of step {save.draft.step} saved; an old one stays: {save.unremoved}")
        elif self._ranks.is_main:
            self._disk.remove(save.partial)
        return error

    def _agree_on(self, save: Save) -> CheckpointError | None:
        if save.bug is not None:
            raise save.bug
        return together(self._ranks, save.error)

    def _remove_old(self) -> None:
        """Rank 0, after a save: what no rule keeps. Renamed first, so that nothing half removed looks complete."""
        config = self._config
        found = folder.complete_checkpoints(self.root)
        for one in to_remove(
            found, keep_last=config.keep_last, keep_every=config.keep_every, keep_best=config.keep_best
        ):
            going = self.root / folder.removed_name(one.path.name)
            self._disk.rename(one.path, going)
            self._disk.remove(going)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, path: Path) -> TrainState:
        """Model, optimizers and extra states from a checkpoint of any W, F, RAF and units. Every file's checksum is
        compared first, each by one rank; nothing is touched unless all fits.

        Raises:
            DamagedCheckpoint: it is not what was written; an earlier one may be. CheckpointError: it is of another
            model or optimizer; each difference is listed. Both on all ranks alike.
        """
        ranks, trainee = self._ranks, self._trainee
        reader = open_together(path, ranks)
        problems = fit.model_problems(reader, trainee.model)
        problems += fit.optimizer_problems(reader, trainee.optimizers, state_of(trainee).groups)
        raise_together(ranks, _does_not_fit(reader, problems))
        restore.load_model(reader, trainee.model)
        for number, (optimizer, built) in enumerate(zip(trainee.optimizers, self._built, strict=True)):
            restore.load_optimizer(reader, trainee.model, number, optimizer)
            restore.take_settings(optimizer, built, reader.manifest.optimizers[number].groups)
        per_rank = None
        if reader.manifest.world_size == ranks.world_size:
            load_own_buffers(reader, trainee.model, ranks.rank)
            per_rank = read_rank_state(reader, ranks.rank)
        ranks.barrier()
        return TrainState(reader.manifest.step, reader.manifest.shared, per_rank)

    # -- taking the folder over ----------------------------------------------------------------------------------------

    def _take_over(self) -> CheckpointError | None:
        """Rank 0: the folder is this attempt's from now on; what cut-short saves left is cleared away."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._fence.claim()
            left = folder.leftovers(self.root)
            for kept, final in left.replaced:
                self._disk.remove(final)
                self._disk.rename(kept, final)
            for path in left.useless:
                self._disk.remove(path)
        except Superseded as error:
            return error
        except OSError as error:
            return CheckpointError(f"{error.filename or self.root}: cannot be written: {error.strerror or error}")
        return None

    def _shared_token(self) -> str:
        """Rank 0's, on every rank: the partial folder belongs to this start alone."""
        own = int(self._fence.token, 16) if self._ranks.is_main else 0
        shared = self._ranks.sum(torch.tensor(own, dtype=torch.int64, device=self._ranks.device))
        return f"{int(shared.item()):08x}"


def open_together(path: Path, ranks: Ranks) -> CheckpointReader:
    """A reader on every rank, or the same error on every rank. Each file's checksum is compared by one rank."""
    reader, error = None, None
    try:
        reader = CheckpointReader(path)
    except CheckpointError as unreadable:
        error = unreadable
    raise_together(ranks, error)
    assert reader is not None
    try:
        reader.verify(sorted(reader.manifest.files)[ranks.rank :: ranks.world_size])
    except CheckpointError as damaged:
        error = damaged
    raise_together(ranks, error)
    return reader


def _does_not_fit(reader: CheckpointReader, problems: list[str]) -> CheckpointError | None:
    if not problems:
        return None
    return CheckpointError(
        f"{reader.folder}: this checkpoint is of another model or optimizer; nothing was changed. "
        + "; ".join(problems)
    )
