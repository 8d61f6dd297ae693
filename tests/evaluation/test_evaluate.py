"""Answers against plain transformers, one prompt at a time; stored, continued, compared."""

import json
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine.engines import forward_through_hooks
from mechattn.errors import Interrupted, OptionError, OutputError, PromptError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.generate import Generation, answers
from mechattn.evaluation.generating_rows import Request
from mechattn.model.hooks import attention_window
from mechattn.prompts.token_sequences import pad_right
from tests.evaluation import by_hand

SLASH = ma.MeaninglessTokens("/", 20)
NEVER = frozenset([10**6])  # a token that ends no answer


@pytest.fixture(scope="module")
def problems():
    return ma.load_prompts("word-problems", limit=8)


@pytest.fixture(scope="module")
def evaluation(toy, problems):
    conditions = {
        "slash": SLASH,
        "arm": ma.Baseline(intervention=ma.interventions.ARM(strength=2.0, form="released_llama")),
    }
    return ma.evaluate(toy, problems, conditions, new_tokens=60)


def test_answers_are_those_of_plain_generation(problems, shared):
    """Left-padded batches with a cache against transformers' own generate, one prompt at a time, without padding."""
    model = shared("toy:gemma3")
    native = model._mechattn.native
    end = model.tokenizer.eos_token_id
    sequences = [SLASH.apply(problems[0], model)]
    sequences += [ma.Baseline().apply(prompt, model) for prompt in problems[1:3]]
    requests = [Request(str(number), sequence, 0) for number, sequence in enumerate(sequences)]
    batched = answers(native, requests, 16, frozenset([end]))
    for answer, sequence in zip(batched, sequences, strict=True):
        tokens = native.generate(
            sequence.tokens[None],
            attention_mask=torch.ones(1, len(sequence), dtype=torch.long),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
        )
        plain = tokens[0, len(sequence) :].tolist()
        assert answer.finished == (end in plain)
        if answer.finished:
            plain = plain[: plain.index(end)]
        assert list(answer.tokens) == plain


class Ignored:
    """A receiver of attention that nothing is asked of."""

    def see_rows(self, layer, rows):
        pass

    def see_whole(self, layer, fused):
        pass


VARIANTS = {
    "masked": SLASH.masked(),
    "unshifted": SLASH.unshifted(),
    "cut": SLASH.under(ma.interventions.AttentionKnockout("answer", "inserted")),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("toy:llama", "masked"),
        ("toy:llama", "cut"),
        ("toy:gemma3", "unshifted"),
    ],
)
def test_variants_at_each_step_are_those_of_the_hooked_model(name, variant, problems, shared):
    """Every generated token is the likeliest one of a hooked forward pass over the whole sequence so far."""
    model = shared(name)
    sequence = VARIANTS[variant].apply(problems[0], model)
    other = ma.Baseline().apply(problems[1], model)
    requests = [Request("0", sequence, 0), Request("1", other, 0)]
    (answer, _) = answers(model._mechattn.native, requests, 8, frozenset([1]))

    logits = []
    handle = model.original_model.register_forward_hook(
        lambda module, arguments, output: logits.append(output.logits[0, -1])
    )
    last = model.cfg.n_layers - 1
    windows = {last: attention_window(model, last)}
    for token in answer.tokens:
        batch = pad_right([sequence], [(0, "x")], 0)
        forward_through_hooks(model, batch, windows, Ignored(), last)
        assert int(logits[-1].argmax()) == token
        sequence = with_token(sequence, token)
    handle.remove()
    assert len(answer.tokens) == 8 or answer.finished


