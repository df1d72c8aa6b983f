"""Pictures of a run as PNG files, through matplotlib, which only the extra `plot` installs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.backends import RequestResult
from octavo.bench.serving_metrics import METRICS, piece_times, samples_of
from octavo.errors import ClientError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_WAITING, _ON_TIME, _SLOW, _VERY_SLOW = "#bbbbbb", "#2a9d8f", "#e9c46a", "#e76f51"


def _new_figure(width: float, height: float) -> "Figure":
    """A figure that draws into files only, whatever display there is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClientError("plots need matplotlib: pip install octavo[plot]", param="plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_plotting() -> None:
    """ClientError when plots cannot be drawn, to be told before a long run and not after it."""
    _new_figure(1, 1)


def plot_latencies(results: Sequence[RequestResult], path: Path) -> None:
    """The share of requests (of gaps, for ITL) that took no longer than x, one curve a metric."""
    figure = _new_figure(11, 7.5)
    for axes, (name, values) in zip(figure.subplots(2, 2).flat, samples_of(_good(results)).items(), strict=True):
        axes.set_title(METRICS[name])
        axes.set_xlabel("ms")
        axes.set_ylabel("share")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        if not values:
            axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes)
            continue
        milliseconds = np.sort(values) * 1e3
        axes.step(milliseconds, np.arange(1, len(values) + 1) / len(values), where="post")
        for percentile, style in ((50, "--"), (99, ":")):
            value = np.percentile(milliseconds, percentile)
            axes.axvline(value, color="grey", linestyle=style, label=f"p{percentile} {value:.1f} ms")
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=_DPI)


def plot_timeline(results: Sequence[RequestResult], path: Path, itl_thresholds_ms: tuple[float, float]) -> None:
    """One line a request in order of start: waiting for the first token, then each gap coloured by its length."""
    good = sorted(_good(results), key=lambda result: result.start)
    height = float(np.clip(2 + 0.06 * len(good), 4, 20))
    figure = _new_figure(12, height)
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float, float]]] = {c: [] for c in (_WAITING, _ON_TIME, _SLOW, _VERY_SLOW)}
    first = good[0].start if good else 0.0
    slow, very_slow = (threshold / 1e3 for threshold in itl_thresholds_ms)
    for index, result in enumerate(good):
        times = piece_times(result) or [result.start + (result.latency or 0.0)]
        lines[_WAITING].append((index, result.start - first, times[0] - first))
        for begin, gap in zip(times, result.itls, strict=False):
            colour = _ON_TIME if gap <= slow else _SLOW if gap <= very_slow else _VERY_SLOW
            lines[colour].append((index, begin - first, begin - first + gap))
    low, high = itl_thresholds_ms
    labels = ("to the first token", f"gap up to {low:g} ms", f"up to {high:g} ms", f"above {high:g} ms")
    width = max(0.5, 60 * height / max(len(good), 1))  # points: lines fill the axes
    for (colour, entries), label in zip(lines.items(), labels, strict=True):
        rows, lefts, rights = zip(*entries, strict=True) if entries else ((), (), ())
        axes.hlines(rows, lefts, rights, colors=colour, label=label, linewidth=min(width, 12))
    axes.set_xlabel("seconds from the first request")
    axes.set_ylabel("request")
    axes.invert_yaxis()
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=_DPI)


def plot_lengths(results: Sequence[RequestResult], path: Path) -> None:
    """How long prompts and answers were."""
    good = _good(results)
    figure = _new_figure(11, 4)
    lengths = ([r.prompt_len for r in good], [r.output_len for r in good])
    for axes, values, name in zip(figure.subplots(1, 2), lengths, ("prompt", "answer"), strict=True):
        axes.hist(values, bins=40)
        axes.set_xlabel(f"{name} tokens")
        axes.set_ylabel("requests")
    figure.savefig(path, dpi=_DPI)


def plot_sweep(rows: Sequence[Mapping[str, Any]], x: str, ys: Sequence[str], path: Path) -> None:
    """One panel for each of `ys` over `x`, one curve a server configuration (the column `serve`)."""
    figure = _new_figure(6.5 * min(2, len(ys)), 4 * -(-len(ys) // 2))
    panels = np.atleast_1d(figure.subplots(-(-len(ys) // 2), min(2, len(ys)))).flat
    for axes, y in zip(panels, ys, strict=False):
        for server in dict.fromkeys(row["serve"] for row in rows):
            points = [(row[x], row[y]) for row in rows if row["serve"] == server]
            points = sorted((float(a), float(b)) for a, b in points if a is not None and b is not None)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=server or "default")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=_DPI)


def _good(results: Sequence[RequestResult]) -> list[RequestResult]:
    return [result for result in results if result.success]
