#!/usr/bin/env bash
# One prepared check for a machine with one NVIDIA GPU: correctness, attention against the
# roofline, serving, peers, watermark. Nothing is installed and nothing is downloaded.
#
#   benchmarks/gpu_check.sh [--out DIR] [--budget_s 360] [--sections a,b] [--rehearse]
#
# PYTHON names the interpreter (default python3).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