def with_token(sequence, token):
    """The sequence and a token of the answer after it."""
    mask = sequence.cut_edges
    if mask is not None:
        mask = replace(
            mask,
            queries=torch.cat([mask.queries, torch.tensor([mask.later])]),
            keys=torch.cat([mask.keys, torch.tensor([False])]),
        )
    return replace(
        sequence,
        tokens=torch.cat([sequence.tokens, torch.tensor([token])]),
        origin=torch.cat([sequence.origin, sequence.origin.max()[None] + 1]),
        segment=torch.cat([sequence.segment, torch.tensor([5])]),
        cut_edges=mask,
    )


def test_grades_and_accuracy(evaluation, problems):
    table = evaluation.accuracy().set_index("condition")
    for name in ("baseline", "slash", "arm"):
        graded = [answer for answer in evaluation.answers if answer.condition == name]
        right = [answer.text.split("Answer:")[-1].strip() == answer.solution for answer in graded]
        assert [answer.right for answer in graded] == right
        assert table.accuracy[name] == np.mean(right)
        assert table.unread[name] == sum("Answer:" not in answer.text for answer in graded)
        assert [answer.prompt for answer in graded] == [prompt.id for prompt in problems]
    assert table.accuracy["baseline"] >= 7 / 8


def test_batches_decide_nothing_of_sampled_answers(toy, problems):
    options = {"samples": 3, "temperature": 3.0, "new_tokens": 12}
    first, second = (ma.evaluate(toy, problems[:4], batch=batch, **options) for batch in (5, 12))
    pairs = zip(first.answers, second.answers, strict=True)
    same = [one.tokens == other.tokens for one, other in pairs]
    assert np.mean(same) > 0.9  # rounding may turn a tie
    assert len({answer.tokens for answer in first.answers}) > 4


def test_sampling_follows_the_distribution(toy, problems, monkeypatch):
    """The first token of many samples against the softmax of the logits; a draw of 0 takes no token that has no
    probability."""
    native = toy._mechattn.native
    sequence = ma.Baseline().apply(problems[0], toy)
    with torch.no_grad():
        logits = native(sequence.tokens[None]).logits[0, -1].double()
    expected = (logits / 3).softmax(-1)
    requests = [Request("0", sequence, sample) for sample in range(200)]
    sampled = answers(native, requests, 1, NEVER, temperature=3.0)
    first_tokens = torch.tensor([answer.tokens[0] for answer in sampled])
    shares = torch.bincount(first_tokens, minlength=len(expected)) / 200
    likely = expected > 0.05
    assert likely.any()
    spread = float((expected.max() / 200).sqrt())
    assert (shares[likely] - expected[likely]).abs().max() < 4 * spread

    monkeypatch.setattr("mechattn.evaluation.generate.keyed_uniform", lambda *_: torch.zeros(1, 1))
    (coldest,) = answers(native, requests[:1], 1, NEVER, temperature=1e-4)
    assert coldest.tokens[0] == logits.argmax()


def test_a_run_that_was_cut_off_goes_on(toy, problems, tmp_path, monkeypatch):
    """Ctrl-C in the middle of a batch, and a line cut off: every ended answer is kept, none asked again."""
    path = tmp_path / "part.jsonl"
    options = {"conditions": {"slash": SLASH}, "new_tokens": 40, "batch": 3}
    expected = ma.evaluate(toy, problems[:4], **options, out=tmp_path / "whole.jsonl")
    advance = Generation.advance
    ended = []
    asked = []

    def interrupted(generation):
        if len(ended) >= 3:
            raise KeyboardInterrupt
        answered = advance(generation)
        ended.extend(answered)
        return answered

    def counted(generation):
        asked[:] = [generation.requests]
        return advance(generation)

    monkeypatch.setattr(Generation, "advance", interrupted)
    with pytest.raises(Interrupted, match=r"stopped; \d+ of 8 answers are kept in .*part\.jsonl"):
        ma.evaluate(toy, problems[:4], **options, out=path)
    with pytest.raises(Interrupted, match="no answer is kept, since no file was given"):
        ma.evaluate(toy, problems[:4], **options)
    before = ma.load_evaluation(path).answers
    assert 3 <= len(before) < 8
    with open(path, "a") as lines:
        lines.write('{"prompt": "7", "condi')

    monkeypatch.setattr(Generation, "advance", counted)
    again = ma.evaluate(toy, problems[:4], **options, out=path)
    assert len(asked[0]) == 8 - len(before), "what was there was not asked again"
    texts = [answer.text for answer in expected.answers]
    assert [answer.text for answer in again.answers] == texts
    assert sorted(answer.text for answer in ma.load_evaluation(path).answers) == sorted(texts)


