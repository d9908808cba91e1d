"""Figures of a job: samples counted one by one, rows of epochs, overlap, a restart in the middle."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rudra_zmq.core.events import Decision, Entry, GradientId, Span
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.metrics import COLUMNS, MetricsCsv


def _decision(update: int, *pieces: tuple[tuple[Span, ...], int]) -> Decision:
    """One update of gradients given as (spans, sigma)."""
    entries = tuple(
        Entry(
            GradientId(i, 1, update),
            0,
            update - 1 - sigma,
            spans,
            sum(s.stop - s.start for s in spans),
            sigma,
            1.0,
            0.5,
            False,
        )
        for i, (spans, sigma) in enumerate(pieces)
    )
    samples = sum(e.count for e in entries)
    return Decision(update, 1, entries, 0.0, 1.0, 1.0, 0.0, 0.0, samples, len(entries))


def test_a_row_of_an_epoch() -> None:
    figures = Figures(100)
    figures.seconds += 0.0
    figures.tick(0.0)
    figures.pushed(0, 50, 2.0, 0.9, 0.1)
    figures.pushed(0, 50, 1.0, 0.3, 0.1)
    figures.updated(_decision(1, ((Span(0, 0, 50),), 0)), 0.1)
    figures.updated(_decision(2, ((Span(0, 50, 60), Span(0, 60, 100)), 2)), 0.05)
    figures.seconds += 4.0
    figures.tick(4.0)
    row = figures.epoch_done(0, 4, 128)
    assert (row.epoch, row.samples, row.distinct, row.updates) == (0, 100, 100, 2)
    assert row.train_loss == 1.5
    assert row.staleness_mean == 1.0 and row.staleness_p95 == 2.0
    assert row.lr == 0.05 and row.lam == 4 and row.global_batch == 128
    assert row.overlap == pytest.approx(1.2 / 1.4)
    assert row.seconds == 4.0
    assert row.accuracy is None


def test_a_sample_applied_twice_shows() -> None:
    figures = Figures(10)
    figures.updated(_decision(1, ((Span(0, 0, 6),), 0), ((Span(0, 4, 8),), 0)), 0.1)
    row = figures.epoch_done(0, 1, 10)
    assert (row.samples, row.distinct) == (10, 8)


def test_epochs_that_overlap_are_kept_apart() -> None:
    figures = Figures(10)
    figures.pushed(0, 10, 4.0, 0, 0)
    figures.pushed(1, 5, 1.0, 0, 0)
    figures.updated(_decision(1, ((Span(0, 0, 10),), 0), ((Span(1, 0, 5),), 0)), 0.1)
    assert figures.epoch_done(0, 1, 10).train_loss == 4.0
    figures.updated(_decision(2, ((Span(1, 5, 10),), 0)), 0.1)
    row = figures.epoch_done(1, 1, 10)
    assert (row.samples, row.distinct, row.updates, row.train_loss) == (10, 10, 1, 1.0)


@pytest.mark.parametrize(
    ("metrics", "accuracy", "error"),
    [
        ({"accuracy": 0.9}, 0.9, 0.1),
        ({"test_error": 0.25, "loss": 1.0}, 0.75, 0.25),
        ({"accuracy": 0.9, "test_error": 0.2}, 0.9, 0.2),
        ({"loss": 3.0}, None, None),
        ({"accuracy": math.nan}, None, None),
        ({"accuracy": 91.3}, None, None),
        ({"test_error": -0.1}, None, None),
    ],
)
def test_test_results(metrics: dict[str, float], accuracy: float | None, error: float | None) -> None:
    figures = Figures(10)
    figures.updated(_decision(1, ((Span(0, 0, 10),), 0)), 0.1)
    figures.epoch_done(0, 1, 10)
    assert figures.tested(0, metrics) == accuracy
    row = figures.rows[0]
    assert row.accuracy == accuracy
    assert row.test_error == (None if error is None else pytest.approx(error))


def test_a_result_of_the_chief_may_come_before_the_epoch_is_done() -> None:
    figures = Figures(10)
    figures.updated(_decision(1, ((Span(0, 0, 10),), 0)), 0.1)
    figures.tested(0, {"accuracy": 0.5})
    assert figures.epoch_done(0, 1, 10).accuracy == 0.5


def test_rates_are_of_the_last_ten_seconds() -> None:
    figures = Figures(1000)
    for second in range(31):
        figures.seconds += 1.0
        figures.tick(float(second))
        if second == 15:
            figures.updated(_decision(1, ((Span(0, 0, 500),), 0)), 0.1)
    assert figures.rates() == (0.0, 0.0)
    figures.updated(_decision(2, ((Span(0, 500, 1000),), 0)), 0.1)
    figures.seconds += 1.0
    figures.tick(31.0)
    assert figures.rates() == (50.0, 0.1)


def test_a_restart_in_the_middle_of_an_epoch() -> None:
    figures = Figures(100)
    figures.seconds += 3.0
    figures.tick(0.0)
    figures.pushed(0, 30, 2.0, 3.0, 1.0)
    figures.updated(_decision(1, ((Span(0, 10, 40),), 1)), 0.1)
    figures.updated(_decision(2, ((Span(0, 0, 5), Span(0, 99, 100)), 0)), 0.1)
    again = Figures(100)
    again.restore(json.loads(json.dumps(figures.state())))
    assert again.state() == figures.state()
    for each in (figures, again):
        each.updated(_decision(3, ((Span(0, 5, 10), Span(0, 40, 99)), 0)), 0.1)
        row = each.epoch_done(0, 2, 64)
        assert (row.samples, row.distinct, row.updates, row.seconds) == (100, 100, 3, 3.0)
    assert figures.rows == again.rows


def test_metrics_csv(tmp_path: Path) -> None:
    figures = Figures(10)
    path = tmp_path / "metrics.csv"
    csv = MetricsCsv(path, pytest.fail)
    for epoch in range(3):
        figures.seconds += 2.0
        figures.tick(float(epoch))
        figures.pushed(epoch, 10, 1.25, 1.0, 0.0)
        figures.updated(_decision(epoch + 1, ((Span(epoch, 0, 10),), 0)), 0.1)
        figures.epoch_done(epoch, 4, 128)
    figures.tested(1, {"accuracy": 0.75})
    csv.settle(1, figures.rows)
    csv.settle(0, figures.rows)
    assert path.read_text().splitlines() == [
        COLUMNS,
        "0,2.000,1.25,,0,0,1,10,0.1,4,128,1.0000",
        "1,4.000,1.25,0.25,0,0,1,10,0.1,4,128,1.0000",
    ]
    csv.settle(2, figures.rows)
    assert path.read_text().splitlines()[-1].startswith("2,6.000,1.25,,")
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_metrics_file_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    csv = MetricsCsv(tmp_path / "absent" / "metrics.csv", said.append)
    csv.settle(0, [])
    csv.settle(1, [])
    assert len(said) == 1 and "Fix:" in said[0]
