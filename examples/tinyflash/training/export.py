"""Write trained weights as a checkpoint in the released layout.

python -m examples.tinyflash.training.export --weights runs/tinyflash --out checkpoint
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from builder.assemble import check_output, complete_directory
from builder.layout import WeightSpec
from builder.progress import Progress
from builder.write_checkpoint import write_json, write_weights
from engine.config import ModelConfig
from engine.directory import GENERATION_CONFIG_NAME, TOKENIZER_NAME
from examples.tinyflash.tokenizer import TOKENIZER_FILE
from examples.tinyflash.training.initial import initial_weights, model_config
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.pieces import exit_code, load_weights_parts


def export(config: ModelConfig, parameters: Parameters, output: Path, progress: Progress) -> None:
    """A whole checkpoint with the tokenizer; the Engram classes follow from it.

    Written under a temporary name and renamed when complete. Raises ConfigError when the output
    directory is not free.
    """
    check_output(output)
    with complete_directory(output) as partial:
        named = dict(parameters.named_released())

        def values(weight: WeightSpec) -> Iterator[torch.Tensor]:
            yield named[weight.name]

        write_weights(config, partial, values, "released", progress)
        shutil.copyfile(TOKENIZER_FILE, partial / TOKENIZER_NAME)
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(
            partial / GENERATION_CONFIG_NAME, {name: getattr(config, name) for name in special}
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--weights", type=Path, required=True, help="directory of a training run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    return exit_code("export", lambda: _run(options.weights, options.out))


def _run(weights: Path, out: Path) -> None:
    check_output(out)
    trained = load_weights_parts(weights)
    config = model_config()
    parameters = Parameters(config, initial_weights(config, 0), "cpu")
    try:
        parameters.restore(trained)
    except ValueError as error:
        raise ValueError(f"the weights in {weights}: {error}") from None
    export(config, parameters, out, Progress())


if __name__ == "__main__":
    sys.exit(main())
