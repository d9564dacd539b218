"""Who is blamed for a hang, in which words; when silence is a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.flight import RingRecorder, open_recorder
from recipes.flight.recorder import EVALUATION, SAVING, START_UP, TRAINING
from recipes.flight.report import GONE, RUNNING, STOPPED, UNKNOWN, HangReport, explain, ranks_text
from recipes.flight.ring import Ring, read_ring, ring_path
from recipes.flight.watch import Watch


class Fleet:
    """Ranks of one process that write what a test says."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        self.recorders: list[RingRecorder] = []
        for rank in range(world_size):
            recorder = open_recorder(folder, rank=rank, world_size=world_size, attempt=1, host="here")
            assert isinstance(recorder, RingRecorder)
            self.recorders.append(recorder)

    def train(self, step: int) -> None:
        for recorder in self.recorders:
            recorder.enter(TRAINING)
            recorder.step = step

    def all(self, *events: tuple[str, str, str], but: int | None = None) -> None:
        for rank, recorder in enumerate(self.recorders):
            if rank != but:
                for kind, unit, phase in events:
                    recorder.event(kind, unit, phase)

    def rings(self) -> list[Ring | None]:
        return [read_ring(ring_path(self.folder, rank)) for rank in range(len(self.recorders))]

    def report(self, **states: str) -> HangReport:
        told = {rank: states.get(f"rank_{rank}", "sleeping") for rank in range(len(self.recorders))}
        rings = self.rings()
        newest = max(ring.entries[-1].time_s for ring in rings if ring is not None)
        return explain(rings, told, newest + 61)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = Fleet(tmp_path, 4)
    fleet.train(step=12)
    return fleet


BLOCK_4 = (("gather", "blocks.4", "forward"), ("await", "blocks.4", "forward"), ("forward", "blocks.4", ""))
BLOCK_5 = (("gather", "blocks.5", "forward"), ("await", "blocks.5", "forward"))


def test_a_rank_that_never_came_is_named_with_what_the_others_wait_in(fleet: Fleet) -> None:
    fleet.all(*BLOCK_4)
    fleet.all(*BLOCK_5, but=3)
    report = fleet.report(rank_3=STOPPED)
    assert report.culprits == (3,)
    assert report.headline == (
        "rank 3 never entered the all-gather of blocks.5 (forward, step 12); ranks 0-2 wait for it"
    )
    assert report.text.splitlines() == [
        report.headline,
        "",
        "           process   since  where",
        "ranks 0-2  sleeping  61 s   training, step 12: waiting for the all-gather of blocks.5 (forward)",
        "rank 3     stopped   61 s   training, step 12: in the forward of blocks.4",
    ]


def test_hosts_that_run_ahead_of_their_devices_do_not_hide_it(fleet: Fleet) -> None:
    fleet.all(*BLOCK_4)
    later = [("gather", f"blocks.{number}", "forward") for number in range(5, 40)]
    fleet.all(*later, ("settle", "", ""), ("norm", "", ""), but=1)
    report = fleet.report()
    assert report.culprits == (1,)
    assert "rank 1 never entered the all-gather of blocks.5 (forward, step 12)" in report.headline


def test_a_rank_that_took_another_way_is_named(fleet: Fleet) -> None:
    fleet.all(*BLOCK_4)
    fleet.all(*BLOCK_5, but=2)
    fleet.recorders[2].event("gather", "blocks.6", "forward")
    report = fleet.report()
    assert report.culprits == (2,)
    assert report.headline == (
        "the ranks went different ways (forward, step 12): rank 2 began the all-gather of blocks.6; "
        "ranks 0-1, 3 began the all-gather of blocks.5"
    )


def test_a_gather_that_was_issued_ahead_on_some_ranks_is_the_same_gather(fleet: Fleet) -> None:
    fleet.all(("gather", "blocks.4", "prefetch"), but=0)
    fleet.recorders[0].event("gather", "blocks.4", "forward")
    fleet.recorders[0].event("data")
    assert "different ways" not in fleet.report().headline


def test_a_rank_without_data_is_named_by_its_last_event(fleet: Fleet) -> None:
    fleet.all(("data", "", ""))
    fleet.all(("sum", "", ""), ("pass", "", ""), but=2)
    report = fleet.report()
    assert report.culprits == (2,)
    assert report.headline == "rank 2 never entered a sum over all ranks (step 12); ranks 0-1, 3 wait for it"
    assert "training, step 12: waiting for its next batch" in report.text


