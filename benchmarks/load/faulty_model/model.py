"""The served model with a fault to order: a step fails when a prompt that begins with the token of
the parameter DSV41_FAULT_TOKEN (an environment variable) has its first row in it."""

import os

import numpy as np

from python_backend.executor.torch_executor import TorchExecutor
from python_backend.step_plan import StepPlan, StepResult
from python_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

FAULT_TOKEN = int(os.environ["DSV41_FAULT_TOKEN"])
run = TorchExecutor.run


def run_or_fail(self: TorchExecutor, plan: StepPlan) -> StepResult:
    first = plan.arrays.tokens[plan.arrays.query_start[:-1]]
    if np.any((first == FAULT_TOKEN) & (plan.arrays.first_position == 0)):
        raise RuntimeError("a fault was ordered")
    return run(self, plan)


TorchExecutor.run = run_or_fail  # type: ignore[method-assign]
