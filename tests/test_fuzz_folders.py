"""Damaged files of a run and of a client's state, read through the commands."""

from __future__ import annotations

import os

from benchmarks import fuzz_folders


def test_damaged_directory_raises_one_line(tmp_path):
    """`make fuzz` tries a hundred thousand."""
    count = int(os.environ.get("FEDHET_FUZZ_FOLDERS", "30"))
    found = fuzz_folders.tried(tmp_path / "fuzz", count)
    assert not found, (tmp_path / "fuzz" / "found.jsonl").read_text()
    assert (tmp_path / "fuzz" / "done").read_text() == str(count)