def test_with_equal_sequences_a_stopped_rank_is_named(fleet: Fleet) -> None:
    fleet.all(*BLOCK_4, *BLOCK_5)
    report = fleet.report(rank_1=STOPPED, rank_2=GONE)
    assert report.culprits == (1, 2)
    assert report.headline.startswith("ranks 1-2 (stopped) did not go on: training, step 12: waiting for")


def test_with_equal_sequences_a_busy_rank_is_named(fleet: Fleet) -> None:
    fleet.all(*BLOCK_4, ("reduce", "blocks.4", ""))
    fleet.all(("settle", "", ""))
    fleet.recorders[3].event("optimizer")
    report = fleet.report(rank_3=RUNNING)
    assert report.headline == "rank 3 did not go on: training, step 12: in the optimizer"


def test_when_nobody_is_behind_the_network_is_blamed(fleet: Fleet) -> None:
    fleet.all(*BLOCK_5)
    report = fleet.report()
    assert report.culprits == ()
    assert "the network or a device is stuck" in report.headline


def test_ranks_without_a_record(fleet: Fleet) -> None:
    rings = fleet.rings()
    fleet.all(*BLOCK_5)
    absent = explain([*rings[:3], None], dict.fromkeys(range(4), "sleeping"), 0.0)
    assert absent.headline == "rank 3 did not get as far as a flight record (still starting)"
    elsewhere = explain([*rings[:3], None], {0: "sleeping", 1: "sleeping", 2: "sleeping", 3: UNKNOWN}, 0.0)
    assert "on another host" in elsewhere.text


def test_ranks_are_written_as_runs() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1, 2], [7, 0, 2, 6, 5])] == [
        "rank 3",
        "ranks 0-2",
        "ranks 0, 2, 5-7",
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watch_over(fleet: Fleet, clock: Clock, attempt: int = 1) -> Watch:
    return Watch(fleet.folder, world_size=4, attempt=attempt, timeout_s=60, slow_timeout_s=600, clock=clock)


def test_silence_of_all_is_a_hang_and_any_event_is_none(fleet: Fleet) -> None:
    clock = Clock()
    watch = watch_over(fleet, clock)
    for _ in range(5):  # rank 2 works alone for a long time, and says so
        assert not watch.is_hung()
        clock.now += 50
        fleet.recorders[2].event("progress", "preparing data")
    assert not watch.is_hung()
    clock.now += 61
    assert watch.is_hung()
    assert watch.silent_s == 61
    assert [ring is not None for ring in watch.rings()] == [True] * 4
    watch.close()


@pytest.mark.parametrize("activity", [START_UP, SAVING])
def test_slow_phases_may_be_silent_for_longer(fleet: Fleet, activity: str) -> None:
    clock = Clock()
    watch = watch_over(fleet, clock)
    for recorder in fleet.recorders:
        recorder.enter(activity)
    assert not watch.is_hung()
    clock.now += 599
    assert not watch.is_hung()
    clock.now += 2
    assert watch.is_hung()
    watch.close()


def test_a_slow_phase_of_some_does_not_excuse_the_others(fleet: Fleet) -> None:
    clock = Clock()
    watch = watch_over(fleet, clock)
    fleet.recorders[0].enter(START_UP)  # stopped just before its first step had ended
    fleet.recorders[1].enter(EVALUATION)  # it has done its first step, so start-up was over
    assert not watch.is_hung()
    clock.now += 61
    assert watch.is_hung()
    watch.close()


def test_one_rank_may_save_while_the_others_wait_for_it(fleet: Fleet) -> None:
    clock = Clock()
    watch = watch_over(fleet, clock)
    fleet.recorders[0].enter(SAVING)
    assert not watch.is_hung()
    clock.now += 599
    assert not watch.is_hung()
    clock.now += 2
    assert watch.is_hung()
    watch.close()


def test_files_of_an_earlier_attempt_are_not_looked_at(fleet: Fleet) -> None:
    clock = Clock()
    watch = watch_over(fleet, clock, attempt=2)
    clock.now += 61
    assert not watch.is_hung()  # nobody has started yet: the slow limit
    assert watch.rings() == [None] * 4
    clock.now += 600
    assert watch.is_hung()
    watch.close()
