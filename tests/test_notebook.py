"""The example notebook, run in a kernel, must produce its stored outputs.

`make notebook` stores the outputs of a run.
"""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebook'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
pytest.importorskip("ipykernel", reason="needs the extra 'notebook'")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "fedhet.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def stored():
    return nbformat.read(NOTEBOOK, as_version=4)


def executed(folder):
    """Return the notebook after a run, without outputs about this machine."""
    notebook = stored()
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def shown(notebook):
    """Return each code cell's outputs as text."""
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [
        [each.get("text") or each["data"]["text/plain"] for each in c.outputs] for c in codes
    ]
    return ["\n".join(texts) for texts in outputs]


@pytest.mark.slow
def test_notebook_outputs_are_current(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before, after = shown(stored()), shown(executed(tmp_path))
    for kept, found in zip(before, after, strict=True):
        words = [" ".join(NUMBER.sub("#", text).split()) for text in (kept, found)]
        assert words[0] == words[1]
        numbers = [[float(each) for each in NUMBER.findall(text)] for text in (kept, found)]
        assert numbers[1] == pytest.approx(numbers[0], rel=0.02, abs=0.1)


def test_notebook_is_complete_and_contains_no_paths():
    text = NOTEBOOK.read_text()
    assert not re.search(r"/(tmp|home|root|work|Users|private|var)/", text)
    codes = [cell for cell in stored().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1))
    assert sum(bool(cell.outputs) for cell in codes) == len(codes) - 1  # all but the imports


def test_predictions_of_the_notebook_are_correct():
    (images,) = (text for text in shown(stored()) if text.startswith("(['0'"))
    assert images.startswith("(['0', '1', '2', '3', '4'], 0.")
    assert float(images.rstrip(")").rpartition(" ")[2]) > 0.8
    (pairs,) = (text for text in shown(stored()) if text.startswith("[("))
    assert all(a == b for a, b in re.findall(r"\('(\w+)', '(\w+)'\)", pairs))


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK.parent), NOTEBOOK)
