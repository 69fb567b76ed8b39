"""Engines that `benchmarks.throughput` runs side by side, each in a process and venv of its own.

The modules of this folder are imported by the interpreters of several environments: at their top
they import only the standard library and each other.
"""
