"""lm-evaluation-harness as a client of the OpenAI API: its answers and its log-likelihoods are
those that the API gives directly. It wants a newer NumPy than the server, so it comes as a command
on the path, of an environment of its own (pip install "lm_eval[api]" transformers)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from builder.cli import main as build
from tests.client.openai_proxy import MODEL, serving
from tests.server.deployment import ROOT, Deployment

CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
QUESTIONS = (
    "Sara saved 84 dollars. Later Cyrus paid her 56 dollars. Then she spent 107 dollars on a coat. "
    "Find the number of dollars at the end.",
    "Tom has 3 apples and buys 4 more. How many has he?",
)
CHOICES = (" 1", " 12 dollars", "!")

LM_EVAL = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(LM_EVAL is None, reason="needs the command lm_eval"),
]

SPOKEN = """
task: spoken
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: [], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CHOSEN = """
task: chosen
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = tmp_path_factory.mktemp("tinyflash") / "engine"
    assert build(["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}"]) == 0
    deployment = Deployment(engine)
    try:
        deployment.wait_until_ready()
        with serving(f"127.0.0.1:{deployment.grpc}") as started:
            yield started
    finally:
        deployment.end()


@pytest.fixture
def api(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client:
        yield client


def evaluated(
    folder: Path, task: str, definition: str, rows: list[dict[str, Any]], *options: str
) -> list[Any]:
    """What the harness logged of each question, in their order."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{task}.yaml").write_text(definition.replace("DATA", str(data)))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(str(LM_EVAL), "--tasks", task, "--include_path", str(folder)),
            *("--output_path", str(folder / "out"), "--log_samples", "--batch_size", "1", *options),
        ],
        env=environment | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    (log,) = (folder / "out").rglob("samples_*.jsonl")
    return sorted(map(json.loads, log.read_text().splitlines()), key=lambda made: made["doc_id"])


def test_answers_of_a_chat(api: openai.OpenAI, address: str, tmp_path: Path) -> None:
    def said(question: str) -> str:
        asked: Any = [{"role": "user", "content": question}]
        made = api.chat.completions.create(model=MODEL, messages=asked, max_tokens=24)
        return str(made.choices[0].message.content)

    rows = [{"question": question, "said": said(question)} for question in QUESTIONS]
    made = evaluated(
        tmp_path, "spoken", SPOKEN, rows,
        *("--model", "local-chat-completions", "--apply_chat_template", "--model_args"),
        f"model={MODEL},base_url=http://{address}/v1/chat/completions,num_concurrent=2",
    )  # fmt: skip
    assert [sample["resps"] for sample in made] == [[[row["said"]]] for row in rows]
    assert [sample["exact_match"] for sample in made] == [1.0, 1.0]


def test_log_likelihoods_of_choices(api: openai.OpenAI, address: str, tmp_path: Path) -> None:
    """Prompts as token ids; the sums over a choice's tokens are those of an echo."""
    saved = tmp_path / "tokenizer"
    saved.mkdir()
    shutil.copy(CHECKPOINT / "tokenizer.json", saved)
    (saved / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    rows = [{"question": question, "choices": list(CHOICES)} for question in QUESTIONS]
    made = evaluated(
        tmp_path, "chosen", CHOSEN, rows,
        *("--model", "local-completions", "--model_args"),
        f"model={MODEL},base_url=http://{address}/v1/completions,tokenizer_backend=huggingface,"
        f"tokenizer={saved},tokenized_requests=True",
    )  # fmt: skip
    for question, sample in zip(QUESTIONS, made, strict=True):
        before = tokenizer.encode(question, add_special_tokens=False).ids
        for choice, ((found, is_greedy),) in zip(CHOICES, sample["resps"], strict=True):
            ids = tokenizer.encode(question + choice, add_special_tokens=False).ids
            probs = api.completions.create(
                model=MODEL, prompt=ids, max_tokens=1, echo=True, logprobs=1
            ).choices[0].logprobs  # fmt: skip
            own = probs.token_logprobs[len(before) : len(ids)]
            assert float(found) == pytest.approx(sum(own), abs=1e-3)
            assert str(is_greedy) == "False"
