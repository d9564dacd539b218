"""Fits the planner's constants to seven points of the FSDP paper's figures 6b, 7b and 7c; tests them on the other 19.

    python benchmarks/fit_paper.py              # all hypotheses: some ten minutes
    python benchmarks/fit_paper.py --only H3

A point's tape is recorded once; fitting only replays it. Fitted are the part of the peak that GPT's and T5's matrix
products reach, the part of the network's rate that collectives reach, the latency of a ring's step, and, under H1
alone, how much slower computing is beside a collective. Everything else is the profile's (``configs/hardware``).

    H1   every collective hides behind computing where it can; computing is slower meanwhile
    H2   a gather that forward asks for begins only when computing has come to it; nothing is slower
    H3   half of a gather that forward asks for is done when computing comes to it; computing is slower beside every
         collective, by what the profile assumes
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fsdp_core.simulate.hardware import Hardware
from fsdp_core.simulate.tape import Tape
from fsdp_core.simulate.timeline import play
from launcher.planning.figure import run_configs
from launcher.request import LaunchRequest
from recipes.metrics.flops import sample_flops
from recipes.plan.figures.collectives import all_gathers_ms
from recipes.plan.figures.compare import Row, compare, summary_of
from recipes.plan.figures.points import Point, load
from recipes.plan.figures.text import effects_text
from recipes.plan.machine import machine_of
from recipes.plan.record import record_run
from recipes.plan.timing import phases_of
from recipes.registry import MODELS
from recipes.schema.derived import micro_batch

FIGURES = ("6a", "6b", "7b", "7c")
COUNTED = ("6b", "7b", "7c")
MAX_ROUNDS = 12
SMALL = 1e-3  # of a constant: the step of derivatives, and smaller ones end the fit


@dataclass(frozen=True)
class Recorded:
    """A run with its tape. flops: of one rank's step, with recomputation. published: where it is one of the 26."""

    key: tuple[str, tuple[str, ...]]
    point: Point
    model: str
    tape: Tape
    flops: float
    hardware: Hardware


@dataclass
class Hypothesis:
    """start: by name, where the fit begins. A name is ``compute_efficiency:MODEL``, ``step_s`` (of every ring) or a
    field of ``Hardware``. fixed: fields of ``Hardware`` that the hypothesis is about. told: (TFLOPS, percent of
    backward) by run."""

    name: str
    what: str
    start: dict[str, float]
    fixed: dict[str, float]
    constants: dict[str, float] = field(default_factory=dict)
    told: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = field(default_factory=dict)

    def hardware(self, one: Recorded, constants: dict[str, float]) -> Hardware:
        changes = dict(self.fixed)
        for name, value in constants.items():
            key, _, model = name.partition(":")
            if key == "step_s":
                changes |= {"intra_step_s": value, "cross_step_s": value}
            elif not model or model == one.model:
                changes[key] = value
        return replace(one.hardware, **changes)

    def tell(self, one: Recorded) -> None:
        seconds, start, end = phases_of(play(one.tape, self.hardware(one, self.constants)))
        self.told[one.key] = (one.flops / (end - start) / 1e12, 100 * seconds["backward"] / (end - start))


_START = {
    "compute_efficiency:gpt": 0.65,
    "compute_efficiency:t5": 0.51,
    "cross_efficiency": 0.75,
    "step_s": 1e-5,
}
HYPOTHESES = (
    Hypothesis(
        "H1",
        "collectives hide, computing is slower beside them",
        _START | {"overlap_slowdown": 0.24},
        {"gathers_wait_in_forward": 0.0},
    ),
    Hypothesis(
        "H2",
        "gathers of the forward wait for computing",
        _START,
        {"gathers_wait_in_forward": 1.0, "overlap_slowdown": 0.0},
    ),
    Hypothesis(
        "H3",
        "half a gather of the forward hides, computing is slower beside collectives",
        _START,
        {"gathers_wait_in_forward": 0.5},
    ),
)


def recorded_runs(choose: Callable[[str, Point], bool]) -> Iterator[Recorded]:
    """Tapes of the throughput points that ``choose`` wants, each run once, one after the other."""
    seen = set()
    for name in FIGURES:
        figure = load(name)
        configs = run_configs(figure, LaunchRequest("", (), ("fsdp-launch", f"experiment=paper/fig{name}")))
        for point in figure.points:
            if point.measure != "hardware_tflops" or point.not_predicted or point.is_left_out:
                continue
            config = configs[point.words]
            key = (config.model.kind, point.words)
            if key in seen or not choose(name, point):
                continue
            seen.add(key)
            hosts, per_host = config.cluster.num_nodes, config.cluster.nproc_per_node
            run = record_run(config, hosts * per_host, per_host)
            sample = sample_flops(
                MODELS[config.model.kind], config.model, run.info, config.train.activation_checkpointing
            )
            assert sample is not None
            flops = sample.hardware * micro_batch(config.train, hosts * per_host)
            machine = machine_of(config.hardware, per_host)
            print(f"recorded {name} {point.series}, {point.at}: {len(run.tape.entries):,} entries", flush=True)
            yield Recorded(key, point, config.model.kind, run.tape, flops, machine.hardware)


