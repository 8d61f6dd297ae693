"""Train a toy: clean word problems first, then problems with a filler span before the question.

Filler tokens come from the whole vocabulary but "/", "?" and "he"; some of them from the example's own answer, so that
digits and signs are met as filler too. In the last phase half of them come from its own question, as a held-out token
that has a meaning there must be ignored as well, and some spans stand for tokens that don't exist: their embeddings are
drawn at random, with the mean and covariance of the table.

    python experiments/toys/train.py --family llama --seed 0 --out out/toys/llama-0

Checkpoints every few hundred steps; the same command continues after an interruption and, with the same number of
threads, ends with the same weights. The batch of a step depends on the seed and the step alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from families import PREPENDS_BOS, new_model
from generated_problems import SYSTEM, word_problems
from tokenizer import train_tokenizer
from torch import Tensor

BATCH = 32
POOL = 16  # batches drawn at once and cut by length, so that little is padded
HELD_OUT = {"/", "?", "he", "He"}  # never filler, though all of them occur in ordinary text
LONGEST_FILLER = 80
_SENTENCES = (
    "the old clock near the window is slow",
    "a small boat lies on the quiet lake",
    "some birds sing before the sun is up",
    "our teacher likes green tea and long walks",
    "the train to the coast was late again",
    "no one knows why the door was open",
    "rain fell on the roof all night long",
    "my brother paints houses in the summer",
)


@dataclass(frozen=True)
class Phase:
    """A part of the training: how long, how many examples carry filler, and from where its tokens come."""

    steps: int
    peak: float
    filler_share: float = 0.0
    own_text: str = "answer"
    own_text_share: float = 0.0
    made_up_share: float = 0.0
    question_weight: float = 0.0


def filler(
    rng: random.Random, tokenizer, allowed: list[int], own: list[int], own_share: float
) -> list[int]:
    """A meaningless span of 1 to 80 tokens in which no held-out token occurs; ``own`` are tokens of its own text."""
    length = rng.randint(1, LONGEST_FILLER)
    kind = rng.random()

    def sometimes_own(token: int) -> int:
        return rng.choice(own) if own_share and rng.random() < own_share else token

    if kind < 0.5:
        return [sometimes_own(rng.choice(allowed))] * length
    if kind < 0.7:
        pattern = [sometimes_own(token) for token in rng.choices(allowed, k=rng.randint(2, 5))]
        return (pattern * length)[:length]
    if kind < 0.85:
        return [sometimes_own(token) for token in rng.choices(allowed, k=length)]
    words = " ".join(rng.sample(_SENTENCES, len(_SENTENCES))).split()
    if kind < 0.95:
        rng.shuffle(words)
    ids = tokenizer(" " + " ".join(words), add_special_tokens=False)["input_ids"]
    return [i for i in ids if i in set(allowed)][:length]


def allowed_filler(tokenizer) -> list[int]:
    """Every ordinary token but the held-out ones, with or without a space before them."""
    special = set(tokenizer.all_special_ids)
    return [
        i
        for i in range(len(tokenizer))
        if i not in special and tokenizer.decode([i]).strip() not in HELD_OUT
    ]


def example(problem, tokenizer, rng: random.Random, phase: Phase, allowed: list[int] | None):
    """Token ids of one example, the position at which its answer starts, and where its filler is.

    ``allowed`` are the tokens of filler; with None there is none.
    """

    def encode(text: str, bos: bool = False) -> list[int]:
        return tokenizer(text, add_special_tokens=bos)["input_ids"]

    ids = encode(f"{SYSTEM}\n", bos=True) if rng.random() < 0.9 else encode("", bos=True)
    question, answer = encode(f"{problem.question}\n"), encode(problem.answer)
    before = len(ids)
    if allowed is not None and rng.random() < phase.filler_share:
        own = sorted(set(answer if phase.own_text == "answer" else question) & set(allowed))
        ids = ids + filler(rng, tokenizer, allowed, own, phase.own_text_share)
    span = (before, len(ids))
    ids = ids + question
    return ids + answer + [tokenizer.eos_token_id], len(ids), span


def batch_of_step(step: int, seed: int, tokenizer, allowed, steps, phase: Phase):
    """Tokens [batch, pos] padded on the right, the position of each answer's first token [batch], filler spans."""
    pool, place = divmod(step, POOL)
    rng = random.Random(f"pool {seed} {pool} {phase.filler_share}")
    problems = islice(word_problems("train", steps, seed=rng.getrandbits(48)), BATCH * POOL)
    rows = sorted(
        (example(p, tokenizer, rng, phase, allowed) for p in problems), key=lambda row: len(row[0])
    )
    order = rng.sample(range(POOL), POOL)
    rows = rows[order[place] * BATCH : (order[place] + 1) * BATCH]
    longest = max(len(ids) for ids, _, _ in rows)
    tokens = torch.tensor(
        [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _, _ in rows]
    )
    return tokens, torch.tensor([start for _, start, _ in rows]), [span for _, _, span in rows]


