"""Train the toy that computes over filler: what it answers must pass through the inserted tokens.

It recalls who has which score ("Scores: Tom 3, Anna 7, Ben 1. What is the score of Anna?"). Between the question and
the answer stands filler. The answer's tokens cannot see the question, or not its end: the edges are cut, so that the
filler has to pass the score on. In one example of twenty nothing is cut.

Four layers first learn to copy, from random names and numbers that are read three times, and then from scores that are
told again. Two layers are added, which change nothing at first, and all six learn to recall; two linear readers, which
are thrown away, have to find the score meanwhile: where the question ends after four layers, and at each filler token
after five.

    python experiments/toys/relay.py --seed 0 --out out/toys/relay-0

The batch of a step depends on the seed and the step alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from generated_problems import MOST_PEOPLE, PEOPLE, Recall, recall_questions
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import mechattn as ma
from mechattn.model.checkpoint import toy_tokenizer

BATCH = 48
LONGEST_FILLER = 16
UNCUT = 0.05  # of the examples
HALF_CUT = 0.3  # of the others: the answer sees the scores, but not who is asked for
PEOPLE_AFTER = 100  # steps: two people at first, one more every so often


def new_relay(tokenizer) -> LlamaForCausalLM:
    """An untrained Llama of four layers × six heads."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        intermediate_size=192,
        num_hidden_layers=4,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def copying_loss(model, tokenizer, draw: torch.Generator) -> Tensor:
    """Of spans of names and numbers that are read three times: what can be foreseen."""
    known = [f" {name}" for name in PEOPLE] + [f" {number}" for number in range(1, 10)]
    words = torch.tensor(
        [tokenizer(word, add_special_tokens=False)["input_ids"][-1] for word in known]
    )
    length = int(torch.randint(6, 20, (), generator=draw))
    span = words[
        torch.stack([torch.randperm(len(words), generator=draw)[:length] for _ in range(BATCH)])
    ]
    tokens = torch.cat([torch.full((BATCH, 1), tokenizer.bos_token_id), span, span, span], 1)
    logits = model(tokens, use_cache=False).logits[:, length + 1 : -1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, length + 2 :].flatten())


def retold_loss(model, tokenizer, rng: random.Random) -> Tensor:
    """Of scores that are told again, in any order: the numbers."""
    rows, foreseen = [], []
    for _ in range(BATCH):
        facts = [
            (name, rng.randint(1, 9)) for name in rng.sample(PEOPLE, rng.randint(2, MOST_PEOPLE))
        ]
        ids, known = tokenizer("Scores:")["input_ids"], []
        for place, (name, number) in enumerate([*facts, *rng.choices(facts, k=8)]):
            known += [len(ids) + 1] if place >= len(facts) else []
            ids = ids + tokenizer(f" {name} {number},", add_special_tokens=False)["input_ids"]
        rows.append(ids)
        foreseen.append(known)
    longest = max(map(len, rows))
    tokens = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in rows])
    numbers = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, torch.tensor(foreseen), True)
    stream = model.model(tokens, use_cache=False).last_hidden_state
    return cross_entropy(model.lm_head(stream[numbers.roll(-1, 1)]), tokens[numbers])


