"""Which weight goes to which format: recipes by tensor class, with exceptions by name.

A recipe is YAML: one line `class: format` for each of CLASSES that changes, and under `tensors`
patterns of names, of which the last that matches decides. A class that is not named keeps its
source format. Formats: nvfp4, nvfp4-w4a4 (the same, and the scales of NVFP4 inputs, which need
calibration), mxfp8, released (FP8 and FP4 as the model was released), source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from builder.layout import Requantized, WeightSpec
from engine.config import ConfigError

Target = Literal["nvfp4", "nvfp4-w4a4", "mxfp8", "released", "source"]
Unfit = Literal["keep", "refuse"]

NAMED_RECIPES = ("nvfp4", "nvfp4-w4a4", "mxfp8", "nvfp4-experts", "as-released")
CLASSES = (
    "experts",
    "shared_experts",
    "linears",
    "wo_a",
    "indexer",
    "drafter",
    "engram_rows",
)
# Inputs of a row that share a scale.
_GROUPS = {"nvfp4": 16, "nvfp4-w4a4": 16, "mxfp8": 32, "released": 32}
# Classes whose inputs can be calibrated: wo_a takes unrounded inputs, a table is looked up, and a
# drafter's inputs depend on what it drafts.
_CALIBRATED = ("experts", "shared_experts", "linears", "indexer")


def stored_format(target: Target) -> Requantized | None:
    """ModelOpt's layout of a weight with this target, None where it has none."""
    if target == "nvfp4-w4a4":
        return "nvfp4"
    return target if target == "nvfp4" or target == "mxfp8" else None


def weight_class(weight: WeightSpec) -> str | None:
    """One of CLASSES, None for what stays: norms, gates, mixes, sinks, embedding, head."""
    if weight.storage in ("bf16", "f32"):
        return None
    if weight.storage == "fp8_rows":
        return "engram_rows"
    if weight.name.startswith("mtp."):
        return "drafter"
    if weight.storage == "fp4":
        return "experts"
    for part, title in ((".shared_experts.", "shared_experts"), (".wo_a.", "wo_a")):
        if part in weight.name:
            return title
    return "indexer" if ".indexer." in weight.name else "linears"


@dataclass(frozen=True)
class Recipe:
    classes: Mapping[str, Target]
    tensors: Mapping[str, Target]
    origin: str

    @staticmethod
    def named(name: str) -> Recipe:
        """One of NAMED_RECIPES."""
        return _parse(
            (files("builder.quantization") / "recipes" / f"{name}.yaml").read_text(), name
        )

    @staticmethod
    def read(path: Path) -> Recipe:
        """A user's file. Raises ConfigError naming the key or the format that is unknown."""
        if not path.is_file():
            raise ConfigError(f"recipe: expected a YAML file at {path}, found none")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"recipe {path} is not UTF-8 text: {error}; convert it") from None
        return _parse(text, str(path))

    def over(self, base: Recipe) -> Recipe:
        """`base` with the lines of this recipe in the place of its own."""
        return Recipe(
            {**base.classes, **self.classes}, {**base.tensors, **self.tensors}, self.origin
        )

    def check_matches(self, weights: Iterable[WeightSpec]) -> None:
        """Raise ConfigError naming a class or a pattern that no quantisable weight belongs to."""
        names = {weight.name: weight_class(weight) for weight in weights}
        for title in self.classes:
            if title not in names.values():
                raise ConfigError(
                    f"recipe {self.origin}: this checkpoint has no weights of class {title}; "
                    "remove the line"
                )
        for pattern in self.tensors:
            found = [name for name in names if fnmatchcase(name, pattern)]
            if not found:
                raise ConfigError(
                    f"recipe {self.origin}: no tensor matches {pattern}; correct the pattern or "
                    "remove the line"
                )
            if all(names[name] is None for name in found):
                raise ConfigError(
                    f"recipe {self.origin}: {pattern} matches only {found[0]} and the like, which "
                    "stay as they are (norms, gates, mixes, sinks, embedding, head); remove the "
                    "line"
                )

    def targets(
        self, weights: Iterable[WeightSpec], unfit: Unfit
    ) -> tuple[dict[str, Target], list[str]]:
        """The format of every weight by name, and a warning for each that could not have its own.

        A row that is not whole groups keeps its source format, or raises ConfigError naming the
        tensor when `unfit` is "refuse".
        """
        targets: dict[str, Target] = {}
        warnings: list[str] = []
        for weight in weights:
            target = self._target(weight)
            group = _GROUPS.get(target, 1)
            if weight.shape[-1] % group:
                reason = (
                    f"{weight.name}: {target} takes rows of a multiple of {group} values, got "
                    f"{weight.shape[-1]}"
                )
                if unfit == "refuse":
                    raise ConfigError(f"{reason}; give it the format source in a recipe")
                warnings.append(f"{reason}; kept at its source precision")
                target = "source"
            if target == "nvfp4-w4a4" and weight_class(weight) not in _CALIBRATED:
                raise ConfigError(
                    f"recipe {self.origin}: {weight.name} cannot be nvfp4-w4a4, which is for "
                    f"{', '.join(_CALIBRATED)}; give it the format nvfp4"
                )
            targets[weight.name] = target
        return targets, warnings

    def _target(self, weight: WeightSpec) -> Target:
        title = weight_class(weight)
        if title is None:
            return "source"
        target = self.classes.get(title, "source")
        for pattern, other in self.tensors.items():
            if fnmatchcase(weight.name, pattern):
                target = other
        return target


def _parse(text: str, origin: str) -> Recipe:
    try:
        _refuse_repeated(yaml.compose(text, yaml.SafeLoader), origin)
        raw = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"recipe {origin} is nested too deeply; expected class: format") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"recipe {origin} is not YAML: {line}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"recipe {origin}: expected lines of class: format, got {type(raw).__name__}"
        )
    tensors = raw.pop("tensors", {})
    if not isinstance(tensors, dict):
        raise ConfigError(
            f"recipe {origin}: expected lines of pattern: format under tensors, got {tensors!r}"
        )
    unknown = [str(key) for key in raw if key not in CLASSES]
    if unknown:
        raise ConfigError(
            f"recipe {origin}: {', '.join(unknown)} is not a class; expected "
            f"{', '.join(CLASSES)}, or names under tensors"
        )
    return Recipe(_formats(raw, origin), _formats(tensors, origin), origin)


def _refuse_repeated(node: yaml.Node | None, origin: str) -> None:
    """YAML would silently take the last of two lines with one key."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Any, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        first = seen.setdefault(key.value if isinstance(key.value, str) else line, line)
        if first != line:
            raise ConfigError(
                f"recipe {origin}: {key.value} is in line {first} and again in line {line}; remove "
                "one"
            )
        _refuse_repeated(value, origin)


def _formats(lines: Mapping[Any, Any], origin: str) -> dict[str, Target]:
    for key, value in lines.items():
        if value not in get_args(Target):
            raise ConfigError(
                f"recipe {origin}: {key}: expected one of {', '.join(get_args(Target))}, "
                f"got {value}"
            )
    return {str(key): value for key, value in lines.items()}
