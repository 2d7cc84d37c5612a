"""The client against the deployment itself: the golden TINY engine behind the real server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from client import DeploymentError, FinishReason, GenerateRequest, GrpcClient, HttpClient
from client.perf import DEFAULT_ENVIRONMENT, Workload, find_perf_analyzer, measure
from tests.client.real_server import ROOT, Server, running

pytestmark = pytest.mark.server

Client = GrpcClient | HttpClient
TINY = ROOT / "tests" / "vectors" / "tiny"
GOLDEN = load_file(TINY / "golden_quant.safetensors")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As a plain Triton model. Hits come in steps of 32 tokens, so the golden prompt of 20 has none
    and its answer is the cold one whatever ran before."""
    folder = tmp_path_factory.mktemp("deployment")
    engine, repository = folder / "engine", folder / "repository"
    build = [sys.executable, "-m", "builder.cli", "engine", "--checkpoint_dir", str(TINY)]
    build += ["--output_dir", str(engine), "--token_class", str(TINY / "golden_quant.safetensors")]
    subprocess.run(build, check=True, cwd=ROOT)
    shutil.copytree(ROOT / "model_repository", repository)
    parameters = {"engine_dir": str(engine), "dtype": "float64", "global_page_tokens": "32"}
    entries = [
        f'{{ key: "{name}" value: {{ string_value: "{value}" }} }}'
        for name, value in parameters.items()
    ]
    config = repository / "deepseek_v41" / "config.pbtxt"
    filled, count = re.subn(
        r"parameters \[.*?\n\]",
        f"parameters [ {', '.join(entries)} ]",
        config.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1
    config.write_text(filled)
    with running(folder, repository) as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, deployment: Server) -> Client:
    if request.param == "grpc":
        return GrpcClient(deployment.grpc)
    return HttpClient(deployment.http)


def golden_request() -> GenerateRequest:
    """`greedy_from_20_replay`: the first 20 golden tokens, continued greedily without an end."""
    prompt: npt.NDArray[np.int32] = GOLDEN["tokens"][:20].astype(np.int32)
    return GenerateRequest(input_ids=prompt, max_tokens=24, temperature=0.0, end_id=-1)


def test_golden_tokens_streamed_and_whole(client: Client) -> None:
    expected = GOLDEN["greedy_from_20_replay"].tolist()
    chunks = list(client.stream(golden_request()))
    assert [i for chunk in chunks for i in chunk.output_ids.tolist()] == expected
    whole = client.generate(golden_request())
    assert whole.output_ids.tolist() == expected
    assert whole.finish_reason is FinishReason.LENGTH
    assert (whole.num_input_tokens, whole.num_output_tokens) == (20, 24)


def test_a_repeated_prompt_reports_its_cached_tokens(client: Client) -> None:
    """61 tokens, of which one whole page of 32 is found again."""
    request = GenerateRequest(input_ids=GOLDEN["tokens"], max_tokens=2, temperature=0.0)
    client.generate(request)
    assert next(client.stream(request)).cached_tokens == 32


def test_end_token_stops(client: Client) -> None:
    """The third golden token, taken as the end token."""
    prompt = GOLDEN["tokens"][:20].astype(np.int32)
    third = int(GOLDEN["greedy_from_20_replay"][2])
    request = GenerateRequest(input_ids=prompt, max_tokens=24, temperature=0.0, end_id=third)
    result = client.stream(request).result()
    assert (result.finish_reason, result.output_ids.size) == (FinishReason.STOP, 3)


def test_cancel_frees_every_page_within_a_second(client: Client, deployment: Server) -> None:
    prompt = GOLDEN["tokens"].astype(np.int32)
    with client.stream(GenerateRequest(input_ids=prompt, max_tokens=400, end_id=-1)) as stream:
        next(stream)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        held = ("num_requests_running", "num_requests_waiting", "kv_pages_used")
        if not any(deployment.metric(f"dsv41_{name}") for name in held):
            return
        time.sleep(0.05)
    pytest.fail("a cancelled request still held pages after one second")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerateRequest(input_ids=[512]), "512"),
        (GenerateRequest(input_ids=[]), "prompt"),
        (GenerateRequest(input_ids=[5], max_tokens=0), "max_tokens"),
        (GenerateRequest(input_ids=[5], max_tokens=10_000_000), "max_tokens"),
        (GenerateRequest(input_ids=[5], temperature=float("nan")), "temperature"),
        (GenerateRequest(input_ids=[5], temperature=-1.0), "temperature"),
        (GenerateRequest(input_ids=[5], top_p=2.0), "top_p"),
        (GenerateRequest(input_ids=[5], top_k=-3), "top_k"),
        (GenerateRequest(text_input="a"), "tokenizer"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    client: Client, request_: GenerateRequest, words: str
) -> None:
    with pytest.raises(DeploymentError, match=words) as caught:
        client.generate(request_)
    assert caught.value.code == "invalid_argument"
    assert client.health(deep=True).ok


def test_perf_sees_the_prefix_cache(deployment: Server) -> None:
    """Prompts of 60 tokens that share 40: one whole page of 32, which the warm-up cached."""
    try:
        find_perf_analyzer(DEFAULT_ENVIRONMENT, print)
    except DeploymentError as error:
        pytest.skip(error.message)
    workload = Workload(input_tokens=60, output_tokens=8, shared_prefix=40, vocab_size=512, seed=1)
    with GrpcClient(deployment.grpc) as client:
        (level,) = measure(client, workload, [2], requests=6, progress=print)
    assert (level.requests, level.input_tokens, level.cached_tokens) == (6, 60.0, 32.0)
    assert level.output_tokens_per_second / level.requests_per_second == pytest.approx(8.0)
