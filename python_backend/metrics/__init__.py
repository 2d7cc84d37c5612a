"""What is measured while serving, and how it reaches the Triton server's /metrics.

The core counts into `scheduler.statistics`; `catalogue` names what is shown; `publisher` shows it.
"""