def test_more_problems_conditions_and_samples_extend_a_file(toy, problems, tmp_path, monkeypatch):
    path = tmp_path / "e.jsonl"
    asked = []
    sampled = {"new_tokens": 8, "temperature": 1.0, "out": path}
    begin = Generation.__post_init__

    def counted(generation):
        asked.append(len(generation.requests))
        begin(generation)

    monkeypatch.setattr(Generation, "__post_init__", counted)
    first = ma.evaluate(toy, problems[:2], **sampled)
    ma.evaluate(toy, problems[:3], **sampled)
    ma.evaluate(toy, problems[:3], {"slash": SLASH}, **sampled)
    last = ma.evaluate(toy, problems[:3], {"slash": SLASH}, samples=2, **sampled)
    assert asked == [2, 1, 3, 6]
    assert len(last.answers) == 12 == len(ma.load_evaluation(path).answers)
    assert [a for a in last.answers if a in first.answers] == list(first.answers)
    provenance = ma.load_evaluation(path).provenance
    assert provenance["samples"] == 2
    assert list(provenance["conditions"]) == ["baseline", "slash"]
    ma.evaluate(toy, problems[:1], **sampled)  # fewer: nothing is lost
    assert len(ma.load_evaluation(path).answers) == 12


def test_a_file_of_another_run_is_not_extended(toy, problems, tmp_path):
    path = tmp_path / "e.jsonl"
    options = {
        "prompts": problems[:1],
        "conditions": {"slash": SLASH},
        "new_tokens": 8,
        "out": path,
    }
    ma.evaluate(toy, **options)
    before = path.read_text()
    swapped = [replace(problems[1], id=problems[0].id)]
    regraded = [replace(problems[0], solution="1000000")]
    for changed, message in (
        ({"conditions": {"slash": ma.MeaninglessTokens("/", 7)}}, "the condition 'slash' differs"),
        ({"prompts": swapped}, "prompt 0 under 'baseline' differs in its tokens"),
        ({"prompts": regraded}, "prompt 0 under 'baseline' differs in its solution"),
        ({"new_tokens": 9}, "new_tokens differs"),
        ({"seed": 3}, "seed differs"),
    ):
        with pytest.raises(OptionError, match=message):
            ma.evaluate(toy, **options | changed)
        assert path.read_text().splitlines()[1:] == before.splitlines()[1:]


def exchanged(model, conditions, problems):
    """Requests, and their answers by two rows at a time; each answer has to be as it is alone."""
    native = model._mechattn.native
    end = frozenset([model.tokenizer.eos_token_id])
    requests = [
        Request(prompt.id, condition.apply(prompt, model), 0)
        for condition, prompt in zip(conditions, problems, strict=False)
    ]
    generation = Generation(native, requests, 2, 24, end)
    together = {}
    lengths = set()
    while generation.is_open:
        together |= generation.advance()
        lengths.add(generation.batch.visible.shape[1])
    assert len(lengths) > 2, "rows were exchanged"
    for number, request in enumerate(requests):
        (alone,) = answers(native, [request], 24, end)
        assert together[number].tokens == alone.tokens, number
        assert together[number].finished == alone.finished
        assert together[number].logprob == pytest.approx(alone.logprob, abs=1e-4)
    return together


