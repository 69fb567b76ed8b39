"""Reading libtpu's bundle dumps."""

from pathlib import Path

import pytest

from benchmarks.tpu_bundles import find_dump, read_program

# A loop of three bundles (and four that run after its branch) around a region that may be skipped.
DUMP = """= control target key start
LH: loop header
= control target key end

     0   :  { %s1 = smov 4 }
   0x1 LB: > { %v1 = vld [vmem:[#allocation2_spill]] } /* Start region 5 */
   0x2   : > { %9 = sbr.rel (%p1) target = $region7 }
   0x3   : > {}
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > { %10 = vst [vmem:[#allocation2_spill] sm:$0xff] %v1  ;;  %v3 = vmatpush.msra.mxu0 %v1
 more of the same bundle }
   0x8   : > { %11 = vmatpush.msra.mxu1 %v2 }
   0x9 PF: > { %s2 = sadd.s32 1, %s2 } /* Start/End empty region 7 :: Start region 8 */
   0xa   : > { %12 = sbr.rel (!%p2) target = $region5 }
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   :  { %13 = vsyncpa [#allocation3], 1 }
"""


@pytest.fixture
def program(tmp_path: Path):
    (tmp_path / "1-kernel_a.1-70-schedule-analysis_final_bundles.txt").write_text("not this")
    (tmp_path / "1-kernel_a.1-71-final_bundles.txt").write_text(DUMP)
    return read_program(find_dump(tmp_path, "kernel_a"))


def test_segments_follow_the_branches(program) -> None:
    assert program.num_bundles == 16
    shown = [(s.kind, s.start, s.end, s.depth, s.own) for s in program.segments]
    assert shown == [("kernel", 0, 16, 0, 2), ("loop", 1, 15, 1, 12), ("branch", 7, 9, 2, 2)]


def test_counts_are_weighted_by_runs(program) -> None:
    assert program.executed([1, 10, 4]) == 2 + 120 + 8
    assert program.executed_attribute("spills", [1, 10, 4]) == 4
    assert program.executed_attribute("fills", [1, 10, 4]) == 10
    assert program.executed_attribute("pushes", [1, 10, 4]) == 8


def test_another_structure_is_refused(program) -> None:
    with pytest.raises(ValueError, match="2 run counts were given for a kernel of 3 segments"):
        program.executed([1, 10])


def test_missing_dump_names_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds 0 dumps of kernel_b"):
        find_dump(tmp_path, "kernel_b")


def test_a_gap_in_the_addresses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "k-final_bundles.txt").write_text("   0   : { a }\n   0x2   : { b }\n")
    with pytest.raises(ValueError, match="bundle 0x2 follows bundle 0x0"):
        read_program(tmp_path / "k-final_bundles.txt")
