"""The check of a machine with one NVIDIA GPU; `benchmarks/gpu_check.sh` runs it."""
