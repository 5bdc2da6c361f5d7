"""The display of a run in progress."""

import math
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from federation import run, small
from interruption import until
from rich.console import Console

from fedhet.runs.display import LiveDisplay, line_display, round_lines
from fedhet.runs.log import RunLog, Watcher
from fedhet.runs.progress import Progress, State, accuracies_of, round_line
from fedhet.runs.records import Headline, RoundRecord, Score, Seconds
from fedhet.runs.units import time_left


def test_lines_describe_the_start_and_each_round(tmp_path):
    console = Console(width=200, record=True, file=StringIO())
    run(small(), tmp_path / "run", [line_display(console)])
    text = console.export_text()
    assert text.splitlines()[:2] == [
        "reading digits and splitting it among the clients",
        "waiting for 4 clients to load data and build models",
    ]
    assert "felo on digits: 4 clients, 2 architectures, 2 rounds, seed 0" in text
    assert "round   1  accuracy (common, global) 0." in text
    assert "4/4 clients" in text


@pytest.mark.parametrize("method", ["central", "fedgems"])
def test_accuracy_is_shown_whatever_kind_of_model_a_method_has(tmp_path, method):
    """`central` has a global model and a server model, and no private models."""
    console = Console(width=200, record=True, file=StringIO())
    changes = {"public_samples": 40} if method == "fedgems" else {}
    run(small(method, rounds=1, clients=2, **changes), tmp_path / "run", [line_display(console)])
    (line,) = (line for line in console.export_text().splitlines() if "round   1" in line)
    if method == "central":
        assert "accuracy (common, global) 0." in line
        assert ", server 0." in line
    else:
        assert "accuracy (common, server) 0." in line
        assert ", private 0." in line


def test_live_shows_every_client(tmp_path):
    seen = []
    console = Console(width=120, height=50, force_terminal=True, file=StringIO())
    with LiveDisplay(console) as live:
        run(small(), tmp_path / "run", [live.progress, Recorder(live, seen)])
    above = "".join(console.file.getvalue().split())
    assert f"run:{tmp_path}/run" in above  # however long
    begun, done = seen[0], seen[-1]
    # One worker trains one client at a time.
    assert (begun.count("training"), begun.count("waiting")) == (2, 3)  # also "1 training"
    assert done.count("done") == 4
    said = "accuracy (common, global) 0.", "mean by round"
    for word in ("client-0", "mlp", "client-3", "cnn2", *said):
        assert word in done


class Recorder(Watcher):
    """Captures the display after each round's first client has started, and at the end."""

    def __init__(self, display, seen):
        self.display, self.seen = display, seen

    def client_started(self, client):
        if client == "client-0":
            self.seen.append(picture(self.display, 120, 50))

    def round_finished(self, record):
        self.seen.append(picture(self.display, 120, 50))


def picture(display, width, height):
    """Return the content of the display on a terminal of this size."""
    plain = Console(width=width, height=height, record=True, file=StringIO())
    plain.print(display)
    return plain.export_text()


def scores(values, std=0.1):
    mean = sum(values.values()) / len(values)
    return Score(mean=mean, std=std, worst=min(values.values()), per_client=values)


def record(number, names, values, failed=()):
    return RoundRecord(
        number,
        asked=list(names),
        answered=[name for name in names if name not in failed],
        failed=dict.fromkeys(failed, "boom"),
        accuracy={"common": {"private": scores(values)}},
        bytes_up=30_000_000,
        bytes_down=10_000_000,
        seconds=Seconds(total=50.0),
    )


def test_round_line_shows_the_largest_epsilon():
    private = replace(record(1, ["a", "b"], {"a": 0.5, "b": 0.6}), epsilon={"a": 1.25, "b": 7.9})
    assert "  ε 7.9  " in round_line(private, Headline())
    assert "ε" not in round_line(record(1, ["a"], {"a": 0.5}), Headline())