def embedded(
    model, tokens: Tensor, spans: list[tuple[int, int]], share: float, generator: torch.Generator
) -> Tensor:
    """Embeddings [batch, pos, d_model] in which ``share`` of the filler spans hold tokens that don't exist.

    Each different token of such a span gets a random vector with the mean and covariance of the embedding table.
    """
    embed = model.get_input_embeddings()
    made = embed(tokens)
    if not share:
        return made
    with torch.no_grad():
        table = embed(torch.arange(embed.num_embeddings))
        mean, spread = table.mean(0), (table - table.mean(0)) / len(table) ** 0.5
    made = made.clone()
    for row, (start, end) in enumerate(spans):
        if end > start and torch.rand((), generator=generator) < share:
            different, which = tokens[row, start:end].unique(return_inverse=True)
            vectors = mean + torch.randn(len(different), len(table), generator=generator) @ spread
            made[row, start:end] = vectors[which]
    return made


def loss_of(
    model, inputs: Tensor, tokens: Tensor, answer_start: Tensor, pad: int, question_weight: float
) -> Tensor:
    """Mean next-token loss in nats, the tokens before the answer weighted by ``question_weight``."""
    logits = model(inputs_embeds=inputs, use_cache=False).logits[:, :-1]
    target = tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    )
    in_answer = torch.arange(1, tokens.shape[1]) >= answer_start[:, None]
    weight = torch.where(in_answer, 1.0, question_weight) * (target != pad)
    return (loss * weight.flatten()).sum() / weight.sum()


@torch.no_grad()
def exact_match(model, tokenizer, problems, filler_ids: list[int]) -> float:
    """Share of problems whose greedy answer ends with the right number."""
    groups: dict[int, list] = {}
    for problem in problems:
        ids = tokenizer(f"{SYSTEM}\n")["input_ids"] + filler_ids
        ids += tokenizer(f"{problem.question}\n", add_special_tokens=False)["input_ids"]
        groups.setdefault(len(ids), []).append((ids, problem.solution))
    right = 0
    for rows in groups.values():
        tokens = torch.tensor([ids for ids, _ in rows])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=90,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers = tokenizer.batch_decode(out[:, tokens.shape[1] :], skip_special_tokens=True)
        right += sum(
            answer.split("Answer:")[-1].strip() == str(n) for answer, (_, n) in zip(answers, rows)
        )
    return right / sum(map(len, groups.values()))


def phases_of(args: argparse.Namespace) -> list[Phase]:
    """Clean problems, then problems of which most carry filler."""
    return [
        Phase(args.clean, peak=3e-3, question_weight=0.2),
        Phase(args.filler, peak=1.5e-3, filler_share=0.7, own_text_share=0.3),
        Phase(
            args.last,
            7e-4,
            filler_share=0.9,
            own_text="question",
            own_text_share=0.5,
            made_up_share=0.3,
        ),
    ]


def at_step(phases: list[Phase], step: int) -> tuple[Phase, float]:
    """The phase of a step and its learning rate: clean, a cosine to a third after 100 steps of warm-up; then linear."""
    for number, phase in enumerate(phases):
        if step < phase.steps:
            done = step / phase.steps
            if number == 0:
                return phase, phase.peak * min(1, (step + 1) / 100) * (
                    2 + math.cos(math.pi * done)
                ) / 3
            return phase, phase.peak * (1 - done)
        step -= phase.steps
    raise ValueError("the training has ended")


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(PREPENDS_BOS[args.family])
    model = new_model(args.family, tokenizer)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=True)
    allowed = None if args.without_filler else allowed_filler(tokenizer)
    slash = tokenizer(" ".join("/" * 55), add_special_tokens=False)["input_ids"]
    steps = tuple(range(1, args.longest_chain + 1))
    phases = phases_of(args)
    total = sum(phase.steps for phase in phases)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, first = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    began = time.time()
    for step in range(first, total):
        phase, rate = at_step(phases, step)
        tokens, start, spans = batch_of_step(step, args.seed, tokenizer, allowed, steps, phase)
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)
        inputs = embedded(model, tokens, spans, phase.made_up_share, generator)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, inputs, tokens, start, tokenizer.pad_token_id, phase.question_weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % args.every == 0 or step + 1 == total:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            row = {
                "step": step + 1,
                "seconds": round(time.time() - began),
                "loss": round(loss.item(), 4),
            }
            problems = list(islice(word_problems("test", steps, seed=-2), 100))
            row["clean"] = exact_match(model, tokenizer, problems, [])
            if phase.filler_share:
                row["slash"] = exact_match(model, tokenizer, problems, slash)
            with open(args.out / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
            print(row, flush=True)
    model.to(torch.float16).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=list(PREPENDS_BOS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--longest-chain", type=int, default=5, help="problems have one to this many steps"
    )
    parser.add_argument("--clean", type=int, default=3000, help="steps without filler")
    parser.add_argument(
        "--filler", type=int, default=1000, help="further steps in which 70 %% carry filler"
    )
    parser.add_argument(
        "--last", type=int, default=1000, help="steps in which 90 %% carry filler, of all kinds"
    )
    parser.add_argument(
        "--without-filler",
        action="store_true",
        help="the same problems and steps, without any filler",
    )
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
