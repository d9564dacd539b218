"""Metrics math: rates, FLOPs, memory, the ledger's lines, early stop."""

from __future__ import annotations

import math

import pytest
import torch

from recipes.data.records import DataInfo
from recipes.metrics.clock import HostClock, StepTimes
from recipes.metrics.early_stop import EarlyStop
from recipes.metrics.flops import SampleFlops, flop_rates, peak_flops, sample_flops
from recipes.metrics.ledger import Ledger, StepOutcome, StepRecord, StepShape
from recipes.metrics.memory import MemoryMeter, ResidentMemory, retry_hint
from recipes.ranks import Ranks
from recipes.registry import Entry
from recipes.report import Report, amount, progress_text
from recipes.schema.engine import PrecisionConfig
from recipes.schema.model import ModelConfig
from recipes.schema.training import EarlyStopConfig, HardwareConfig

ONE_RANK = Ranks(0, 1, torch.device("cpu"))


class FixedTimes(StepTimes):
    def read(self) -> dict[str, float]:
        return {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}


class FixedMemory(MemoryMeter):
    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> dict[str, int]:
        self.reads += 1
        return {"peak_rss_bytes": 2**52 + 1}  # more than float32 can hold


def record(step: int, loss_sum: float, num_targets: float, grad_norm: float = 1.5) -> StepRecord:
    targets = torch.tensor(num_targets, dtype=torch.float64)
    outcome = StepOutcome(torch.tensor(loss_sum), targets, torch.tensor(grad_norm), None, torch.zeros(2))
    return StepRecord(step, 1e-3, FixedTimes(), outcome)


def ledger(memory: MemoryMeter, unit: str = "tokens", is_queries: bool = False) -> Ledger:
    return Ledger(ONE_RANK, memory, StepShape(8, 80, unit, is_queries), SampleFlops(6e9, 8e9), 1e12)


def test_a_flush_gives_one_line_a_step_and_reads_memory_once():
    memory = FixedMemory()
    book = ledger(memory)
    book.add(record(1, 40.0, 10))
    book.add(record(2, 20.0, 10, grad_norm=0.5))
    first, second = book.flush()
    assert book.flush() == []
    assert memory.reads == 1
    assert (first["step"], first["loss"], first["grad_norm"]) == (1, 4.0, 1.5)
    assert (second["step"], second["loss"], second["grad_norm"]) == (2, 2.0, 0.5)
    assert second["samples"] == 16
    assert second["tokens"] == 160
    assert first["step_s"] == pytest.approx(1.0)
    assert first["samples_per_s"] == pytest.approx(8.0)
    assert first["tokens_per_s_per_rank"] == pytest.approx(80.0)
    assert first["tflops_per_rank"] == pytest.approx(8 * 6e9 / 1e12)
    assert first["mfu"] == pytest.approx(0.048)
    assert first["hfu"] == pytest.approx(0.064)
    assert first["peak_rss_bytes"] == 2**52 + 1
    assert "qps" not in first


def test_samples_go_on_where_the_global_batch_was_another():
    book = ledger(FixedMemory())
    book.begin_at(3, samples=12)  # three steps of 4; from here on 8
    book.add(record(4, 40.0, 10))
    (line,) = book.flush()
    assert (line["samples"], line["tokens"]) == (20, 200)


def test_clicks_report_queries_and_no_tokens():
    book = ledger(FixedMemory(), unit="samples", is_queries=True)
    book.add(record(1, 40.0, 10))
    (line,) = book.flush()
    assert line["qps"] == pytest.approx(8.0)
    assert "tokens" not in line


def test_flops_with_and_without_recomputation_and_without_a_count():
    functions = {"forward_flops": lambda config, info: 10.0, "unit_forward_flops": lambda config, info: 8.0}
    whole = Entry("m", ModelConfig, "images", None, {"forward_flops": functions["forward_flops"]})
    info = DataInfo(task="images")
    config = ModelConfig(kind="m")
    assert sample_flops(whole, config, info, False) == SampleFlops(30.0, 30.0)
    assert sample_flops(whole, config, info, True) == SampleFlops(30.0, 40.0)
    assert sample_flops(Entry("m", ModelConfig, "images", None, functions), config, info, True) == SampleFlops(
        30.0, 38.0
    )
    assert sample_flops(Entry("m", ModelConfig, "images", None, {}), config, info, True) is None
    assert set(flop_rates(None, 5.0, 1e12).values()) == {None}


