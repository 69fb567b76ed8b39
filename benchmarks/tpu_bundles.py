"""Reads the instruction bundles that libtpu dumps for a compiled TPU kernel.

A TPU core issues one bundle per cycle unless it waits for memory, so the bundles a kernel executes
bound its time from below. The dump is text: one line per bundle, with its address, the regions
that start there, and branches to regions by number. A branch back closes a loop, a branch forward
skips a region; four more bundles run after a branch is issued. Every bundle therefore belongs to a
tree of segments, and a kernel executes

    sum over segments of (bundles of the segment's own) x (times the segment runs)

where the second factor comes from the caller.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*(.*)$", re.DOTALL)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel(?: \((!?%p\w+)\))? target = \$region(\d+)")
_DELAY = 4  # bundles that run after a branch is issued
_SPILL = re.compile(r"vst \[vmem:\[#allocation\w*_spill")
_FILL = re.compile(r"vld \[vmem:\[#allocation\w*_spill")


@dataclasses.dataclass(frozen=True)
class Segment:
    """A loop or a skippable region: bundles [start, end).

    Attributes:
      kind: "kernel", "loop" or "branch".
      start, end: addresses.
      depth: number of enclosing segments.
      own: bundles not in an inner segment.
      spills, fills: vector registers spilled and filled among them (scalars are not counted).
      pushes: weight registers pushed into the MXU among them.
    """

    kind: str
    start: int
    end: int
    depth: int
    own: int
    spills: int
    fills: int
    pushes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel's bundles as a tree of segments, in order of address, the whole kernel first."""

    segments: tuple[Segment, ...]

    @property
    def num_bundles(self) -> int:
        return self.segments[0].end

    def executed(self, runs: Sequence[float]) -> float:
        """Bundles executed when segment i runs runs[i] times in all."""
        if len(runs) != len(self.segments):
            raise ValueError(
                f"{len(runs)} run counts were given for a kernel of {len(self.segments)} segments: "
                "the compiled structure is another one than the formula expects"
            )
        return sum(s.own * count for s, count in zip(self.segments, runs))

    def executed_attribute(self, name: str, runs: Sequence[float]) -> float:
        """As `executed`, for another of the segments' counters."""
        return sum(getattr(s, name) * count for s, count in zip(self.segments, runs))

    def describe(self) -> str:
        """One line per segment, for reading a kernel's structure."""
        return "\n".join(
            f"{i:3d} {'  ' * s.depth}{s.kind} {s.start:#x}-{s.end:#x} own {s.own} "
            f"spills {s.spills} fills {s.fills} pushes {s.pushes}"
            for i, s in enumerate(self.segments)
        )


def read_program(path: Path) -> Program:
    """Parses one `*final_bundles.txt`."""
    texts: list[str] = []
    for line in path.read_text().splitlines():
        match = _BUNDLE.match(line)
        if match:
            texts.append(line)
            if int(match[1], 16) != len(texts) - 1:
                raise ValueError(f"{path}: bundle {match[1]} follows bundle {len(texts) - 2:#x}")
        elif texts:
            texts[-1] += "\n" + line
    starts = {int(n): i for i, text in enumerate(texts) for n in _START.findall(text)}
    spans = [("kernel", 0, len(texts))]
    for address, text in enumerate(texts):
        for _, region in _BRANCH.findall(text):
            target = starts[int(region)]
            if target <= address:
                spans.append(("loop", target, min(address + 1 + _DELAY, len(texts))))
            elif target > address + 1 + _DELAY:
                spans.append(("branch", address + 1 + _DELAY, target))
    # A loop's guard against zero trips skips the loop itself.
    loops = {span[1:] for span in spans if span[0] == "loop"}
    spans = [span for span in spans if span[0] != "branch" or span[1:] not in loops]
    spans.sort(key=lambda span: (span[1], -span[2]))
    return Program(_segments(spans, texts))


def _segments(spans: list[tuple[str, int, int]], texts: list[str]) -> tuple[Segment, ...]:
    owner = [0] * len(texts)
    depths: list[int] = []
    open_spans: list[int] = []
    for index, (_, start, end) in enumerate(spans):
        while open_spans and spans[open_spans[-1]][2] <= start:
            open_spans.pop()
        depths.append(len(open_spans))
        open_spans.append(index)
        owner[start:end] = [index] * (end - start)
    segments = []
    for index, (kind, start, end) in enumerate(spans):
        own = [texts[i] for i in range(start, end) if owner[i] == index]
        text = "\n".join(own)
        segments.append(
            Segment(
                kind,
                start,
                end,
                depths[index],
                len(own),
                spills=len(_SPILL.findall(text)),
                fills=len(_FILL.findall(text)),
                pushes=text.count("vmatpush"),
            )
        )
    return tuple(segments)


def find_dump(folder: Path, kernel: str) -> Path:
    """The final bundles of the kernel named `kernel` in a dump folder."""
    found = [p for p in folder.glob(f"*{kernel}*final_bundles.txt") if "schedule" not in p.name]
    if len(found) != 1:
        raise FileNotFoundError(f"{folder} holds {len(found)} dumps of {kernel}, not one")
    return found[0]
