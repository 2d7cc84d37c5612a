"""What the real server's /metrics says about requests whose numbers are known beforehand."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric

from python_backend.metrics.catalogue import catalogue
from tests.server.deployment import GOLDEN, PROMPT, ROOT, Deployment, RefusedError

pytestmark = pytest.mark.server

PAGE = 32
PROMPT_OF_68: list[int] = (GOLDEN["tokens"].tolist() * 4)[:68]
# The edges of vLLM's histograms (vllm/v1/metrics/loggers.py); those of phases are this project's.
REQUEST_EDGES = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
]
PER_TOKEN_EDGES = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
]
TOKENS_UP_TO_1024: list[float] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
EDGES: dict[str, list[float]] = {
    "time_to_first_token_seconds": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ],
    "inter_token_latency_seconds": PER_TOKEN_EDGES,
    "request_time_per_output_token_seconds": PER_TOKEN_EDGES,
    "request_queue_time_seconds": REQUEST_EDGES,
    "request_prefill_time_seconds": REQUEST_EDGES,
    "request_decode_time_seconds": REQUEST_EDGES,
    "request_inference_time_seconds": REQUEST_EDGES,
    "e2e_request_latency_seconds": REQUEST_EDGES,
    "request_prompt_tokens": TOKENS_UP_TO_1024,
    "request_generation_tokens": TOKENS_UP_TO_1024,
    "step_rows": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "step_seconds": [
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
        *(2.5, 5.0, 10.0),
    ],
}


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Deployment]:
    deployment = Deployment(
        engine,
        *("--global-page-tokens=32", "--max-batch-size=1", "--max-num-tokens=512"),
        *("--speculative", "--speculative-threshold=0"),
    )
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def values(families: dict[str, Metric]) -> dict[str, float]:
    """Every sample of ours by name and labels, the buckets aside."""
    return {
        " ".join([sample.name.removeprefix("dsv41_"), *sample.labels.values()]): sample.value
        for family in families.values()
        if family.name.startswith("dsv41_")
        for sample in family.samples
        if "le" not in sample.labels
    }


def settled(server: Deployment, ended: float) -> dict[str, float]:
    """The values once `ended` requests have ended and two rounds of publishing have passed."""
    deadline = time.monotonic() + 10
    while server.metric("dsv41_request_success_total") < ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.25)
    return values(server.families())


def test_every_number_of_a_known_load(server: Deployment) -> None:
    """Two requests of 68 prompt tokens with equal beginnings, one after the other, then a
    cancelled one, one that is refused and one that its own server can never hold."""
    before = settled(server, 2)  # the core's own token at start, and the launcher's
    asked = {"input_ids": PROMPT_OF_68, "end_id": -1, "speculative": False}
    server.generate(**asked, max_tokens=5)
    (again,) = list(server.stream(**asked, max_tokens=5))
    assert again["cached_tokens"] == [64]  # floor(67 / 32) · 32
    stream = server.stream(**asked, max_tokens=900, stream=True)
    next(iter(stream))
    stream.cancel()
    with pytest.raises(RefusedError):
        server.generate(input_ids=PROMPT, max_tokens=0)
    assert server.seconds_until_empty(10) < 10
    after = settled(server, before_ended(before) + 3)
    more = {name: value - before[name] for name, value in after.items()}

    assert {name: more[f"request_success_total {name}"] for name in ("length", "cancelled")} == {
        "length": 2,
        "cancelled": 1,
    }
    assert more["request_success_total stop"] == more["request_success_total error"] == 0
    assert more["admission_rejections_total invalid_argument"] == 1
    assert more["prompt_tokens_total"] == more["prefix_cache_queries_total"] == 3 * 68
    assert more["prefix_cache_hits_total"] == more["prompt_tokens_cached_total"] == 2 * 64
    # One window of 8 after each of two hits.
    assert more["replayed_rows_total"] == 16
    # A cold prompt of 68 runs 8 rows through the decoder, the others start at row 56 and run 8.
    assert more["trimmed_rows_total"] == 60 + 2 * 4
    assert more["dropped_short_hits_total"] == more["num_preemptions_total"] == 0
    assert more["failed_steps_total"] == 0

    answered = "e2e_request_latency_seconds", "request_queue_time_seconds"
    for name in (*answered, "request_decode_time_seconds", "request_inference_time_seconds"):
        assert more[f"{name}_count"] == 2, name
    assert more["request_time_per_output_token_seconds_count"] == 2
    assert more["request_prompt_tokens_count"] == 2
    assert more["request_prompt_tokens_sum"] == 2 * 68
    assert more["request_generation_tokens_sum"] == 10
    assert more["time_to_first_token_seconds_count"] == 3
    # Each token but a request's first came some time after another.
    assert more["inter_token_latency_seconds_count"] == more["generation_tokens_total"] - 3
    parts = sum(more[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
    assert more["e2e_request_latency_seconds_sum"] == pytest.approx(parts)
    assert more["step_rows_sum"] == more["rows_total"]
    assert more["step_rows_count"] == more["steps_total"]
    for phase in ("schedule", "execute", "commit", "deliver", "forward", "engram", "sample"):
        assert more[f"step_seconds_count {phase}"] == more["steps_total"], phase
    inside = sum(more[f"step_seconds_sum {phase}"] for phase in ("forward", "sample", "draft"))
    assert 0 < inside < more["step_seconds_sum execute"]
    assert 0 < more["step_seconds_sum engram"] < more["step_seconds_sum forward"]
    # Two Engram layers of TINY, with 2-grams and 3-grams and their heads.
    assert more["engram_rows_total"] % more["rows_total"] == 0
    for pool in ("global", "window"):
        assert after[f"kv_pages_used {pool}"] == after[f"kv_cache_usage_perc {pool}"] == 0
    assert after["prefix_cache_pages"] - before["prefix_cache_pages"] >= 2


def before_ended(values: dict[str, float]) -> float:
    return sum(value for name, value in values.items() if name.startswith("request_success_total"))


def test_acceptance_by_position_adds_up(server: Deployment) -> None:
    before = settled(server, 1)
    server.generate(input_ids=PROMPT, max_tokens=24, end_id=-1)
    after = settled(server, before_ended(before) + 1)
    more = {
        name.removeprefix("spec_decode_num_"): value - before[name]
        for name, value in after.items()
        if name.startswith("spec_decode")
    }
    for kind in ("draft", "accepted"):
        by_position = [v for n, v in sorted(more.items()) if n.startswith(f"{kind}_tokens_per_pos")]
        assert sum(by_position) == more[f"{kind}_tokens_total"]
        assert by_position == sorted(by_position, reverse=True)
    assert more["draft_tokens_per_pos_total 0"] == more["drafts_total"] > 0
    # A step makes one token and those that it accepted; the first comes from the prompt.
    steps = after["steps_total"] - before["steps_total"]
    assert steps + more["accepted_tokens_total"] == 24


def test_everything_of_the_catalogue_is_there_with_its_kind_and_edges(server: Deployment) -> None:
    settled(server, 1)
    families = server.families()
    for family in catalogue(speculative=True):
        shown = families[family.name.removesuffix("_total")]
        assert shown.type == family.kind, family.name
        assert shown.documentation == family.description
    edges: dict[str, dict[str, list[float]]] = {}
    for name, family in families.items():
        if family.type != "histogram" or not name.startswith("dsv41_"):
            continue
        by_phase = edges.setdefault(name.removeprefix("dsv41_"), {})
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                phase = sample.labels.get("phase", "")
                by_phase.setdefault(phase, []).append(float(sample.labels["le"]))
    assert edges.keys() == EDGES.keys()
    for name, by_phase in edges.items():
        assert by_phase
        assert all(each == [*EDGES[name], math.inf] for each in by_phase.values()), name


def test_every_metric_of_the_dashboard_exists(server: Deployment) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    asked = {name for query in queries for name in re.findall(r"dsv41_\w+", query)}
    shown = {sample.name for family in server.families().values() for sample in family.samples}
    assert len(queries) > 40
    assert asked <= shown
    summed = {name for query in queries for name in re.findall(r"^sum\b[^/]*?(dsv41_\w+)", query)}
    assert not {name for name in summed if name.endswith("_perc")}, "shares do not add up"


def test_the_compose_file_mounts_what_is_there() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert len(mounted) == 3
    assert all((ROOT / path).exists() for path in mounted)
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]]
    assert targets == [["server:8002"], ["openai:8080"]]


def test_the_queue_says_what_it_waits_for(server: Deployment) -> None:
    asked = {"input_ids": PROMPT, "max_tokens": 900, "end_id": -1, "stream": True}
    first = server.stream(**asked)
    next(iter(first))
    second = server.stream(**asked)
    deadline = time.monotonic() + 10
    while server.metric("dsv41_num_requests_waiting") < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.metric("dsv41_num_requests_running") == 1
    assert server.metric("dsv41_num_requests_waiting_by_reason", reason="slots") == 1
    first.cancel()
    second.cancel()
    assert server.seconds_until_empty(5) < 5
    time.sleep(0.25)
    assert server.metric("dsv41_num_requests_waiting_by_reason") == 0