def test_mfu_is_null_where_no_peak_is_known_and_follows_the_compute_dtype():
    hardware = HardwareConfig(peak_flops_bfloat16=312e12)
    assert peak_flops(hardware, PrecisionConfig()) is None
    assert peak_flops(hardware, PrecisionConfig(param_dtype="bfloat16")) == 312e12
    rates = flop_rates(SampleFlops(1e12, 1e12), 100.0, None)
    assert rates["mfu"] is None
    assert rates["tflops_per_rank"] == 100.0


def test_the_host_clock_adds_repeated_phases(monkeypatch: pytest.MonkeyPatch):
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("recipes.metrics.clock.time.perf_counter", lambda: next(ticks))
    clock = HostClock()
    clock.start()
    for phase in ("forward", "backward", "forward", "optimizer"):
        clock.mark(phase)
    assert clock.finish().read() == {"data": 0.0, "forward": 4.0, "backward": 2.0, "optimizer": 4.0}


def test_resident_memory_sees_this_process():
    read = ResidentMemory().read()
    assert 2**20 < read["rss_bytes"] <= read["peak_rss_bytes"]


@pytest.mark.parametrize(
    ("limiter", "inflight", "word"),
    [
        ("unlimited", 2, "rate_limiter=fixed"),
        ("fixed", 4, "lower rate_limiter.max_inflight"),
        ("fixed", 2, "micro_batch"),
    ],
)
def test_new_allocator_retries_come_with_a_hint(limiter: str, inflight: int, word: str):
    hint = retry_hint(1, 4, inflight, limiter)
    assert hint is not None
    assert hint.startswith("3 allocator retries")
    assert word in hint
    assert retry_hint(4, 4, inflight, limiter) is None


def test_early_stop_counts_evaluations_without_enough_improvement():
    stop = EarlyStop(EarlyStopConfig(patience=2, min_delta=0.1))
    losses = [3.0, 2.95, 2.85, 2.8, math.nan]
    #         best   +1    best  +1    +2: stop
    assert [stop.observe(loss) for loss in losses] == [False, False, False, False, True]
    assert stop.lowest == 2.8


def test_early_stop_without_patience_never_stops():
    stop = EarlyStop(EarlyStopConfig())
    assert not any(stop.observe(1.0) for _ in range(100))


def test_amounts_people_read():
    assert [amount(value) for value in (8.0, 812, 41234, 3_070_000, 2.5e9)] == ["8", "812", "41.2k", "3.07M", "2.5G"]


def test_progress_text_is_the_last_loss_and_the_mean_speed():
    book = ledger(FixedMemory())
    book.add(record(1, 40.0, 10))
    book.add(record(2, 20.0, 10))
    text = progress_text(book.flush())
    assert text == "loss 2.0000  norm 1.50  lr 1.00e-03  80 tok/s  1000 ms/step  mfu 4.8%"


def test_on_a_terminal_there_is_a_bar_elsewhere_plain_lines_and_other_ranks_are_silent(capsys: pytest.CaptureFixture):
    book = ledger(FixedMemory())
    book.add(record(1, 40.0, 10))
    lines = book.flush()
    for is_main, is_interactive in ((True, True), (True, False), (False, False)):
        report = Report(is_main, is_interactive)
        report.line("hello")
        report.begin_steps(0, 20)
        report.step_done()
        report.progress(lines, 20)
        report.close()
        out, err = capsys.readouterr()
        assert ("hello" in out) == is_main
        assert ("step  1/20  loss 4.0000" in out) == (is_main and not is_interactive)
        assert ("1/20" in err and "loss 4.0000" in err) == is_interactive
