"""Metrics and numbers in words: what each is called, its unit, and how a value is written."""

from __future__ import annotations

import math
from datetime import datetime

NAMES = {
    "train/loss": "training loss",
    "val/loss": "validation loss",
    "val/perplexity": "validation perplexity",
    "val/bits_per_byte": "validation bits per byte",
    "val/accuracy": "validation accuracy",
    "train/epoch_loss": "training loss of an epoch",
    "train/grad_norm": "gradient norm",
    "train/lr": "learning rate",
    "train/skipped_updates": "updates skipped",
    "perf/step_seconds": "step time",
    "perf/tokens_per_second": "tokens a second",
    "perf/samples_per_second": "samples a second",
    "perf/mfu": "model FLOPs utilisation",
    "perf/data_wait_seconds": "wait for data, a step",
    "memory/peak_bytes": "peak memory of a rank",
    "system/cpu_utilisation": "processor utilisation",
    "system/device_utilisation": "device utilisation",
}

STATUS = {
    "done": "done",
    "failed": "failed",
    "user_error": "refused",
    "interrupted": "interrupted",
    "preempted": "preempted, saved",
    "running": "running, or killed without a word",
    "unreadable": "unreadable",
    "": "unknown",
}
"""How a run ended, by what its record says."""

GOOD = {"done"}
SHARES = ("mfu", "utilisation", "accuracy")


def name(key: str) -> str:
    """What metric `key` is called."""
    if key in NAMES:
        return NAMES[key]
    group, _, rest = key.partition("/")
    words = rest.replace("/", " ").replace("_", " ")
    if group == "comm":
        return f"{words.removesuffix(' bytes')}, bytes a step"
    return {"val": f"validation {words}", "train": f"training {words}"}.get(group, words or key)


def unit(key: str) -> str:
    """How values of `key` are written: `bytes`, `seconds`, `share`, `rate` or `number`."""
    if key.endswith("bytes"):
        return "bytes"
    if key.endswith("per_second"):
        return "rate"
    if key.endswith("seconds"):
        return "seconds"
    return "share" if key.endswith(SHARES) else "number"


def value(key: str, number: float | None) -> str:
    """A value of `key`, for a person."""
    if number is None:
        return "–"
    if not math.isfinite(number):
        return str(number)
    kind = unit(key)
    if kind == "bytes":
        return num_bytes(number)
    if kind == "seconds":
        return seconds(number)
    if kind == "share":
        return f"{number:.1%}"
    return large(number) if kind == "rate" else f"{number:.4g}"


def num_bytes(number: float) -> str:
    """'1.50 MiB'."""
    size, units = abs(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1023.5 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.3g} {units[0]}"


def seconds(number: float) -> str:
    """'12.3 ms', '4.56 s', '1:02:03'."""
    if number == 0:
        return "0 s"
    for size, word in ((1e-3, "µs"), (1.0, "ms")):
        if number < size:
            return f"{number / size * 1e3:.3g} {word}"
    if number < 120:
        return f"{number:.3g} s"
    minutes, rest = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def large(number: float) -> str:
    """'12.3k'."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def deviation(measured: float, predicted: float) -> str:
    """'+3.1%': how far the measurement is from the prediction."""
    if predicted == 0:
        return "exact" if measured == 0 else "planned 0"
    off = measured / predicted - 1
    if off == 0:
        return "exact"
    return f"×{measured / predicted:.3g}" if off > 2 else f"{off:+.1%}"


def moment(text: str) -> str:
    """'30 November 2026, 12:00' of an ISO time."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{at.day} {at:%B %Y, %H:%M}"


def took(started: str, ended: str) -> str:
    """How long it was from one ISO time to another; empty where one is missing."""
    try:
        return seconds((datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds())
    except (ValueError, TypeError):
        return ""


def count(number: int, what: str) -> str:
    """'1 run', '2 runs'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
