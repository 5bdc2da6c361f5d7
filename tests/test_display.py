"""What a person sees while a run goes on."""

from io import StringIO

from federation import run, small
from rich.console import Console

from fedhet.runs.display import LineDisplay, LiveDisplay


def test_lines_say_each_round(tmp_path):
    console = Console(width=200, record=True, file=StringIO())
    run(small(), tmp_path / "run", [LineDisplay(console)])
    text = console.export_text()
    assert "felo on digits: 4 clients, 2 architectures, 2 rounds, seed 0" in text
    assert "round   1  accuracy (common) 0." in text
    assert "4/4 clients" in text


def test_live_shows_every_client(tmp_path):
    console = Console(width=120, force_terminal=True, file=StringIO())
    display = LiveDisplay(console)
    seen = []

    with display:
        run(small(), tmp_path / "run", [display, Recorder(display, seen)])
    training, done = seen[0], seen[-1]
    assert training.count("training") == 4
    assert done.count("done") == 4
    for word in ("client-0", "mlp", "client-3", "cnn2", "mean accuracy (common) by round"):
        assert word in done


class Recorder:
    """Takes a picture of the display at each round's start and end."""

    def __init__(self, display, seen):
        self.display, self.seen = display, seen

    def _take(self):
        plain = Console(width=120, record=True, file=StringIO())
        plain.print(self.display._render())
        self.seen.append(plain.export_text())

    def run_started(self, *_):
        pass

    def round_started(self, *_):
        self._take()

    def client_answered(self, *_):
        pass

    def round_finished(self, *_):
        self._take()

    def notice(self, *_):
        pass

    def run_finished(self, *_):
        pass
