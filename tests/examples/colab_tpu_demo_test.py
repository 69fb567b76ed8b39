"""The Colab notebook runs from its first cell to its plot, here on a CPU and in small."""

import pathlib
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "colab_tpu_demo.ipynb"
SMALL = """MODEL = None
NUM_PROMPTS = 10
OUTPUT_LEN = 40
MAX_NUM_SEQS = 4
MAX_NUM_BATCHED_TOKENS = 32
POOL_SHARE = 0.6
WATERMARK = 0.25"""
CHECK = """
off, on = results[0.0], results[WATERMARK]
expected = sum(p.max_tokens for p in params)
print("CHECK", off["tokens"] == on["tokens"] == expected, off["total"], on["total"],
      max(off["usage"]) > 0.5, len(outputs))
"""


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def _text(cell):
    return "".join(o.get("text", "") for o in cell.get("outputs", []) if o.output_type == "stream")


def test_it_is_stored_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)
    # One cell installs.
    assert sum("pip" in cell.source for cell in code) == 1
    assert [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]


def test_it_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    small = nbformat.from_dict(notebook)
    cells = [cell for cell in small.cells if cell.cell_type == "code"]
    (parameters,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", []))
    defined = set(re.findall(r"^(\w+) =", parameters.source, re.MULTILINE))
    assert defined == set(re.findall(r"^(\w+) =", SMALL, re.MULTILINE))
    parameters.source = SMALL
    # Everything is installed already, so the first cell must not start pip.
    guard = "import subprocess\ndef _refuse(*a, **k): raise AssertionError(f'started {a}')\n"
    cells[0].source = (
        guard + "_run, subprocess.run = subprocess.run, _refuse\n"
        + cells[0].source + "\nsubprocess.run = _run"
    )  # fmt: skip
    check = nbformat.v4.new_code_cell(CHECK)
    small.cells.append(check)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(small, timeout=240, kernel_name="python3", resources=resources)
    client.km = client.create_kernel_manager()
    # The interpreter of this test, whatever a kernel named python3 would be.
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()

    text = _text(check)
    complete, off, on, used, answers = re.search(
        r"CHECK (\w+) (\d+) (\d+) (\w+) (\d+)", text
    ).groups()
    assert (complete, used, answers) == ("True", "True", "4"), text
    assert 0 <= int(on) <= int(off) and int(off) > 0, text
    assert "CPU" in "".join(map(_text, cells))
    plots = [o for cell in cells for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(plots) == 1