def test_rows_that_take_the_place_of_ended_ones_change_nothing(problems, shared):
    conditions = [ma.Baseline(), SLASH, SLASH.unshifted()]
    exchanged(shared("toy:gemma3"), conditions, problems)


def test_masks_and_interventions_stay_with_their_rows(toy, problems):
    """Interventions act in the order of their condition: (A, B) in one row, and (B, A) in another."""
    ablation = ma.interventions.HeadAblation(((0, 1),))
    shift = ma.interventions.AffineAttention(shift=torch.ones(8, 16), layers=0)
    one = ma.Baseline(intervention=(ablation, shift))
    other = ma.Baseline(intervention=(shift, ablation))
    conditions = [one, other, SLASH, SLASH.unshifted(), SLASH.masked()]
    answered = exchanged(toy, conditions, [problems[0], *problems])
    assert answered[0].tokens != answered[1].tokens


def test_a_batch_stays_full_while_problems_wait(toy, problems):
    """The control: in batches that wait for their longest answer the model reads more rows."""
    end = frozenset([toy.tokenizer.eos_token_id])
    requests = [Request(prompt.id, ma.Baseline().apply(prompt, toy), 0) for prompt in problems]
    generation = Generation(toy._mechattn.native, requests, 3, 60, end)
    open_rows = []
    read_last_tokens = generation.batch.read_last_tokens

    def counted():
        open_rows.append((generation.batch.open_count, len(generation.waiting_numbers)))
        return read_last_tokens()

    generation.batch.read_last_tokens = counted
    answered = {}
    while generation.is_open:
        answered |= generation.advance()
    assert all(count == 3 for count, waiting in open_rows if waiting)
    lengths = [len(answered[number].tokens) for number in range(len(requests))]
    static_steps = sum(max(lengths[start : start + 3]) for start in range(0, len(lengths), 3))
    assert len(open_rows) < static_steps


def test_a_file_that_is_no_evaluation_stays(evaluation, tmp_path):
    path = tmp_path / "e.jsonl"
    for content in ("a thesis", '{"provenance": {}, "text": "mine"}\n', '"provenance"\n'):
        path.write_text(content)
        with pytest.raises(OutputError, match="exists and is not an evaluation"):
            evaluation.save(path)
        assert path.read_text() == content
    path.write_text("")
    evaluation.save(path)
    evaluation.save(path)
    assert ma.load_evaluation(path).answers == evaluation.answers
    assert ma.load_evaluation(path).provenance["model"] == "toy:llama"


