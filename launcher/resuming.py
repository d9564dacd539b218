"""What this config would go on from, looked up before a rank starts, and what a start takes back. No torch.

The ranks decide by themselves, at their start, which checkpoint is whole (``recipes.resume``); this reads the manifest
of the one that it will most likely be, so that what they could not do is refused early.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from launcher.drift import SAFE, Difference, differences
from launcher.schema import Config
from recipes.checkpoint.errors import DamagedCheckpoint
from recipes.checkpoint.folder import ROOT_NAME
from recipes.checkpoint.manifest import Manifest, read_manifest
from recipes.data.files import expanded
from recipes.resume_from import NEVER, candidates, to_set_aside

# What belongs to a run that is started over in its folder, beside its checkpoints.
_RESULTS = ("metrics.jsonl", "summary.json", "loss.png", "plan.json", "wandb_id.txt", "tensorboard")


@dataclass(frozen=True)
class GoingOn:
    """From which checkpoint, and how the config differs from the one that it was saved with."""

    folder: Path
    manifest: Manifest
    changed: list[Difference]

    @property
    def where(self) -> str:
        return f"step {self.manifest.step} in {self.folder}"

    def lines(self) -> list[str]:
        """For people: what differs, once all of it is allowed."""
        told = [str(one) for one in self.changed if one.is_told]
        kinds = "safe" if all(one.kind == SAFE for one in self.changed) else "checkpoint.allow_drift=true"
        return [f"differs from the checkpoint ({kinds}): {', '.join(told)}"] if told else []


def going_on(config: Config) -> GoingOn | None:
    """None: the run starts at its first step, or the action is another than training.

    Touches nothing; the run folder may not be there yet.

    Raises:
        CheckpointError: ``checkpoint.resume`` names a place without checkpoints.
    """
    found = _first_whole(config) if config.action in ("train", "check") else None
    if found is None:
        return None
    folder, manifest = found
    return GoingOn(folder, manifest, differences(manifest.config, dataclasses.asdict(config), manifest.step))


def lines(config: Config) -> list[str]:
    """What people are told about it at the start."""
    found = going_on(config)
    return [] if found is None else found.lines()


def take_back(config: Config, run_dir: Path) -> list[str]:
    """Moves what this start does not go on from to ``earlier/<n>/``, so that no later one does; a line if so."""
    if config.action != "train":
        return []
    taken = to_set_aside(config.checkpoint.resume, run_dir)
    is_new = config.checkpoint.resume == NEVER
    results = [run_dir / name for name in _RESULTS if is_new and (run_dir / name).exists()]
    if not taken and not results:
        return []
    earlier = run_dir / "earlier"
    earlier.mkdir(exist_ok=True)
    number = max((int(path.name) for path in earlier.iterdir() if path.name.isdigit()), default=0)
    place = earlier / str(number)
    (place / ROOT_NAME if taken else place).mkdir(parents=True, exist_ok=True)
    for path in taken:
        path.rename(place / ROOT_NAME / path.name)
    for path in results:
        path.rename(place / path.name)
    count = "1 checkpoint" if len(taken) == 1 else f"{len(taken)} checkpoints" if taken else "metrics"
    return [f"{count} of an earlier start set aside in {place} (checkpoint.resume={config.checkpoint.resume})"]


def _first_whole(config: Config) -> tuple[Path, Manifest] | None:
    resume = config.checkpoint.resume
    if resume == NEVER:
        return None
    # Without a name the folder will be a new one: nothing lies in it.
    run_dir = Path("/nowhere") if config.run.dir is None else expanded(config.run.dir).absolute()
    taken = {path.resolve() for path in to_set_aside(resume, run_dir)}
    for one in candidates(resume, run_dir):
        if one.path.resolve() in taken:
            continue
        try:
            return one.path, read_manifest(one.path)
        except DamagedCheckpoint:
            continue  # the ranks pass over it with a word
    return None
