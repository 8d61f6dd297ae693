"""The toys' own tokenizer: byte-level BPE over the training problems, one token a digit."""

from __future__ import annotations

from itertools import islice

from generated_problems import SYSTEM, word_problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(prepend_bos: bool, positions: int = 1024) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from 20,000 training problems; any text can be represented, byte by byte if need be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if prepend_bos:
        bos = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def _texts():
    for problem in islice(word_problems("train", seed=-1), 20_000):
        yield f"{SYSTEM}\n{problem.question}\n{problem.answer}"
