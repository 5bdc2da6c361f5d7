"""A round's metrics as scalars, for TensorBoard and trackers."""

from __future__ import annotations

from collections.abc import Iterator

from fedhet.runs.records import RoundRecord, Score


def scalars(
    record: RoundRecord, method: str, *, clients: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield a round's metrics by their TensorBoard names, with those of each client if wanted."""
    for metric in record.scores:
        for protocol, kind, score in record.each(metric):
            yield from _statistics(f"{metric}-{protocol}-{kind}", score, clients)
    for protocol, ratio in record.relative.items():
        for statistic in ("mean", "best", "worst"):
            yield f"relative-{protocol}/{statistic}", getattr(ratio, statistic)
    if record.loss:
        yield "loss/mean", record.loss.mean
    for name in ("asked", "answered", "failed", "absent"):
        yield f"clients/{name}", len(getattr(record, name))
    yield "bytes/up", record.bytes_up
    yield "bytes/down", record.bytes_down
    for name, value in record.method.items():
        yield f"{method}/{name}", value
    for name, value in record.seconds:
        yield f"seconds/{name}", value


def _statistics(name: str, score: Score, clients: bool) -> Iterator[tuple[str, float]]:
    """Yield the statistics of a metric, and each client's value if wanted."""
    for statistic in ("mean", "std", "worst"):
        yield f"{name}/{statistic}", getattr(score, statistic)
    for client, value in score.per_client.items() if clients else ():
        yield f"{name}/clients/{client}", value
