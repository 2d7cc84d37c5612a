"""The adapter to TensorRT-LLM: sequences against the reference forward, and what is generated."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from builder.cli import main
from builder.trtllm import sequences
from builder.trtllm.sequences import SequenceNetwork
from engine.directory import Engine
from engine.network import Network
from engine.network.run import ForwardMode, run_forward


@pytest.fixture(scope="module")
def network(released_engine: Path) -> Network:
    engine = Engine.open(released_engine)
    return Network(engine.config, engine.load_weights(torch.float32))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a hundred tokens take several passes, and their windows several pages."""
    monkeypatch.setattr(sequences, "_CHUNK_ROWS", 24)
    monkeypatch.setattr(sequences, "_WINDOW_PAGE_ROWS", 4)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 500, length, dtype=np.int32)


def reference(network: Network, tokens: np.ndarray, num_prompt: int) -> torch.Tensor:
    """Logits of the positions from num_prompt − 1 on; the decoder runs on the prompt's window."""
    window = network.config.sliding_window
    replay = window + len(tokens) - num_prompt
    logits = run_forward(network, tokens, ForwardMode.DECODER_REPLAY, replay_length=replay)
    return logits["logits"][window - 1 :]


def test_requests_in_mixed_steps_equal_the_reference(network: Network) -> None:
    """Prefill beside decode rows, chunked prompts, a freed slot: bit for bit in float32."""
    served = SequenceNetwork(network, num_slots=2, max_seq_len=160)
    a, b, c = prompt(1, 100), prompt(2, 61), prompt(3, 9)
    rows: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "c": []}
    step = served.step([7], [90], [0], a[:90])
    rows["a"].append(step[0])
    step = served.step([9, 7], [50, 1], [0, 90], np.concatenate([b[:50], a[90:91]]))
    rows["b"].append(step[0])
    rows["a"].append(step[1])
    for i in range(1, 10):
        step = served.step([7, 9], [1, 1], [90 + i, 49 + i], np.array([a[90 + i], b[49 + i]]))
        rows["a"].append(step[0])
        rows["b"].append(step[1])
    step = served.step([11], [8], [0], c[:8])  # takes the slot that was used least recently
    rows["c"].append(step[0])
    step = served.step([11], [1], [8], c[8:])
    rows["c"].append(step[0])
    for name, tokens, num_prompt in (("a", a, 90), ("b", b[:59], 50), ("c", c, 8)):
        assert torch.equal(torch.stack(rows[name]), reference(network, tokens, num_prompt)), name