class Hundred:
    """A live display of a hundred clients in the third of ten rounds, with a fake clock.

    In the first two rounds, client i trained for i / 100 seconds. In the third round, half of the
    clients have replied, client 37 with an error, and four have been training for three seconds.
    """

    def __init__(self, width, height):
        self.console = Console(width=width, height=height, force_terminal=True, file=StringIO())
        self.live = LiveDisplay(self.console)
        self.names = [f"client-{n}" for n in range(100)]
        rng = random.Random(0)
        self.values = {name: rng.random() for name in self.names}
        self.now = 0.0
        self.live.progress.run_started(
            small(rounds=10),
            Path("/a/long/directory/of/runs/felo"),
            dict.fromkeys(self.names, "mlp"),
            "digits",
        )
        self.live.progress._clock = lambda: self.now

    def play(self):
        for number in (1, 2):
            self.live.progress.round_started(number, self.names)
            self.train(self.names)
            self.live.progress.round_finished(record(number, self.names, self.values))
        self.live.progress.round_started(3, self.names)
        self.train(self.names[:50])
        for name in self.names[50:54]:
            self.live.progress.client_started(name)
        self.now += 3.0
        for number in range(5):
            self.live.progress.notice(f"client-{number} refused: " + "a long reason " * 10)

    def train(self, names):
        for place, name in enumerate(names):
            self.live.progress.client_started(name)
            self.now += place / 100
            self.live.progress.client_answered(name, "boom" if name == "client-37" else "")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (200, 60), (80, 120)])
def test_lines_of_the_run_stay_visible_with_100_clients(width, height):
    hundred = Hundred(width, height)
    hundred.live.progress.waiting("starting Ray with 4 workers")
    hundred.play()
    text = picture(hundred.live, width, height)
    lines = text.splitlines()
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= width
    for part in (
        "2/10 rounds",
        "round 3: 50 of 100 clients replied, 1 failed · 4 training",
        f"accuracy (common, private) {sum(hundred.values.values()) / 100:.4f}",
        "mean by round",
        # 2 x 40 MB; eight rounds of 50 s, of which what the third has taken is gone.
        f"80.0 MB sent · 50.0 s per round · about {left(8 * 50 - 3 - sum(range(50)) / 100)} left",
        "client-37",
    ):
        assert part in text, part
    # Each line's own number tells which clients are in view: the worst is always there.
    assert min(hundred.names, key=lambda name: hundred.values[name]) in text


def left(seconds):
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(6.94, "7 s"), (48.3, "48 s"), (59.7, "1 min 00 s"), (245.3, "4 min 05 s")],
)
def test_estimate_has_whole_seconds(seconds, words):
    assert time_left(seconds) == f"about {words} left"


def test_first_in_view_are_the_failed_the_slow_and_the_worst():
    hundred = Hundred(80, 24)
    hundred.play()
    progress = hundred.live.progress
    shown = [client.name for client in progress.clients_to_show(12)]
    assert "client-37" in shown
    assert {f"client-{n}" for n in range(50, 54)} & {*shown}
    ranked = sorted(hundred.names, key=lambda name: hundred.values[name])
    assert {*ranked[:3]} <= {*shown}
    assert "client-99" in shown, "the slowest of those that have trained"
    assert len(shown) == 12
    clients = [progress.clients[name] for name in shown]
    order = [([*State].index(client.state), client.accuracy) for client in clients]
    assert order == sorted(order)
    hidden = next(line for line in picture(hundred.live, 80, 24).splitlines() if "more:" in line)
    counts = [int(word) for word in hidden.replace(",", "").split() if word.isdigit()]
    assert counts[0] == sum(counts[1:])


def test_display_describes_the_wait_before_the_first_round():
    live = LiveDisplay(Console(width=80, force_terminal=True, file=StringIO()))
    assert "starting" in picture(live, 80, 24)
    live.progress.waiting("reading [b]digits[/b]\x1b[31m")
    assert "reading [b]digits[/b]" in picture(live, 80, 24)
    live.progress.run_started(small(), Path("x"), {"client-0": "mlp"}, "digits")
    assert "1 client" in picture(live, 80, 24)


def test_names_and_notices_cannot_control_the_terminal():
    live = LiveDisplay(Console(width=80, force_terminal=True, file=StringIO()))
    live.progress.run_started(small(), Path("x"), {"\x1b[31mred": "[bold]m[/bold]"}, "digits")
    live.progress.notice("\x1b[2Jcleared")
    text = picture(live, 80, 24)
    assert "[bold]m[/bold]" in text
    assert "\x1b[31" not in text
    assert "\x1b[2J" not in text


