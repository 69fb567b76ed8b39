"""Lowering whole steps for a GPU that is not there."""

import re

import pytest

from benchmarks import gpu_aot_step
from benchmarks.gpu_check.shapes import model_fields
from engine.device_state import StepShape
from models.hf_config import config_from_fields


@pytest.mark.parametrize("shape", [StepShape(16, 16, True), StepShape(64, 16, False)])
def test_the_whole_step_lowers_for_cuda_without_a_device(shape):
    config = config_from_fields(model_fields("qwen3", rehearse=True), "tiny")
    text = gpu_aot_step.lower_step(config, shape)
    kernels = [line for line in text.splitlines() if "gpu.triton" in line]
    # Write and attend; a mixed step has a kernel for its decode rows and one for the others.
    assert len(kernels) >= (2 if shape.decode else 3)
    assert any("output_operand_alias" in line for line in kernels)
    # Nothing of the CPU's: every custom call is a Triton kernel or one of XLA's own.
    targets = set(re.findall(r"custom_call(?: @|.*call_target_name = \")([\w$.]+)", text))
    assert any("triton" in target for target in targets)
    assert not [target for target in targets if target.startswith("tidegate_")]