def is_calibration(figure: str, point: Point) -> bool:
    return figure in COUNTED and point.is_calibration and point.is_counted


def fit(points: Sequence[Recorded], hypothesis: Hypothesis) -> None:
    """The hypothesis' constants to the points' TFLOPS."""

    def residuals(values: dict[str, float]) -> np.ndarray:
        hypothesis.constants = values
        for one in points:
            hypothesis.tell(one)
        return np.array([math.log(hypothesis.told[one.key][0] / one.point.published) for one in points])

    residuals(least_squares(residuals, hypothesis.start))


def fit_gathers() -> None:
    """Rate and latency of a ring to the calibration points of figure 2b, which is of another network."""
    figure = load("2b")
    configs = run_configs(figure, LaunchRequest("", (), ("fsdp-launch", "experiment=paper/fig2b")))
    cluster = configs[()].cluster
    machine = machine_of(configs[()].hardware, cluster.nproc_per_node).hardware
    num_ranks = cluster.num_nodes * cluster.nproc_per_node

    def residuals(values: dict[str, float]) -> np.ndarray:
        rate, step_s = values["cross_efficiency"], values["step_s"]
        hardware = replace(machine, cross_efficiency=rate, intra_step_s=step_s, cross_step_s=step_s)
        told = {one: all_gathers_ms(one.gathers, num_ranks, hardware) for one in figure.points if one.gathers}
        return np.array([value / one.published - 1 for one, value in told.items() if one.is_calibration])

    print("figure 2b: one network, calls of 2^30 to 2^22 elements")
    least_squares(residuals, {"cross_efficiency": 0.9, "step_s": 5e-5})


def least_squares(residuals: Callable[[dict[str, float]], np.ndarray], start: dict[str, float]) -> dict[str, float]:
    """By Gauss and Newton, in the constants' logarithms."""
    constants = dict(start)
    for _ in range(MAX_ROUNDS):
        now = residuals(constants)
        columns = [
            (residuals({**constants, name: value * (1 + SMALL)}) - now) / SMALL for name, value in constants.items()
        ]
        step = np.clip(np.linalg.lstsq(np.stack(columns, axis=1), -now, rcond=1e-6)[0], -0.3, 0.3)
        print(f"  error {100 * float(np.sqrt(np.mean(now**2))):.3f} %", flush=True)
        for name, change in zip(list(constants), step, strict=True):
            constants[name] *= math.exp(change)
        if np.abs(step).max() < SMALL:
            break
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in constants.items()), flush=True)
    return constants


def report(hypothesis: Hypothesis) -> None:
    """Errors of the 26 points beside those of one constant a series, and the effects."""
    print(f"\n{hypothesis.name}: {hypothesis.what}")
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in hypothesis.constants.items()))
    counted: list[Row] = []
    effects = []
    shares: list[float] = []
    for name in FIGURES:
        figure = load(name)
        model = "gpt" if name in ("6b", "7b") else "t5"
        predicted = {}
        for point in figure.points:
            told = hypothesis.told.get((model, point.words))
            if told is not None and point.measure in ("hardware_tflops", "backward_share"):
                predicted[point] = told[0] if point.measure == "hardware_tflops" else told[1]
        found = compare(figure, predicted)
        rows = [row for row in found.rows if row.point.is_counted and row.error is not None]
        counted += rows if name in COUNTED else []
        effects += found.effects
        shares += [
            float(row.predicted) for row in found.rows if row.point.measure == "backward_share" and row.predicted
        ]
        for row in rows:
            fitted = "fitted" if row.point.is_calibration else ""
            where = f"{name} {row.point.series}, {row.point.at}"
            print(f"  {where:<32} {row.point.published:7.2f} {row.predicted:7.2f} {row.error:+6.2f} %  {fitted}")
    for part, rows in (
        ("fitted", [row for row in counted if row.point.is_calibration]),
        ("held out", [row for row in counted if not row.point.is_calibration]),
    ):
        one = summary_of("hardware_tflops", part, rows)
        naive = f"one constant a series {one.naive_median:.2f} / {one.naive_worst:.2f} %"
        print(f"  {part}: {one.number} points, median {one.median:.2f} %, worst {one.worst:.2f} %; {naive}")
    print(effects_text(effects, "at"))
    print(f"  backward: {min(shares):.1f} to {max(shares):.1f} % of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[one.name for one in HYPOTHESES], help="one hypothesis")
    only = parser.parse_args().only
    chosen = [one for one in HYPOTHESES if only in (None, one.name)]
    fit_gathers()
    calibration = list(recorded_runs(is_calibration))
    for hypothesis in chosen:
        print(f"{hypothesis.name}: {hypothesis.what}")
        fit(calibration, hypothesis)
    calibration.clear()
    for one in recorded_runs(lambda name, point: not is_calibration(name, point)):
        for hypothesis in chosen:
            if one.key not in hypothesis.told:
                hypothesis.tell(one)
    for hypothesis in chosen:
        report(hypothesis)


if __name__ == "__main__":
    main()