def test_time_left_follows_the_clock():
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    progress.run_started(small(rounds=4), Path("x"), {"a": "mlp"}, "digits")
    assert math.isnan(progress.seconds_left)
    progress.round_started(1, ["a"])
    now[0] = 10.0
    progress.round_finished(record(1, ["a"], {"a": 0.5}))  # its record says 50 s
    assert progress.seconds_left == pytest.approx(150.0)
    progress.round_started(2, ["a"])
    now[0] = 30.0
    assert progress.seconds_left == pytest.approx(130.0)
    now[0] = 1000.0  # a round longer than the others: at least the later rounds are left
    assert progress.seconds_left == pytest.approx(100.0)


def test_run_that_is_in_a_round_waits_for_nothing():
    progress = Progress()
    progress.waiting("waiting for 3 clients")
    progress.run_started(small(rounds=4), Path("x"), {"a": "mlp"}, "digits")
    assert progress.status.phase == "waiting for 3 clients"
    progress.round_started(1, ["a"])
    assert progress.status.phase == ""


def test_client_keeps_its_last_accuracy_and_time():
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    progress.run_started(small(rounds=9), Path("x"), {"a": "mlp", "b": "mlp"}, "digits")
    progress.round_started(1, ["a", "b"])
    progress.client_started("a")
    now[0] = 7.0
    progress.client_answered("a", "")
    progress.round_finished(record(1, ["a", "b"], {"a": 0.25, "b": 0.5}))
    progress.round_started(2, ["b", "late"])
    progress.round_finished(RoundRecord(2, asked=["b"]))  # not evaluated
    a, late = progress.clients["a"], progress.clients["late"]
    assert (a.state, a.accuracy, progress.seconds_of(a)) == (State.NOT_SAMPLED, 0.25, 7.0)
    assert late.state == State.WAITING
    assert math.isnan(late.accuracy)


def test_number_of_training_clients_is_limited_by_workers(tmp_path):
    """The log shows the start of each client: one per worker at first, then one for each reply.

    Ray may start with a client other than the first one called, whose early reply ends a training.
    """
    seen = []

    class Started(Watcher):
        def client_started(self, client):
            seen.append(client)

        def client_answered(self, client, error):
            seen.append(error or "answered")

    log = RunLog(small(), tmp_path / "run", workers=2, watchers=[Started()])
    log.round_started(1, ["a", "b", "c"])
    assert seen == ["a", "b"]
    log.client_answered("b")
    assert seen == ["a", "b", "answered", "c"]
    log.client_answered("a", "boom")
    log.client_answered("c")
    assert seen[4:] == ["boom", "answered"]
    seen.clear()
    log = RunLog(small(), tmp_path / "other", workers=1, watchers=[Started()])
    log.round_started(1, ["a", "b", "c"])
    log.client_answered("b")
    log.client_answered("a")
    assert [each for each in seen if each != "answered"] == ["a", "c"]


def test_headline_kind_is_first():
    values = {"a": 0.25, "b": 0.75}
    kinds = {"server": scores({"server": 0.5}), "private": scores(values), "proxy": scores(values)}
    text = accuracies_of(RoundRecord(1, accuracy={"personal": kinds}), Headline())
    assert text == (
        "accuracy (personal, private) 0.5000 ± 0.1000, worst 0.2500, proxy 0.5000, server 0.5000"
    )
    deployed = Headline(protocol="common", kinds={"personal": "proxy"})
    text = accuracies_of(RoundRecord(1, accuracy={"personal": kinds}), deployed)
    assert text.startswith("accuracy (personal, proxy) 0.5000 ± 0.1000, worst 0.2500, private 0.5")
    assert accuracies_of(RoundRecord(1), Headline()) == "not evaluated"


def test_line_counts_replied_awaited_backing_off_and_absent_clients():
    said = StringIO()
    progress = round_lines(Console(width=200, file=said), seconds=0.0)
    progress.run_started(small(rounds=9), Path("run"), dict.fromkeys("edcba", "mlp"), "digits")
    progress.clients_excluded({"d": "backing off", "e": "offline"})
    progress.round_started(3, ["a", "b", "c"])
    progress.client_started("b")
    progress.client_answered("a", "")
    until(lambda: "done" in said.getvalue(), 5.0)
    assert (
        said.getvalue()
        == "round 3 of 9: training b · waiting c · done a · backing off d · offline e\n"
    )
