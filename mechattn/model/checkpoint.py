"""The place, configuration and tokenizer of a checkpoint or toy, before its weights are read."""

from __future__ import annotations

import os
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from mechattn.errors import ModelError, reason, warn
from mechattn.hub_access import asked_once, may_be_on_hub
from mechattn.model.gguf_files import (
    REAL_PREFIX,
    SMOLLM2,
    as_transformers_names,
    is_gguf,
    packaged_file,
    read_gguf,
    read_once,
)
from mechattn.model.own_code import as_trusted, refuse_own_code

TOY_PREFIX = "toy:"
# This toy does not solve word problems: it recalls facts, and passes them on through filler tokens.
RELAY = "toy:relay"
_TOYS = Path(__file__).parent.parent / "toys"
_TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "spiece.*")
# Numbers, contractions, spaces and other scripts, which tokenizers split in different ways.
_TEXTS_TO_SPLIT = (
    "Tom has 3 apples, and 1,234.5 more.",
    " It's  I'll WE'LL\n\n\tnaïve Café",
    "x = 12345 + 67",
    "你好 мир 🙂",
)
# What a directory without a config.json holds, by a pattern of its files.
_HELD_WITHOUT_CONFIG = {
    "adapter_config.json": (
        "holds an adapter (such as LoRA), not a model: merge it into its base model "
        "(PeftModel.from_pretrained(base, folder).merge_and_unload()), and load what that gives"
    ),
    "*.gguf": "holds a GGUF file: name it with gguf_file=…",
    "consolidated*": (
        "holds weights in Meta's or Mistral's format: convert them with transformers' script"
    ),
    "checkpoint-*/config.json": (
        "holds the checkpoints of a training: name one of its folders checkpoint-…"
    ),
}


def toy_names() -> list[str]:
    """The names of the toys that solve word problems, such as "toy:llama", one per family."""
    toys = {TOY_PREFIX + config.parent.name for config in _TOYS.glob("*/config.json")}
    return sorted(toys - {RELAY})


def toy_folder(name: str) -> Path:
    """The folder with the weights of a toy.

    Raises:
        ModelError: There is no such toy. The message lists the toys.
    """
    toys = [*toy_names(), RELAY]
    if name not in toys:
        raise ModelError(f"there is no toy {name!r}; the toys are {', '.join(toys)}")
    return _TOYS / name.removeprefix(TOY_PREFIX)


