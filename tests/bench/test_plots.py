"""Plots are PNG files of the figures they should be; without matplotlib the package to install is named."""

import struct
import sys
from pathlib import Path

import pytest

from octavo.bench import plots
from octavo.bench.backends import RequestResult
from octavo.errors import ClientError

RESULTS = [
    RequestResult(10, 5.0 + i / 10, True, 0.5, 0.1, [0.01, 0.03, 0.1] if i % 2 else [], 4) for i in range(30)
] + [RequestResult(10, 5.0, False, error="no"), RequestResult(10, 5.0, True, 0.3, None, [], 4)]


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("results", [RESULTS, []])
def test_every_plot_of_results_and_of_none(tmp_path: Path, results: list[RequestResult]):
    plots.plot_latencies(results, tmp_path / "a.png")
    plots.plot_timeline(results, tmp_path / "b.png", (25.0, 50.0))
    plots.plot_lengths(results, tmp_path / "c.png")
    assert all(min(size_of_png(tmp_path / name)) > 300 for name in ("a.png", "b.png", "c.png"))


def test_gaps_are_coloured_by_their_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = []
    make = plots._new_figure
    monkeypatch.setattr(plots, "_new_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    plots.plot_timeline(RESULTS, tmp_path / "b.png", (25.0, 50.0))
    lines = {collection.get_label(): collection.get_segments() for collection in figures[0].axes[0].collections}
    assert {label: len(segments) for label, segments in lines.items()} == {
        "to the first token": 31,
        "gap up to 25 ms": 15,
        "up to 50 ms": 15,
        "above 50 ms": 15,
    }
    begin, end = lines["up to 50 ms"][0]
    assert (begin[0], end[0]) == pytest.approx((0.1 + 0.1 + 0.01, 0.1 + 0.1 + 0.04))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ClientError, match=r"pip install octavo\[plot\]"):
        plots.check_plotting()