def test_rows_that_do_not_continue(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    served = SequenceNetwork(network, num_slots=2, max_seq_len=64)
    served.step([1], [8], [0], prompt(1, 8))
    with pytest.raises(ValueError, match="request 1: expected its rows from position 8 on, got 9"):
        served.step([1], [1], [9], prompt(1, 1))
    with pytest.raises(ValueError, match="request 1: expected at most 64 tokens, got 65"):
        served.step([1], [57], [8], prompt(1, 57))
    with pytest.raises(ValueError, match="expected distinct requests and 2 tokens"):
        served.step([1, 1], [1, 1], [8, 8], prompt(1, 2))
    logits = served.step([2], [1], [30], prompt(1, 1))  # a warm-up step
    assert logits.shape == (1, network.config.vocab_size)
    assert "request 2 starts at position 30 without its beginning" in caplog.text
    again = served.step([1], [8], [0], prompt(1, 8))  # the same id begins anew
    fresh = SequenceNetwork(network, num_slots=1, max_seq_len=64)
    assert torch.equal(again, fresh.step([5], [8], [0], prompt(1, 8)))


@pytest.fixture(scope="module")
def adapter(released_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trtllm") / "an adapter"
    assert main(["trtllm", "--engine", str(released_engine), "--output_dir", str(output)]) == 0
    return output


def test_generated_files(adapter: Path, released_engine: Path) -> None:
    config = json.loads((adapter / "model" / "config.json").read_text())
    assert config["architectures"] == ["Dsv41TritonForCausalLM"]
    assert config["engine_dir"] == str(released_engine)
    assert (adapter / "model" / "tokenizer.json").is_file()
    version = adapter / "triton" / "tensorrt_llm" / "1"
    settings = yaml.safe_load((version / "model.yaml").read_text())
    assert settings["model"] == str(adapter / "model")
    assert settings["backend"] == "pytorch"
    assert (settings["max_batch_size"], settings["max_seq_len"]) == (4, 512)  # the engine's
    assert settings["kv_cache_config"] == {"enable_block_reuse": False, "max_tokens": 4 * 512}
    assert settings["triton_config"] == {"max_batch_size": 0, "decoupled": True}
    served = yaml.safe_load((adapter / "serve.yaml").read_text())
    assert served.items() <= settings.items()
    assert settings.keys() - served.keys() == {"model", "backend", "triton_config"}
    for path in (adapter / "dsv41_trtllm" / "__init__.py", version / "model.py"):
        compile(path.read_text(), str(path), "exec")
        assert "TensorRT-LLM 1.3" in path.read_text()


def test_import_without_tensorrt_llm_is_one_sentence(adapter: Path) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import dsv41_trtllm"
    argv = [sys.executable, "-c", script, str(adapter)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: expected to be imported by TensorRT-LLM (written for 1.3, PyTorch backend), "
        "and tensorrt_llm is not installed; give this directory to trtllm-serve with "
        "--custom_module_dirs"
    )


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The few names of TensorRT-LLM and transformers that the module uses, as their sources have
    them: this shows that the module is consistent, not that it runs there."""
    registered: dict[str, Any] = {}

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    def register_auto_model(name: str) -> Any:
        def decorate(cls: Any) -> Any:
            registered[name] = cls
            return cls

        return decorate

    for name in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.models"):
        module(name)
    module("tensorrt_llm._torch.models.modeling_utils", register_auto_model=register_auto_model)
    auto = SimpleNamespace(register=registered.__setitem__)
    module("transformers", AutoConfig=auto, PretrainedConfig=SimpleNamespace)
    monkeypatch.delitem(sys.modules, "builder.trtllm.modeling", raising=False)
    yield registered
    sys.modules.pop("builder.trtllm.modeling", None)


def test_registered_model_answers_the_executor(
    adapter: Path, released_engine: Path, stand_ins: dict[str, Any]
) -> None:
    importlib.import_module("builder.trtllm.modeling")
    settings = json.loads((adapter / "model" / "config.json").read_text())
    config = stand_ins["dsv41_triton"](**settings)
    model = stand_ins["Dsv41TritonForCausalLM"](SimpleNamespace(pretrained_config=config))
    assert not model.state_dict()  # nothing that dummy weights could fill
    assert (model.vocab_size_padded, model.infer_max_seq_len()) == (512, 1024)
    model.post_load_weights()
    tokens = prompt(4, 40)
    metadata = SimpleNamespace(
        seq_lens=torch.tensor([40], dtype=torch.int32),
        request_ids=[2048],
        kv_cache_params=SimpleNamespace(num_cached_tokens_per_seq=[0]),
    )
    padded = torch.cat([torch.from_numpy(tokens), torch.zeros(8, dtype=torch.int32)])
    logits = model.forward(metadata, input_ids=padded, position_ids=torch.arange(48)[None])
    engine = Engine.open(released_engine)
    network = Network(engine.config, engine.load_weights(torch.bfloat16))
    assert torch.equal(logits, reference(network, tokens, 40))
    with pytest.raises(ValueError, match="expected requests without context logits"):
        model.forward(metadata, input_ids=padded, return_context_logits=True)
    with pytest.raises(ValueError, match="expected input_ids, got embeddings"):
        model.forward(metadata, inputs_embeds=torch.zeros(40, 64))


def test_engines_that_cannot_be_adapted(
    released_dir: Path,
    golden_engine: Path,
    adapter: Path,
    released_engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = tmp_path / "two"
    assert main(["engine", "--checkpoint_dir", str(released_dir), "--output_dir", str(two),
                 "--tp_size", "2"]) == 0  # fmt: skip
    for engine, output, said in (
        (two, tmp_path / "out", "expected one rank, got 2"),
        (golden_engine, tmp_path / "out", "has no tokenizer"),
        (released_engine, adapter, "already exists and is not empty"),
    ):
        capsys.readouterr()
        assert main(["trtllm", "--engine", str(engine), "--output_dir", str(output)]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
