"""The model repository of one server: the one in the source tree with parameters filled in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from python_backend.host.errors import HostError

MODEL_NAME = "deepseek_v41"
_SOURCE = Path(__file__).parents[2] / "model_repository" / MODEL_NAME


def write_repository(folder: Path, parameters: Mapping[str, str]) -> None:
    """Make `folder` a repository of the one model, with these parameters in its config.pbtxt.

    Raises HostError where the source tree's model repository is not beside this package.
    """
    try:
        config = text_format.Parse(
            (_SOURCE / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
        )
    except OSError:
        raise HostError(
            f"expected the model repository at {_SOURCE.parent}, found none; install this project "
            "from its source tree (pip install -e .)"
        ) from None
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    version = folder / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version / "model.py").symlink_to(_SOURCE / "1" / "model.py")
    text = text_format.MessageToString(config, as_utf8=True)
    (folder / MODEL_NAME / "config.pbtxt").write_text(text, encoding="utf-8")
