"""What is wrong with the machines of a cluster, in one line for each fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedhet.base.errors import one_line
from fedhet.engines.ray.inspection import Answer, Listing, Question
from fedhet.runs.units import plural


def faults(
    question: Question, here: Answer, answers: Mapping[str, Answer | str]
) -> dict[str, list[str]]:
    """Return the lines of each machine that has a fault, by its address.

    `here` is the answer of the machine that starts the run. For a machine that has not
    answered, the value is the reason, in words.
    """
    found = {
        address: [one_line(f"{address}: {line}") for line in _lines(question, here, answer)]
        for address, answer in answers.items()
    }
    return {address: lines for address, lines in found.items() if lines}


def _lines(question: Question, here: Answer, there: Answer | str) -> Iterator[str]:
    if isinstance(there, str):
        yield there
        return
    yield from _versions(here, there)
    yield from _directory(question["directory"], there)
    for path in question["data"]:
        yield from _data(path, here["data"][path], there["data"][path])
    if not there["has_device"]:
        yield (
            f"has no device {question['device']}, which the run uses here: give another "
            "'engine.device', or start Ray there with --num-cpus 0, so that it takes no clients"
        )
    for module in there["missing"]:
        if module not in here["missing"]:
            yield (
                f"does not find the module '{module}', which the run imports: install it there, in "
                "the Python that `ray start` runs in"
            )


def _versions(here: Answer, there: Answer) -> Iterator[str]:
    for name, what in (("python", "Python"), ("torch", "PyTorch")):
        theirs, ours = str(there[name]), str(here[name])  # type: ignore[literal-required]
        if theirs != ours:
            yield f"has {what} {theirs or '(none)'}, this machine {ours}"


def _directory(directory: str, there: Answer) -> Iterator[str]:
    if there["read_fault"]:
        yield (
            f"does not see the run's directory {directory} as this machine does "
            f"({there['read_fault']}): give an 'out' in a folder that all machines share"
        )
    elif there["write_fault"]:
        yield f"cannot write into the run's directory {directory} ({there['write_fault']})"


def _data(path: str, here: Listing | None, there: Listing | None) -> Iterator[str]:
    if there == here:
        return
    if there is None:
        yield f"does not see the data {path}"
    elif here is not None and there[:2] == here[:2]:
        yield f"has other data in {path}: the files have other names or sizes than here"
    else:
        mine = _counted(here) if here else "nothing"
        yield f"has other data in {path}: {_counted(there)} there, {mine} here"


def _counted(found: Listing) -> str:
    return f"{plural(found[0], 'file')} of {plural(found[1], 'byte')}"
