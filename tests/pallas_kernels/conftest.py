"""Makes the shared suite importable and its assertions readable; marks slow cases."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("kernel_suite")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A suite's class may run only some cases by default: the others are slow there."""
    for item in items:
        quick = getattr(getattr(item, "cls", None), "quick_cases", None)
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        if quick is not None and case is not None and case not in quick:
            item.add_marker(pytest.mark.slow)
