"""loss.png: the loss curve of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from recipes.loggers.jsonl import read_lines


def draw_loss(metrics: Path, picture: Path, title: str) -> bool:
    """Training loss of every step and held-out losses; False when there is nothing to draw."""
    lines = read_lines(metrics)
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    held_out = [(line["step"], line["eval_loss"]) for line in lines if line.get("eval_loss") is not None]
    if not train:
        return False

    # Imported only here: it costs half a second, and a run may well end without a picture.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")  # no pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), linewidth=1, label="train")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), marker="o", linestyle="--" if len(held_out) > 1 else "", label="held out"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    return True
