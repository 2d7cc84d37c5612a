"""TensorRT plans of exported segments."""

from builder.plans.backend import BACKENDS, PlanBackend, PlanError, PlanRequest, usable_backend

__all__ = ["BACKENDS", "PlanBackend", "PlanError", "PlanRequest", "usable_backend"]
