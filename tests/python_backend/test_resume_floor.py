"""A preempted request resumes with the decoder floor of its ORIGINAL prompt, not of all it knows:
otherwise its next tokens would depend on when it was preempted."""

from __future__ import annotations

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.settings import CoreLimits
from python_backend.step_plan import StepPlan, StepResult
from tests.python_backend.serving import Stream, limits, serve, tokens


class Watching(SimulatedExecutor):
    """Notes the decoder floor and the end of the rows wherever a life begins."""

    def __init__(self, bounds: CoreLimits) -> None:
        super().__init__(bounds)
        self.begun: list[tuple[int, int]] = []

    def run(self, plan: StepPlan) -> StepResult:
        arrays = plan.arrays
        ends = arrays.first_position + arrays.query_start[1:] - arrays.query_start[:-1]
        for floor, end in zip(arrays.decoder_floor[plan.fresh], ends[plan.fresh], strict=True):
            self.begun.append((int(floor), int(end)))
        return super().run(plan)


def test_resume_keeps_the_decoder_floor_of_the_prompt() -> None:
    """Prompts of 40 tokens and a window of 8: the floor is 32 in every life. Each request grows to
    79 rows, 5 pages of 16; two of them cannot stay in 8 pages."""
    bounds = limits(
        prefix_cache=False, max_batch_size=2, max_num_tokens=128, num_global_pages=1 + 8
    )
    executor = Watching(bounds)
    core = EngineCore(executor, bounds)
    serve(core, *(Stream(f"r{i}", tokens(i, 40), 40) for i in range(2)))
    assert core.statistics().num_preemptions >= 1
    floors, ends = zip(*executor.begun, strict=True)
    assert set(floors) == {32}
    assert max(ends) > 40, "nobody resumed with outputs"