def test_two_at_a_time_on_one_file(toy, problems, tmp_path, monkeypatch):
    """The second is refused at once, the file is as if it had not come, and no lock is left."""
    path = tmp_path / "e.jsonl"
    advance = Generation.advance
    refused = []

    def meanwhile(generation):
        monkeypatch.setattr(Generation, "advance", advance)
        with pytest.raises(OutputError, match=r"another process is adding answers to .*e\.jsonl"):
            ma.evaluate(toy, problems[:2], new_tokens=4, out=path)
        refused.append(path)
        return advance(generation)

    monkeypatch.setattr(Generation, "advance", meanwhile)
    evaluation = ma.evaluate(toy, problems[:2], new_tokens=4, out=path)
    assert refused == [path]
    assert ma.load_evaluation(path).answers == evaluation.answers
    assert len(path.read_text().splitlines()) == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_keeps_the_answers_before(toy, problems, tmp_path):
    path = tmp_path / "e.jsonl"
    one_answer = tmp_path / "small.jsonl"
    ma.evaluate(toy, problems[:1], new_tokens=4, out=one_answer)
    room = one_answer.stat().st_size + 40
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            OutputError, match=r"answers could not be added to .*Earlier answers are kept"
        ):
            ma.evaluate(toy, problems[:3], new_tokens=4, batch=1, out=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(ma.load_evaluation(path).answers) == 1
    assert len(ma.evaluate(toy, problems[:3], new_tokens=4, batch=1, out=path).answers) == 3
    assert len(ma.load_evaluation(path).answers) == 3


@pytest.mark.parametrize(
    "first_line",
    [
        "hello",
        '{"provenance": null}',
        '{"provenance": {"groups": []}}',
        '{"provenance": ' + "[" * 99_999,
    ],
)
def test_a_provenance_of_another_form_is_told_in_words(tmp_path, first_line):
    path = tmp_path / "e.jsonl"
    path.write_text(first_line + "\n")
    with pytest.raises(OutputError, match="is not an evaluation"):
        ma.load_evaluation(path)


@pytest.mark.parametrize(("field", "value"), [("prompt", ["a"]), ("tokens", [True]), ("right", 1)])
def test_an_answer_field_of_a_wrong_type_is_refused(tmp_path, field, value):
    path = tmp_path / "e.jsonl"
    by_hand.evaluation(baseline=[1, 0]).save(path)
    about, first, second = path.read_text().splitlines()
    changed = json.dumps(json.loads(first) | {field: value})
    path.write_text("\n".join([about, changed, second, ""]))
    with pytest.raises(OutputError, match=f"line 2 of .* is not an answer: its {field} is"):
        ma.load_evaluation(path)


def test_log_probabilities_are_those_of_a_whole_pass(toy, problems):
    """Mean log-softmax of each token of the answer, the end token too, in one pass over prompt and answer."""
    native = toy._mechattn.native
    end = toy.tokenizer.eos_token_id
    requests = [Request(prompt.id, ma.Baseline().apply(prompt, toy), 0) for prompt in problems[:2]]
    for limit in (60, 5):
        generated = answers(native, requests, limit, frozenset([end]), 1.5)
        for request, answer in zip(requests, generated, strict=True):
            tokens = request.sequence.tokens
            written = torch.tensor([*answer.tokens, *([end] if answer.finished else [])])
            with torch.no_grad():
                logits = native(torch.cat([tokens, written])[None]).logits[0].double()
            logprobs = logits[len(tokens) - 1 : -1].log_softmax(-1).gather(-1, written[:, None])
            assert answer.logprob == pytest.approx(float(logprobs.mean()), abs=1e-4)


def test_pass_at_k_and_its_figure():
    answers = []
    for condition, shares in (("baseline", (0, 2, 4, 1)), ("slash", (0, 0, 3, 4))):
        for number, share in enumerate(shares):
            answers += [by_hand.answer(number, condition, n < share, sample=n) for n in range(4)]
    sampled = Evaluation(tuple(answers), {})
    table = sampled.pass_at_k([1, 4])
    assert table.k.tolist() == [1, 4, 1, 4]
    assert table.estimate.tolist() == [7 / 16, 3 / 4, 7 / 16, 1 / 2]
    of_four = sampled.pass_at_k(4)
    assert of_four.equals(table[table.k == 4].reset_index(drop=True))
    with pytest.raises(OptionError, match="k=5 with 4 answers"):
        sampled.pass_at_k(5)

    figure = ma.render.by_samples({"pass@k": table, "again": table}, "a toy")
    assert [trace.name for trace in figure.data] == 2 * ["baseline", "slash"]
    assert [title.text for title in figure.layout.annotations][:2] == ["pass@k", "again"]
    np.testing.assert_allclose(figure.data[1].y, 100 * table.estimate[2:])
    assert [trace.xaxis for trace in figure.data] == ["x", "x", "x2", "x2"]


def test_the_noise_of_the_baseline(toy, problems):
    """With an effect there is something to see: a model that rounding changes; without one, nothing."""
    table = ma.baseline_noise(toy, problems[:2], new_tokens=4, batch=4, other_batch=1)
    assert list(table.repetition) == ["float32, batch 4", "float32, batch 1", "bfloat16, batch 4"]
    assert table.difference[0] == 0 == table.texts[0]
    assert next(toy.parameters()).dtype == torch.float32, "the model is as it was"
    coarse = ma.baseline_noise(
        toy, problems[:4], new_tokens=20, batch=4, other_batch=2, samples=2, temperature=3.0
    )
    assert coarse.texts[2] > 0, "sampled far from the likeliest, bfloat16 ends elsewhere"
    with pytest.raises(OptionError, match="answers, which shows no noise"):
        ma.baseline_noise(toy, problems, other_batch=32)
    with pytest.raises(OptionError, match="both runs have the same batches of 8 answers"):
        ma.baseline_noise(toy, problems, batch=16, other_batch=8)


def test_answers_are_paired_by_problem_whatever_the_order():
    """A file that was written as answers came holds them in the order of their lengths."""
    right = [number % 3 == 0 for number in range(12)]
    evaluation = by_hand.evaluation(baseline=right, slash=right)
    other = Evaluation(tuple(reversed(evaluation.answers)), {})
    assert (other.right("slash")[:, 0] == right[::-1]).all()
    for one, another in ((evaluation, other), (other, evaluation)):
        compared = one.compare("slash", "slash", other=another)
        assert compared["only_first"] == compared["only_second"] == 0
    against = by_hand.evaluation(baseline=right, slash=[not is_right for is_right in right])
    assert evaluation.compare("slash", other=against)["difference"] == 0
    noticed = evaluation.compare("slash", "slash", other=against)
    assert noticed["only_first"] == 4, "negative control"


def test_missing_answers_and_odd_characters(tmp_path):
    text = "x\u2028y\x85 é"
    four = [by_hand.answer(p, sample=n, text=text) for p in "ab" for n in (0, 1)]
    path = tmp_path / "e.jsonl"
    Evaluation(tuple(four), {}).save(path)
    assert ma.load_evaluation(path).answers[0].text == text
    path.write_bytes(path.read_bytes() + '{"prompt": "é'.encode()[:-1])
    assert len(ma.load_evaluation(path).answers) == 4
    part = Evaluation(tuple(four[:3]), {})
    for call in (part.accuracy, lambda: part.compare("baseline"), lambda: part.pass_at_k(1)):
        with pytest.raises(OptionError, match="1 answers under 'baseline' are missing"):
            call()


def test_prompts_that_cannot_be_graded(toy, shared):
    with pytest.raises(PromptError, match="has no solution"):
        ma.evaluate(toy, "Tom has 3 apples.")
    with pytest.raises(PromptError, match="already holds an answer"):
        ma.evaluate(toy, ma.Prompt("Tom has 3 apples.", answer="3", solution="3"))
    prompt = ma.Prompt("Tom has 3 apples.", solution="3")
    for name, message in (
        ("toy:falcon", "generation with cut edges is not supported"),
        ("toy:gemma3", "has layers with windows"),
    ):
        with pytest.raises(OptionError, match=message):
            ma.evaluate(shared(name), prompt, {"masked": SLASH.masked()}, new_tokens=5)


def test_answers_are_not_given_to_another_problem_of_their_id():
    """Prompts without an id are named after their places, of a part of them others."""
    first, second = (ma.Prompt(f"What is 2 + {n}?", solution=str(2 + n)) for n in (3, 4))
    answers = [by_hand.answer(number, solution=str(5 + number)) for number in (0, 1)]
    answered = Evaluation(tuple(answers), {}).answered([first, second])
    assert [prompt.id for prompt in answered] == ["0", "1"]
    for another in (second, ma.Prompt("What is 2 + 4?")):
        with pytest.raises(OptionError, match="prompt 0 has another solution than the problem"):
            Evaluation(tuple(answers), {}).answered([another])


def test_different_problems_are_not_compared(evaluation):
    with pytest.raises(OptionError, match="different problems"):
        evaluation.compare("slash", other=by_hand.evaluation(baseline=[1, 0]))