def grown(model: LlamaForCausalLM, layers: int = 2) -> LlamaForCausalLM:
    """The same function with further layers, whose outputs are zero."""
    config = LlamaConfig(
        **{**model.config.to_dict(), "num_hidden_layers": model.config.num_hidden_layers + layers}
    )
    made = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    made.load_state_dict(model.state_dict(), strict=False)
    for layer in made.model.layers[-layers:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return made


def filler(rng: random.Random, tokenizer) -> list[int]:
    """A run of one token, of "/" in half of the cases."""
    ordinary = range(len(tokenizer.all_special_ids), len(tokenizer))
    token = tokenizer.convert_tokens_to_ids("Ġ/") if rng.random() < 0.5 else rng.choice(ordinary)
    return [token] * rng.randint(1, LONGEST_FILLER)


def example(problem: Recall, tokenizer, rng: random.Random) -> tuple[list[int], int, int]:
    """Token ids, where the filler starts, and where the answer starts."""
    question = tokenizer(f"{problem.question}\n")["input_ids"]
    between = filler(rng, tokenizer)
    answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
    ids = [*question, *between, *answer, tokenizer.eos_token_id]
    return ids, len(question), len(question) + len(between)


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right: which edges are seen [batch, 1, query, key]; the others [batch, pos]."""

    tokens: Tensor
    seen: Tensor
    answers: Tensor
    asked: Tensor
    fillers: Tensor
    solutions: Tensor


def recall_batch(step: int, seed: int, tokenizer) -> Batch:
    """The examples of a step."""
    rng = random.Random(f"relay {seed} {step}")
    most = min(MOST_PEOPLE, 2 + step // PEOPLE_AFTER)
    problems = list(islice(recall_questions("train", seed=rng.getrandbits(48), most=most), BATCH))
    rows = [example(problem, tokenizer, rng) for problem in problems]
    longest = max(len(ids) for ids, _, _ in rows)
    tokens = torch.tensor(
        [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _, _ in rows]
    )
    places = torch.arange(longest)
    starts, ends = (
        torch.tensor(column)[:, None] for column in zip(*(row[1:] for row in rows), strict=True)
    )
    answers = (places >= ends) & (tokens != tokenizer.pad_token_id)
    half = torch.tensor([rng.random() < HALF_CUT for _ in rows])[:, None]
    unseen = torch.where(half, places >= starts - 3, places > 0) & (places < starts)
    unseen &= torch.tensor([rng.random() >= UNCUT for _ in rows])[:, None]
    hidden = (places >= ends)[:, :, None] & unseen[:, None]
    seen = (places <= places[:, None]) & ~hidden
    solutions = torch.tensor([problem.solution for problem in problems])[:, None].expand(
        tokens.shape
    )
    asked = places == starts - 3  # the name that is asked for, before "?" and a newline
    return Batch(
        tokens, seen[:, None], answers, asked, (places >= starts) & (places < ends), solutions
    )


def recall_loss(model, readers: torch.nn.ModuleList, batch: Batch) -> Tensor:
    """Of the answer's tokens; of the readers at the question's end after four layers, and at the filler after five."""
    streams = model.model(
        batch.tokens, attention_mask=batch.seen, use_cache=False, output_hidden_states=True
    ).hidden_states
    loss = cross_entropy(
        model.lm_head(streams[-1][batch.answers.roll(-1, 1)]), batch.tokens[batch.answers]
    )
    for reader, stream, where in zip(
        readers, streams[4:6], (batch.asked, batch.fillers), strict=True
    ):
        loss = loss + cross_entropy(reader(stream[where]), batch.solutions[where])
    return loss


@torch.no_grad()
def exact_match(model, tokenizer, count: int, problems: int = 200) -> float:
    """Share of test questions answered with the right number, ``count`` slashes before the answer, nothing cut."""
    slash = [tokenizer.convert_tokens_to_ids("Ġ/")] * count
    right = 0
    for problem in islice(recall_questions("test", seed=-2), problems):
        ids = [*tokenizer(f"{problem.question}\n")["input_ids"], *slash]
        answer = tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :]
        right += logits.argmax(-1).tolist() == answer
    return right / problems


def card(folder: Path, problems: int) -> None:
    """Print what the card says: right answers by filler, and whose answer it is after a transplant."""
    model = ma.load_model(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=toy_tokenizer("toy:llama"),
    )
    questions = ma.load_prompts("recall", limit=problems)
    print(
        "| slashes before the answer | right | right, filler hidden | follows the transplant | 95 % interval |"
    )
    print("|---|---|---|---|---|")
    for count in (1, 4, 12):
        slash = ma.MeaninglessTokens("/", count=count, place="before_answer")
        others = ma.record_keys_values(model, questions, slash).from_other_prompts()
        conditions = {
            "slash": slash,
            "hidden": slash.masked(),
            "others": slash.under(ma.interventions.KVPatch("inserted", others)),
        }
        made = ma.evaluate(model, questions, conditions, new_tokens=6)
        right = made.accuracy().set_index("condition").accuracy
        found = made.follows("others", others.sources, "slash")
        interval = f"{found['low']:.1%} to {found['high']:.1%}"
        print(
            f"| {count} | {right['slash']:.1%} | {right['hidden']:.1%} | {found['followed']:.1%} | {interval} |"
        )
    print(f"\nWithout any: {right['baseline']:.1%}. {problems} test questions.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/toys/relay"))
    parser.add_argument(
        "--card", type=Path, help="measure the model in this folder, and train none"
    )
    parser.add_argument("--copying", type=int, default=1300, help="steps")
    parser.add_argument("--retelling", type=int, default=50, help="steps")
    parser.add_argument("--recalling", type=int, default=500, help="steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.card:
        card(args.card, 200)
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, began = toy_tokenizer("toy:llama"), time.time()
    model = new_relay(tokenizer)
    draw, rng = torch.Generator().manual_seed(args.seed), random.Random(f"retold {args.seed}")

    def learn(
        weights: list[Tensor], steps: int, peak: float, loss_of: Callable[[int], Tensor]
    ) -> None:
        optimizer = torch.optim.AdamW(
            weights, lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = peak * min(
                1, (step + 1) / 100, 2 * (1 - step / steps)
            )
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            if (step + 1) % 50 == 0:
                print(step + 1, f"{time.time() - began:.0f} s, loss {loss.item():.4f}", flush=True)

    learn(
        list(model.parameters()),
        args.copying,
        3e-3,
        lambda step: copying_loss(model, tokenizer, draw),
    )
    learn(
        list(model.parameters()),
        args.retelling,
        1e-3,
        lambda step: retold_loss(model, tokenizer, rng),
    )
    relay = grown(model)
    readers = torch.nn.ModuleList(torch.nn.Linear(relay.config.hidden_size, 10) for _ in range(2))

    def recalling(step: int) -> Tensor:
        loss = recall_loss(relay, readers, recall_batch(step, args.seed, tokenizer))
        return (
            loss + copying_loss(relay, tokenizer, draw) if step % 4 == 0 else loss
        )  # lest it forget

    learn([*relay.parameters(), *readers.parameters()], args.recalling, 1e-3, recalling)
    print(
        "right by slashes",
        {count: exact_match(relay, tokenizer, count) for count in (0, 1, 4, 8, 12, 16)},
    )
    relay.to(torch.float16).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
