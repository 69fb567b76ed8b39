"""Who may import whom, and what importing a package costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = {"engine", "models", "pallas_kernels", "scheduler", "benchmarks", "examples", "run_server"}
MAY_IMPORT = {
    "scheduler": {"scheduler"},
    "pallas_kernels": {"pallas_kernels"},
    "models": {"models", "pallas_kernels"},
    "engine": {"engine", "models", "pallas_kernels", "scheduler"},
}
THIRD_PARTY = {
    "scheduler": {"numpy"},
    "pallas_kernels": {"jax", "jaxtyping", "ml_dtypes", "numpy"},  # all of them come with jax
}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_arrows_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in _imports(path):
            if name in OURS:
                assert name in MAY_IMPORT[package], f"{path} imports {name}"


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_third_party_imports(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in _imports(path):
            known = name in OURS | THIRD_PARTY[package] | set(sys.stdlib_module_names)
            assert known, f"{path} imports {name}"


@pytest.mark.parametrize("package", [*MAY_IMPORT, "run_server"])
def test_no_torch_at_run_time(package):
    files = [ROOT / "run_server.py"] if package == "run_server" else (ROOT / package).rglob("*.py")
    for path in files:
        assert "torch" not in set(_imports(path)), path


@pytest.mark.parametrize("module", ["scheduler", "scheduler.simulator", "engine.config"])
def test_importing_loads_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_flags_live_in_scripts_only():
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            assert "absl" not in set(_imports(path)), f"{path} imports absl"
