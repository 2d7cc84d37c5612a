"""Draws throughput against interactivity: what the machine gives over what one user gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from client.perf_profile import Level


def check_picture(path: Path) -> None:
    """Before anything is measured. Raises ValueError with what to install, and for a suffix that
    is no format of pictures."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError(
            "expected matplotlib for --plot, found none: pip install '.[plot]'"
        ) from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"expected a picture that ends with one of {', '.join(sorted(formats))}, got {path}; "
            "name the file so"
        )


def plot(levels: Sequence[Level], path: Path, title: str) -> None:
    """Writes a picture of the levels that have an interactivity; the suffix gives its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    points = [
        (level.interactivity, level.output_tokens_per_second, str(level.concurrency))
        for level in levels
        if level.interactivity is not None
    ]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o")
    for x, y, label in points:
        axes.annotate(label, (x, y), (5, 5), textcoords="offset points")
    axes.set_xlabel("interactivity: output tokens per second and user (median)")
    axes.set_ylabel("throughput: output tokens per second")
    axes.set_title(f"{title}; labels: concurrent users")
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
