"""results.json as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# (section, path into its results, goal, words)
GOALS = (
    ("attention", ("decode_bfloat16", "share_of_copy"), 0.85, "decode attention / copy bandwidth"),
    ("attention", ("prefill", "share_of_matmul"), 0.60, "prefill attention / matmul rate"),
    (
        "serve_llama3_8b",
        ("concurrency_128", "share_of_roofline"),
        0.75,
        "engine decode step / its roofline, 128 rows, Llama-3.1-8B",
    ),
    (
        "serve_qwen3_0.6b",
        ("concurrency_128", "share_of_roofline"),
        0.75,
        "engine decode step / its roofline, 128 rows, Qwen3-0.6B",
    ),
)


def write_report(results: dict[str, Any], path: Path) -> None:
    """Rewrites the report from everything measured so far."""
    sections = results["sections"]
    lines = ["# GPU check", ""]
    if results["rehearsal"]:
        lines += ["A rehearsal on the CPU with tiny shapes: the figures mean nothing.", ""]
    lines += [f"Budget {results['budget_s']:g} s, used {results.get('elapsed_s', 0)} s.", ""]
    lines += ["| goal | wanted | measured |", "|---|---|---|"]
    for section, keys, goal, words in GOALS:
        value: Any = sections.get(section, {}).get("results", {})
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        shown = "not measured" if value is None else f"{value:.3f}"
        lines.append(f"| {words} | {goal:.2f} | {shown} |")
    lines += ["", "| section | status | s |", "|---|---|---|"]
    for name, section in sections.items():
        lines.append(f"| {name} | {section['status']} | {section.get('seconds', 0)} |")
    for name, section in sections.items():
        found = section.get("results") or {}
        if found:
            lines += ["", f"## {name}", ""]
            lines += _tables(found)
    path.write_text("\n".join(lines) + "\n")


def _tables(found: dict[str, Any]) -> list[str]:
    """Plain figures as a list, then the records with the same keys as tables."""
    lines = []
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, value in found.items():
        if isinstance(value, dict) and value:
            groups.setdefault(tuple(value), []).append(key)
        elif isinstance(value, list):
            lines += [f"- {key}:", *[f"  - {item}" for item in value]]
        else:
            lines.append(f"- {key}: {value}")
    for columns, keys in groups.items():
        lines += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for key in keys:
            lines.append(f"| {key} | " + " | ".join(str(found[key][c]) for c in columns) + " |")
    return lines
