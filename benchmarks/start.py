"""CPU seconds of commands that train nothing, and the seconds from Enter to a first round.

    python -m benchmarks.start [--repeats 3] [--run]

Bound: 0.7 s of CPU, user and system, each command in a process of its own; the least of the
repeats, as other work on the machine can only add to it. With --run, the demo's first round on Ray
too, of which the time on the clock counts: at most 8 s on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import verdict

BOUND = 0.7
BOUND_OF_A_RUN = 8.0
COMMANDS = (
    "--help",
    "--version",
    "run --help",
    "methods",
    "methods felo",
    "presets",
    "settings",
    "run felo --set lrr=1",
    "run felo --set lr=-1",
    "run fello",
)
COMPLETION = {
    "_FEDHET_COMPLETE": "complete_bash",
    "COMP_WORDS": "fedhet run felo --set local",
    "COMP_CWORD": "4",
}


def main() -> None:
    """Print the seconds of each command, and whether its bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", action="store_true", help="train a round of the demo as well")
    chosen = parser.parse_args()
    for words in COMMANDS:
        seconds = [cpu_seconds(words.split(), {}) for _ in range(chosen.repeats)]
        _show(f"fedhet {words}", min(seconds), BOUND)
    seconds = [cpu_seconds([], COMPLETION) for _ in range(chosen.repeats)]
    _show("completion of --set", min(seconds), BOUND)
    if chosen.run:
        _show("demo, Enter to the first round", seconds_to_the_first_round(), BOUND_OF_A_RUN)


def cpu_seconds(words: list[str], environment: dict[str, str]) -> float:
    """Return the user and system time of a command, its process's start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; sys.argv[0] = 'fedhet'; from fedhet.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def seconds_to_the_first_round() -> float:
    """Return the seconds by the clock from the start of `fedhet run` to its first round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["run", "felo", "--preset", "demo", "--rounds", "1", "--backend", "ray"]
        command = [sys.executable, "-m", "fedhet", *words, "--out", str(out)]
        subprocess.run(command, capture_output=True, check=True)
        found: float = json.loads((out / "summary.json").read_text())["seconds"]["start"]
        return found


def _show(name: str, seconds: float, bound: float) -> None:
    print(f"{name:<44} {seconds:6.2f} s  bound {bound:.1f} {verdict(seconds <= bound)}")


if __name__ == "__main__":
    main()
