"""One rank, from a checked config to the recipe's end. Everything before this module is light; this imports torch."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import yaml

from launcher import rank_signals
from launcher.check import About, read_config
from launcher.environment import JoinedRanks, joined_ranks
from launcher.errors import EXIT_OK, EXIT_SAVED
from launcher.hang import backstop_s
from launcher.plugins import load_plugins
from launcher.rank_signals import SignalWatch
from launcher.rendezvous import Meeting
from launcher.run_folder import CONFIG_FILE, flight_folder
from launcher.schema import Config
from recipes import evaluation, generation, train
from recipes.calibrate import recipe as calibration
from recipes.context import RankContext
from recipes.flight import open_recorder
from recipes.flight.report import where
from recipes.flight.ring import read_ring, ring_path
from recipes.schema import RecipeConfig
from recipes.stop import StoppedFromOutside, StopRequest

_OUR_PACKAGES = ("launcher", "recipes", "fsdp_core")


class Recipe(Protocol):
    """What a rank runs."""

    def run(self, config: RecipeConfig, context: RankContext) -> object: ...


RECIPES: dict[str, Recipe] = {"train": train, "eval": evaluation, "generate": generation, "calibrate": calibration}


def run_local_rank(arguments: argparse.Namespace, signals: SignalWatch, recipe: Recipe | None = None) -> int:
    """One rank of a run on this host alone, to its exit code; ``arguments`` as ``launcher.worker`` parses them."""
    config = stored_config(arguments.run_dir, arguments.plugin)
    signals.stop.ends_at = arguments.ends_at
    ranks = joined_ranks()
    assert ranks is not None, "the launcher sets RANK and WORLD_SIZE"
    meeting = Meeting.of_local_ranks(ranks, arguments.listen_fd, backstop_s(config.cluster))
    device = torch.device("cpu") if arguments.device == "cpu" else torch.device("cuda", ranks.local_rank)
    hostnames = (socket.gethostname(),) * ranks.world_size
    context = rank_context(
        ranks, device, hostnames, arguments.run_dir, arguments.interactive, arguments.attempt, signals.stop
    )
    return run_rank(config, meeting, device, context, signals, recipe)


def stored_config(run_dir: Path, plugins: Sequence[str]) -> Config:
    """The run folder's config, through the same checker as the command line's. Plugins never come from it."""
    load_plugins(plugins)
    tree = yaml.safe_load((run_dir / CONFIG_FILE).read_text())
    return read_config(tree, about=About(is_typed=False))


def run_rank(
    config: Config,
    meeting: Meeting,
    device: torch.device,
    context: RankContext,
    signals: SignalWatch,
    recipe: Recipe | None = None,
) -> int:
    """Makes the process group, runs the recipe, leaves together with the other ranks.

    recipe: null for the one of ``config.action``.

    Returns the exit code: 0, or 75 where the run was asked to stop and what it trained is saved.
    """
    ranks = meeting.ranks
    signals.grace_s = config.cluster.grace_s
    if config.action != "train":
        signals.nothing_to_save()
    _prepare(config, ranks, device)
    meeting.make_process_group(device, backstop_s(config.cluster))
    exit_code = EXIT_OK
    try:
        with _place_of_failure(context):
            (recipe or RECIPES[config.action]).run(config, context)
    except StoppedFromOutside:  # rank 0 has said so
        exit_code = EXIT_SAVED
        rank_signals.ignore_all()  # whoever leaves first must not make the others' launcher end them as failed
    meeting.leave_together()
    return exit_code


@contextmanager
def _place_of_failure(context: RankContext) -> Iterator[None]:
    """An exception is told with what the rank was at: out of memory in which unit's forward, of which step."""
    try:
        yield
    except StoppedFromOutside:
        raise
    except Exception as error:
        ring = read_ring(ring_path(flight_folder(context.run_dir), context.rank))
        if ring is not None and ring.entries and ring.attempt == context.attempt:
            error.add_note(f"This rank was at: {where(ring.entries[-1])}")
        raise


def rank_context(
    ranks: JoinedRanks,
    device: torch.device,
    hostnames: tuple[str, ...],
    run_dir: Path,
    is_interactive: bool,
    attempt: int,
    stop: StopRequest,
) -> RankContext:
    """Opens the flight record: from here on a hang of this rank can be explained."""
    return RankContext(
        rank=ranks.rank,
        world_size=ranks.world_size,
        local_rank=ranks.local_rank,
        local_world_size=ranks.local_world_size,
        node_rank=ranks.node_rank,
        num_nodes=ranks.num_nodes,
        hostnames=hostnames,
        device=str(device),
        run_dir=run_dir,
        is_interactive=is_interactive and ranks.rank == 0,
        attempt=attempt,
        stop=stop,
        flight=open_recorder(
            flight_folder(run_dir),
            rank=ranks.rank,
            world_size=ranks.world_size,
            attempt=attempt,
            host=hostnames[ranks.rank],
        ),
    )


def _prepare(config: Config, ranks: JoinedRanks, device: torch.device) -> None:
    """This process's logging, threads and current device."""
    logging.basicConfig(format=f"%(asctime)s rank {ranks.rank} %(levelname)s %(name)s: %(message)s", force=True)
    for package in _OUR_PACKAGES:  # other packages keep to warnings: their progress is noise here
        logging.getLogger(package).setLevel(config.run.log_level.upper())
    threads = config.cluster.cpu_threads_per_rank or os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        torch.set_num_threads(int(threads))
    if device.type == "cuda":
        torch.cuda.set_device(device)
