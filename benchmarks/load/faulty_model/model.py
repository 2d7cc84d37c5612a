"""The served model with faults to order, by the first token of a prompt that has its first row in a
step: the token of DSV41_FAULT_TOKEN (an environment variable) makes the step fail, the token of
DSV41_SLOW_TOKEN makes it take so many seconds longer as the prompt's second token says."""

import os
import time

import numpy as np

from python_backend.executor.torch_executor import TorchExecutor
from python_backend.step_plan import StepPlan, StepResult
from python_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]

FAULT_TOKEN = int(os.environ["DSV41_FAULT_TOKEN"])
SLOW_TOKEN = int(os.environ.get("DSV41_SLOW_TOKEN", "-1"))
run = TorchExecutor.run


def run_as_ordered(self: TorchExecutor, plan: StepPlan) -> StepResult:
    tokens, begins = plan.arrays.tokens, plan.arrays.query_start[:-1]
    begins = begins[plan.arrays.first_position == 0]
    if np.any(tokens[begins] == FAULT_TOKEN):
        raise RuntimeError("a fault was ordered")
    seconds = tokens[begins[tokens[begins] == SLOW_TOKEN] + 1]
    time.sleep(int(seconds.max(initial=0)))
    return run(self, plan)


TorchExecutor.run = run_as_ordered  # type: ignore[method-assign]