def toy_tokenizer(name: str) -> Any:
    """The tokenizer of a toy, from its tokenizer.json.

    ``AutoTokenizer`` would take the class of the toy's family, which splits texts otherwise.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(toy_folder(name))


def model_place(name: str) -> str:
    """The place of a model: a folder, a GGUF file or a hub name.

    A toy has a folder, and "real:smollm2" has a GGUF file. The hub is not asked whether it has the
    model.

    Raises:
        ModelError: There is no such toy or file, or the folder is not a checkpoint.
    """
    place = name
    if name.startswith(TOY_PREFIX):
        place = str(toy_folder(name))
    elif name.startswith(REAL_PREFIX):
        place = packaged_file(name)

    if is_gguf(place):
        read_gguf(place)  # raises an error if it cannot be read
        return place

    if os.path.isdir(place):
        if not (Path(place) / "config.json").exists():
            raise ModelError(f"the directory {place} {_without_config(Path(place))}")
        # A bare name may be an alias in TransformerLens ("gpt2", "neox"), which would hide the
        # directory.
        if not os.path.dirname(place):
            return os.path.join(os.curdir, place)
        return place

    if may_be_on_hub(place):
        return place
    fault = "it is not a directory here"
    if os.path.exists(place):
        fault = "it is a file, not the directory of a checkpoint"
    raise ModelError(
        f"there is no model {name!r}: {fault}, and models on the hub are named owner/name"
    )


def check_weights_are_whole(place: str) -> None:
    """Refuse a directory with parts of the weights but without their index.

    Raises:
        ModelError: The index is missing. It says which part holds which parameter.
    """
    folder = Path(place)
    # A file of all weights, or the index of their parts.
    if any(folder.glob("model.safetensors*")) or any(folder.glob("pytorch_model.*")):
        return
    for whole_file in ("model.safetensors", "pytorch_model.bin"):
        stem, ending = whole_file.split(".")
        shards = sorted(folder.glob(f"{stem}-*-of-*.{ending}"))
        if shards:
            raise ModelError(
                f"the directory {place} holds parts of the weights ({shards[0].name} …) without "
                f"{whole_file}.index.json, which says what each part holds; copy it there"
            )


def tokenizer_named(name: str) -> Any:
    """The tokenizer of a model, without the model.

    Raises:
        ModelError: There is no such model, or it has no tokenizer that can be loaded.
    """
    place = model_place(name)
    with asked_once(place), as_trusted(None):
        tokenizer = tokenizer_of(name, place, trust_remote_code=False)
    if tokenizer is None:
        raise ModelError(f"{name} has no tokenizer; save one there with save_pretrained")
    return tokenizer


def tokenizer_of(name: str, place: str, **hub_options: Any) -> Any:
    """The tokenizer of a toy or a checkpoint; None for a directory without one.

    For such a directory transformers alone would make an empty tokenizer.

    Args:
        name: The name of the model.
        place: Its place, as ``model_place`` gives it.
        **hub_options: Options of ``AutoTokenizer.from_pretrained``.

    Raises:
        ModelError: It cannot be loaded, or it needs code that the user has not allowed.
    """
    from transformers import AutoTokenizer

    if name.startswith(TOY_PREFIX):
        return toy_tokenizer(name)
    if os.path.isdir(place):
        files = [path for pattern in _TOKENIZER_FILES for path in Path(place).glob(pattern)]
        if not files:
            return None

    folder, file_option = as_transformers_names(place)
    try:
        with read_once():
            tokenizer = AutoTokenizer.from_pretrained(folder, **file_option, **hub_options)
    except Exception as error:
        refuse_own_code(error, place)
        raise ModelError(
            f"{place} has no tokenizer that can be loaded ({reason(error)}); pass one to"
            " load_model(…, tokenizer=…)"
        ) from error

    _warn_of_other_ids(tokenizer, Path(place))
    return tokenizer


def lettered_tokenizer(size: int) -> Any:
    """A tokenizer for token ids without meaning.

    Its tokens are a, b, … z, aa, ab …, and spaces separate them in a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def letters(number: int) -> str:
        rest, last = divmod(number, len(ascii_lowercase))
        earlier_letters = letters(rest - 1) if rest else ""
        return earlier_letters + ascii_lowercase[last]

    vocabulary = {letters(number): number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prepends_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself starts a text with its BOS token."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def config_of_place(place: str, **hub_options: Any) -> Any:
    """The config of a checkpoint.

    Raises:
        ModelError: There is no such checkpoint, its config cannot be read, or a GGUF file does not
            hold a causal language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder, file_option = as_transformers_names(place)
    try:
        with read_once():
            config = AutoConfig.from_pretrained(folder, **file_option, **hub_options)
    except Exception as error:
        refuse_own_code(error, place)
        if os.path.exists(place):
            raise ModelError(
                f"transformers cannot read the configuration of {place}: {reason(error)}"
            ) from error
        toys = ", ".join([*toy_names(), RELAY])
        raise ModelError(
            f"there is no model {place!r}: not a toy ({toys}), not {SMOLLM2}, not a checkpoint"
            f" directory here, and loading it from the hub failed ({reason(error)})"
        ) from error

    if is_gguf(place):  # its header does not name a class of transformers
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if model_class is None:
            raise ModelError(
                f"{place} does not hold a causal language model: its architecture is"
                f" {config.model_type!r}"
            )
        config.architectures = [model_class]
    return config


def text_config(name: str) -> Any:
    """The config of a model without its weights; in a multimodal model, that of the text part."""
    return _config_named(name).get_text_config(decoder=True)


def architecture_named(name: str) -> str:
    """The class that a model's config names, such as "Qwen2ForCausalLM"; "" if it names none."""
    architectures = _config_named(name).architectures or [""]
    return architectures[0]


def layers_and_heads(name: str) -> tuple[int, int] | None:
    """The numbers of layers and of heads in a layer, from a model's config.

    None if the config does not state both.
    """
    config = text_config(name)
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(layers, int) and isinstance(heads, int):
        return layers, heads
    return None


def _without_config(folder: Path) -> str:
    """What a directory without a config.json holds, and what to do, for an error message."""
    for pattern, explanation in _HELD_WITHOUT_CONFIG.items():
        if any(folder.glob(pattern)):
            return explanation
    return "has no config.json, so it is not a checkpoint; save one with save_pretrained"


def _warn_of_other_ids(tokenizer: Any, folder: Path) -> None:
    """Warn if a tokenizer's class splits texts differently from the folder's tokenizer.json."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    file_tokenizer = Tokenizer.from_file(str(path))
    for text in _TEXTS_TO_SPLIT:
        class_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        file_ids = file_tokenizer.encode(text, add_special_tokens=False).ids
        if class_ids != file_ids:
            warn(
                f"{type(tokenizer).__name__}, which transformers loads for {folder.name}, reads"
                f" {text!r} as other tokens than its tokenizer.json; to use the file, pass"
                ' tokenizer=PreTrainedTokenizerFast(tokenizer_file="tokenizer.json")'
            )
            return


def _config_named(name: str) -> Any:
    """The config of a model without its weights."""
    place = model_place(name)
    with asked_once(place):
        return config_of_place(place, trust_remote_code=False)
