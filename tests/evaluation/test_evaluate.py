"""Answers against plain transformers, one prompt at a time; stored, continued, compared."""

import json
from functools import cache, partial

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import Interrupted, OptionError, OutputError, PromptError
from mechattn.evaluation import evaluate as module
from mechattn.evaluation import progress
from mechattn.evaluation.generate import Generation, Request, answers

SLASH = ma.MeaninglessTokens("/", 20)


@cache
def loaded(name):
    return ma.load_model(name, verify=False)


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=8)


@pytest.fixture(scope="module")
def evaluation(toy, some):
    conditions = {
        "slash": SLASH,
        "arm": ma.Baseline(intervention=ma.interventions.ARM(strength=2.0, form="released_llama")),
    }
    return ma.evaluate(toy, some, conditions, new_tokens=60)


@pytest.mark.parametrize("name", ["toy:gemma3", "toy:falcon"])
def test_answers_are_those_of_plain_generation(name, some):
    """Left-padded batches with a cache against transformers' own generate, one prompt at a time, without padding."""
    model = loaded(name)
    native, end = model._mechattn.native, model.tokenizer.eos_token_id
    sequences = [SLASH.apply(some[0], model), *(ma.Baseline().apply(p, model) for p in some[1:3])]
    got = answers(
        native, [Request(str(i), s, 0) for i, s in enumerate(sequences)], 40, frozenset([end])
    )
    for answer, sequence in zip(got, sequences, strict=True):
        with torch.no_grad():
            out = native.generate(
                sequence.tokens[None], attention_mask=torch.ones(1, len(sequence), dtype=torch.long),
                max_new_tokens=40, do_sample=False, eos_token_id=end, pad_token_id=0,
            )  # fmt: skip
        plain = out[0, len(sequence) :].tolist()
        finished = end in plain
        assert list(answer.tokens) == (plain[: plain.index(end)] if finished else plain), name
        assert answer.finished == finished


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("toy:llama", "masked"),
        ("toy:llama", "unshifted"),
        ("toy:llama", "cut"),
        ("toy:gemma3", "unshifted"),
    ],
)
def test_variants_at_each_step_are_those_of_the_hooked_model(name, variant, some):
    """Every generated token is the likeliest one of a hooked forward pass over the whole sequence so far."""
    from mechattn.engine.engines import forward_through_hooks
    from mechattn.prompts.token_sequences import pad_right

    model = loaded(name)
    condition = {
        "masked": SLASH.masked(),
        "unshifted": SLASH.unshifted(),
        "cut": SLASH.under(ma.interventions.AttentionKnockout(("question", "answer"), "inserted")),
    }[variant]
    sequence = condition.apply(some[0], model)
    other = ma.Baseline().apply(some[1], model)
    (got, _) = answers(
        model._mechattn.native,
        [Request("0", sequence, 0), Request("1", other, 0)],
        12,
        frozenset([1]),
    )
    logits = []
    handle = model.original_model.register_forward_hook(
        lambda m, given, out: logits.append(out.logits[0, -1])
    )
    from dataclasses import replace

    longer, last = sequence, model.cfg.n_layers - 1
    for token in got.tokens:
        batch = pad_right([longer], [(0, "x")], 0)
        forward_through_hooks(
            model, batch, {last: ma_window(model, last)}, lambda layer, rows: None, last
        )
        assert int(logits[-1].argmax()) == token
        add = torch.tensor([token])
        edge_mask = longer.edge_mask and replace(
            longer.edge_mask,
            queries=torch.cat([longer.edge_mask.queries, torch.tensor([longer.edge_mask.later])]),
            keys=torch.cat([longer.edge_mask.keys, torch.tensor([False])]),
        )
        longer = replace(
            longer,
            tokens=torch.cat([longer.tokens, add]),
            origin=torch.cat([longer.origin, longer.origin.max()[None] + 1]),
            segment=torch.cat([longer.segment, torch.tensor([5])]),
            edge_mask=edge_mask,
        )
    handle.remove()
    assert len(got.tokens) == 12 or got.finished


def ma_window(model, layer):
    from mechattn.model.hooks import attention_window

    return attention_window(model, layer)


def test_hooked_and_plain_logits_agree(toy, some):
    tokens = ma.Baseline().apply(some[0], toy).tokens[None]
    with torch.no_grad():
        hooked, plain = toy(tokens), toy._mechattn.native(tokens).logits
    torch.testing.assert_close(hooked, plain, atol=2e-4, rtol=1e-4)


def test_grades_and_accuracy(evaluation, some):
    table = evaluation.accuracy().set_index("condition")
    for name in ("baseline", "slash", "arm"):
        rows = [a for a in evaluation.answers if a.condition == name]
        right = [a.text.split("Answer:")[-1].strip() == a.solution for a in rows]
        assert [a.right for a in rows] == right
        assert table.accuracy[name] == np.mean(right)
        assert table.unread[name] == sum("Answer:" not in a.text for a in rows)
    assert table.accuracy["baseline"] >= 7 / 8
    assert [a.prompt for a in evaluation.answers if a.condition == "arm"] == [p.id for p in some]
    assert {"difference", "p", "detectable"} <= set(evaluation.compare("slash"))


def test_batches_decide_nothing(toy, some, evaluation):
    conditions = {
        "slash": SLASH,
        "arm": ma.Baseline(intervention=ma.interventions.ARM(strength=2.0, form="released_llama")),
    }
    one = ma.evaluate(toy, some, conditions, new_tokens=60, batch=3)
    same = [a.tokens == b.tokens for a, b in zip(one.answers, evaluation.answers, strict=True)]
    assert np.mean(same) > 0.9  # rounding may turn a tie
    sampled = [
        ma.evaluate(toy, some[:4], samples=3, temperature=3.0, new_tokens=30, batch=batch)
        for batch in (5, 12)
    ]
    same = [
        a.tokens == b.tokens for a, b in zip(sampled[0].answers, sampled[1].answers, strict=True)
    ]
    assert np.mean(same) > 0.9
    assert len({a.tokens for a in sampled[0].answers}) > 4


def test_sampling_follows_the_distribution(toy, some):
    """The first token of many samples against the softmax of the logits."""
    sequence = ma.Baseline().apply(some[0], toy)
    with torch.no_grad():
        expected = (toy._mechattn.native(sequence.tokens[None]).logits[0, -1].double() / 3).softmax(
            -1
        )
    got = answers(
        toy._mechattn.native,
        [Request("0", sequence, s) for s in range(400)],
        1,
        frozenset([10**6]),
        3.0,
    )
    counts = torch.bincount(torch.tensor([a.tokens[0] for a in got]), minlength=len(expected)) / 400
    likely = expected > 0.05
    assert likely.any()
    assert (counts[likely] - expected[likely]).abs().max() < 4 * float(
        (expected.max() / 400).sqrt()
    )


def test_a_run_that_was_cut_off_goes_on(toy, some, tmp_path, monkeypatch):
    """Ctrl-C in the middle of a batch, and a line cut off: every ended answer is kept, none asked again."""
    whole = tmp_path / "whole.jsonl"
    conditions = {"slash": SLASH}
    expected = ma.evaluate(toy, some, conditions, new_tokens=60, batch=4, out=whole)
    path, ended = tmp_path / "part.jsonl", []
    real = module.Generation.advance

    def failing(generation):
        if len(ended) >= 6:
            raise KeyboardInterrupt
        answers = real(generation)
        ended.extend(answers)
        return answers

    monkeypatch.setattr(module.Generation, "advance", failing)
    with pytest.raises(Interrupted, match=r"stopped; \d+ of 16 answers are kept in .*part\.jsonl"):
        ma.evaluate(toy, some, conditions, new_tokens=60, batch=4, out=path)
    with pytest.raises(Interrupted, match="no answer is kept, since no file was given"):
        ma.evaluate(toy, some, conditions, new_tokens=60, batch=4)
    before = ma.load_evaluation(path).answers
    assert len(before) >= 6
    with open(path, "a") as lines:
        lines.write('{"prompt": "7", "condi')

    asked = []

    def counted(generation):
        asked[:] = [generation.requests]
        return real(generation)

    monkeypatch.setattr(module.Generation, "advance", counted)
    again = ma.evaluate(toy, some, conditions, new_tokens=60, batch=4, out=path)
    assert len(asked[0]) == 16 - len(before), "what was there was not asked again"
    assert [a.text for a in again.answers] == [a.text for a in expected.answers]
    stored = ma.load_evaluation(path)
    assert {a.text for a in stored.answers} == {a.text for a in expected.answers}
    assert len(stored.answers) == 16
    with pytest.raises(OptionError, match=r"answers of another run .seed differs"):
        ma.evaluate(toy, some, conditions, new_tokens=60, out=path, seed=3)


def test_more_problems_conditions_and_samples_extend_a_file(toy, some, tmp_path, monkeypatch):
    path, asked = tmp_path / "e.jsonl", []
    sampled = {"new_tokens": 8, "temperature": 1.0, "out": path}
    real = module.Generation.__post_init__

    def counted(generation):
        asked.append(len(generation.requests))
        real(generation)

    monkeypatch.setattr(module.Generation, "__post_init__", counted)
    first = ma.evaluate(toy, some[:2], **sampled)
    ma.evaluate(toy, some[:3], **sampled)
    ma.evaluate(toy, some[:3], {"slash": SLASH}, **sampled)
    last = ma.evaluate(toy, some[:3], {"slash": SLASH}, samples=2, **sampled)
    assert asked == [2, 1, 3, 6]
    assert len(last.answers) == 12 == len(ma.load_evaluation(path).answers)
    assert [a for a in last.answers if a in first.answers] == list(first.answers)
    provenance = ma.load_evaluation(path).provenance
    assert (provenance["samples"], list(provenance["conditions"])) == (2, ["baseline", "slash"])
    ma.evaluate(toy, some[:1], **sampled)  # fewer: nothing is lost
    assert len(ma.load_evaluation(path).answers) == 12


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"conditions": {"slash": ma.MeaninglessTokens("/", 7)}}, "the condition 'slash' differs"),
        ({"prompts": "swapped"}, "the tokens of prompt 0 under 'baseline' differ"),
        ({"prompts": "regraded"}, "the solution of prompt 0 under 'baseline' differ"),
        ({"new_tokens": 9}, "new_tokens differs"),
    ],
    ids=str,
)
def test_a_file_of_another_run_is_not_extended(toy, some, tmp_path, other, message):
    from dataclasses import replace

    path = tmp_path / "e.jsonl"
    options = {"prompts": some[:1], "conditions": {"slash": SLASH}, "new_tokens": 8, "out": path}
    ma.evaluate(toy, **options)
    before = path.read_text()
    changed = {
        "swapped": [replace(some[1], id=some[0].id)],
        "regraded": [replace(some[0], solution="1000000")],
    }
    if "prompts" in other:
        other = {"prompts": changed[other["prompts"]]}
    with pytest.raises(OptionError, match=message):
        ma.evaluate(toy, **options | other)
    assert path.read_text().splitlines()[1:] == before.splitlines()[1:]


@pytest.mark.parametrize("name", ["toy:llama", "toy:gemma3"])
def test_rows_that_take_the_place_of_ended_ones_change_nothing(name, some):
    """Two rows at a time, many exchanges, masks and interventions: each answer as it is alone."""
    model = loaded(name)
    native, end = model._mechattn.native, frozenset([model.tokenizer.eos_token_id])
    conditions = [
        ma.Baseline(),
        SLASH,
        SLASH.unshifted(),
        ma.Baseline(intervention=ma.interventions.HeadAblation(((0, 1),))),
    ]
    if name != "toy:gemma3":
        conditions.append(SLASH.masked())
    requests = [
        Request(prompt.id, condition.apply(prompt, model), sample)
        for sample, condition in enumerate(conditions)
        for prompt in some[:3]
    ]
    generation = Generation(native, requests, 2, 40, end)
    together, lengths = {}, set()
    while generation.is_open:
        together |= generation.advance()
        lengths.add(generation.rows.real.shape[1])
    assert len(lengths) > 4, "rows were exchanged"
    for number, request in enumerate(requests):
        (alone,) = answers(native, [request], 40, end)
        assert together[number].tokens == alone.tokens, (name, number)
        assert together[number].finished == alone.finished
        assert together[number].logprob == pytest.approx(alone.logprob, abs=1e-4)


def test_a_batch_stays_full_while_problems_wait(toy, some):
    """The control: in batches that wait for their longest answer the model reads more rows."""
    end = frozenset([toy.tokenizer.eos_token_id])
    requests = [Request(p.id, ma.Baseline().apply(p, toy), 0) for p in some]
    generation = Generation(toy._mechattn.native, requests, 3, 60, end)
    open_rows = []
    real = generation.rows.read_last_tokens

    def counted(options):
        open_rows.append((generation.rows.open_count, len(generation.waiting)))
        return real(options)

    generation.rows.read_last_tokens = counted
    answered = {}
    while generation.is_open:
        answered |= generation.advance()
    assert all(count == 3 for count, waiting in open_rows if waiting)
    lengths = [len(answered[number].tokens) for number in range(len(requests))]
    static_steps = sum(max(lengths[start : start + 3]) for start in range(0, len(lengths), 3))
    assert len(open_rows) < static_steps


def test_a_file_that_is_no_evaluation_stays(evaluation, tmp_path):
    path = tmp_path / "e.jsonl"
    for content in (
        "a thesis",
        '{"question": "Tom has 3 apples."}\n',
        '{"provenance": {}, "text": "mine"}\n',
        '"provenance"\n',
    ):
        path.write_text(content)
        with pytest.raises(OutputError, match="exists and is not an evaluation"):
            evaluation.save(path)
        assert path.read_text() == content
    path.write_text("")
    evaluation.save(path)
    evaluation.save(path)
    assert ma.load_evaluation(path).answers == evaluation.answers


def test_the_bar_of_a_resumed_run_starts_at_what_is_there(toy, some, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, disable=False))
    path = tmp_path / "e.jsonl"
    ma.evaluate(toy, some[:2], new_tokens=4, out=path)
    assert " 0/2 " in capsys.readouterr().err
    ma.evaluate(toy, some[:3], new_tokens=4, out=path)
    shown = capsys.readouterr().err
    assert " 2/3 " in shown
    assert " 3/3 " in shown
    assert " 0/" not in shown


def test_a_last_line_of_somebody_is_not_taken_for_one_that_was_cut_off(toy, some, tmp_path):
    path = tmp_path / "e.jsonl"
    ma.evaluate(toy, some[:1], new_tokens=4, out=path)
    before = path.read_text() + "# Tom's answer is the one to look at\n"
    path.write_text(before)
    with pytest.raises(OutputError, match=r"line 3 of .* is not an answer"):
        ma.evaluate(toy, some[:1], new_tokens=4, out=path)
    assert path.read_text() == before


def test_two_at_a_time_on_one_file(toy, some, tmp_path, monkeypatch):
    """The second is refused at once, the file is as if it had not come, and no lock is left."""
    path, real = tmp_path / "e.jsonl", module.Generation.advance
    refused = []

    def meanwhile(generation):
        monkeypatch.setattr(module.Generation, "advance", real)
        with pytest.raises(
            OutputError, match=r"another process is adding answers to .*e\.jsonl"
        ) as raised:
            ma.evaluate(toy, some[:2], new_tokens=4, out=path)
        refused.append(raised.value)
        return real(generation)

    monkeypatch.setattr(module.Generation, "advance", meanwhile)
    made = ma.evaluate(toy, some[:2], new_tokens=4, out=path)
    assert len(refused) == 1
    assert ma.load_evaluation(path).answers == made.answers
    assert len(path.read_text().splitlines()) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["e.jsonl"]


def test_a_full_disk_keeps_the_answers_before(toy, some, tmp_path):
    import resource

    path = tmp_path / "e.jsonl"
    ma.evaluate(toy, some[:1], new_tokens=4, out=tmp_path / "small.jsonl")
    room = (tmp_path / "small.jsonl").stat().st_size + 40
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(
            OutputError, match=r"answers could not be added to .*Earlier answers are kept"
        ):
            ma.evaluate(toy, some[:3], new_tokens=4, batch=1, out=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(ma.load_evaluation(path).answers) == 1
    assert len(ma.evaluate(toy, some[:3], new_tokens=4, batch=1, out=path).answers) == 3
    assert len(ma.load_evaluation(path).answers) == 3


def test_interventions_act_in_the_order_of_their_condition(toy, some):
    """(A, B) in one row and (B, A) in the next of the same batch: each as it is alone."""
    one, other = (
        ma.interventions.HeadAblation(((0, 1),)),
        ma.interventions.AffineAttention(shift=torch.ones(8, 16), layers=0),
    )
    orders = [
        ma.Baseline(intervention=pair).apply(some[0], toy) for pair in ((one, other), (other, one))
    ]
    native, end = toy._mechattn.native, frozenset([10**6])
    together = answers(native, [Request("0", sequence, 0) for sequence in orders], 8, end)
    alone = [answers(native, [Request("0", sequence, 0)], 8, end)[0] for sequence in orders]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert alone[0].tokens != alone[1].tokens


def test_generated_answers_go_through_an_analysis(toy, some, evaluation):
    right = [p for p in some if evaluation.answers[int(p.id)].text.strip()]
    result = ma.run(
        toy, evaluation.answered(right), {"slash": SLASH}, ma.ReceivedAttention("answer")
    )
    mass = result["received_attention"].mass_by_segment.sel(segment=["question", "answer"])
    assert mass.notnull().all()
    assert (mass.sum("segment") < 1).all()


def test_saved_and_loaded(evaluation, tmp_path):
    evaluation.save(tmp_path / "e.jsonl")
    again = ma.load_evaluation(tmp_path / "e.jsonl")
    assert again.answers == evaluation.answers
    assert json.loads((tmp_path / "e.jsonl").read_text().splitlines()[0])["provenance"]["model"]
    (tmp_path / "x.jsonl").write_text("hello")
    with pytest.raises(OutputError, match="is not an evaluation"):
        ma.load_evaluation(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "about", ["[]", '["groups"]', "null", '{"groups": []}', '{"conditions": 5}', "[" * 99_999]
)
def test_a_provenance_of_another_form_is_told_in_words(evaluation, tmp_path, about):
    path = tmp_path / "e.jsonl"
    path.write_text('{"provenance": ' + about + "}\n")
    with pytest.raises(OutputError, match="is not an evaluation"):
        ma.load_evaluation(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ["a"]),
        ("sample", True),
        ("text", 5),
        ("tokens", [True]),
        ("right", 1),
        ("logprob", "high"),
    ],
)
def test_an_answer_with_a_field_of_another_type_is_told_in_words(
    evaluation, tmp_path, field, value
):
    evaluation.save(path := tmp_path / "e.jsonl")
    first, answer, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps(json.loads(answer) | {field: value}), *rest, ""]))
    with pytest.raises(OutputError, match=f"line 2 of .* is not an answer: its {field} is"):
        ma.load_evaluation(path)


def test_log_probabilities_are_those_of_a_whole_pass(toy, some):
    """Mean log-softmax of each token of the answer, the end token too, in one pass over prompt and answer."""
    native, end = toy._mechattn.native, toy.tokenizer.eos_token_id
    sequences = [ma.Baseline().apply(p, toy) for p in some[:2]]
    asked = [Request(str(i), s, 0) for i, s in enumerate(sequences)]
    for limit in (60, 5):
        for sequence, answer in zip(
            sequences, answers(native, asked, limit, frozenset([end]), 1.5), strict=True
        ):
            written = torch.tensor([*answer.tokens, *([end] if answer.finished else [])])
            with torch.no_grad():
                logits = native(torch.cat([sequence.tokens, written])[None]).logits[0].double()
            each = logits[len(sequence) - 1 : -1].log_softmax(-1).gather(-1, written[:, None])
            assert answer.logprob == pytest.approx(float(each.mean()), abs=1e-4)


def test_pass_at_k_best_of_k_and_diversity(toy, some):
    made = ma.evaluate(toy, some[:4], samples=4, new_tokens=60)
    right = made.right("baseline")
    expected = {1: right.mean(), 4: right.any(1).mean()}
    assert dict(made.pass_at_k([1, 4])[["k", "estimate"]].to_numpy()) == pytest.approx(expected)
    assert made.pass_at_k(4).equals(made.pass_at_k([1, 4])[1:].reset_index(drop=True))
    best = [
        max((a for a in made.answers if a.prompt == p.id), key=lambda a: a.logprob).right
        for p in some[:4]
    ]
    assert made.best_of(4).estimate[0] == pytest.approx(np.mean(best))
    assert made.best_of(1).estimate[0] == pytest.approx(right.mean())
    low, high = made.diversity(2)[["low", "high"]].to_numpy()[0]
    assert 0 <= low < made.diversity(2).estimate[0] < high <= 1
    for measure in (made.pass_at_k, made.best_of):
        with pytest.raises(OptionError, match="k=5 with 4 answers"):
            measure(5)


def test_the_noise_of_the_baseline(toy, some):
    """With an effect there is something to see: a model that rounding changes; without one, nothing."""
    table = ma.baseline_noise(toy, some[:4], new_tokens=60, batch=4, other_batch=1)
    assert list(table.repetition) == ["float32, batch 4", "float32, batch 1", "bfloat16, batch 4"]
    assert table.difference[0] == 0 == table.texts[0]
    assert next(toy.parameters()).dtype == torch.float32, "the model is as it was"
    coarse = ma.baseline_noise(
        toy, some[:4], new_tokens=20, batch=4, other_batch=2, samples=2, temperature=3.0
    )
    assert coarse.texts[2] > 0, "sampled far from the likeliest, bfloat16 ends elsewhere"
    with pytest.raises(OptionError, match="in both runs shows no noise"):
        ma.baseline_noise(toy, some, other_batch=32)
    with pytest.raises(OptionError, match="out=… cannot be given"):
        ma.baseline_noise(toy, some, out="answers.jsonl")


def test_figures_of_several_answers(toy, some):
    made = ma.evaluate(toy, some[:3], {"slash": SLASH}, samples=3, new_tokens=30)
    figure = ma.render.by_samples(
        {"pass@k": made.pass_at_k([1, 2]), "best of k": made.best_of([1, 2])}, "a toy"
    )
    assert [t.name for t in figure.data] == 2 * [*made.conditions]
    assert [a.text for a in figure.layout.annotations][:2] == ["pass@k", "best of k"]
    np.testing.assert_allclose(figure.data[1].y, 100 * made.pass_at_k([1, 2]).estimate[2:])
    assert [t.xaxis for t in figure.data] == ["x", "x", "x2", "x2"]
    drawn = ma.render.diversity({"a toy": made.diversity(1)})
    np.testing.assert_allclose(drawn.data[0].y, 100 * made.diversity(1).estimate)


def answered(name, problems, right, samples=1, text=""):
    from mechattn.evaluation.graded_answers import GradedAnswer

    return [
        GradedAnswer(p, name, n, text, (), None, "1", bool(r), True, 0.0)
        for p, r in zip(problems, right, strict=True)
        for n in range(samples)
    ]


def test_answers_are_paired_by_problem_whatever_the_order(tmp_path):
    """A file that was written as answers came holds them in the order of their lengths."""
    from mechattn.evaluation.evaluation import Evaluation

    problems, right = [str(i) for i in range(12)], [i % 3 == 0 for i in range(12)]
    made = Evaluation(
        (*answered("baseline", problems, right), *answered("slash", problems, right)), {}
    )
    other = Evaluation(tuple(reversed(made.answers)), {})
    assert (other.right("slash")[:, 0] == right[::-1]).all()
    for one, two in ((made, other), (other, made)):
        compared = one.compare("slash", "slash", other=two)
        assert compared["only_first"] == compared["only_second"] == 0
    wrong = [not r for r in right]
    against = Evaluation(
        (*answered("baseline", problems, right), *answered("slash", problems, wrong)), {}
    )
    assert made.compare("slash", other=against)["difference"] == 0
    assert made.compare("slash", "slash", other=against)["only_first"] == 4, (
        "the comparison notices"
    )


def test_missing_answers_and_odd_characters(tmp_path):
    from mechattn.evaluation.evaluation import Evaluation

    every = answered("baseline", ["a", "b"], [1, 0], samples=2, text="x\u2028y\x85 é")
    Evaluation(tuple(every), {}).save(tmp_path / "e.jsonl")
    assert ma.load_evaluation(tmp_path / "e.jsonl").answers[0].text == "x\u2028y\x85 é"
    raw = (tmp_path / "e.jsonl").read_bytes() + '{"prompt": "é'.encode()[:-1]
    (tmp_path / "cut.jsonl").write_bytes(raw)
    assert len(ma.load_evaluation(tmp_path / "cut.jsonl").answers) == 4
    part = Evaluation(tuple(every[:3]), {})
    for call in (part.accuracy, lambda: part.compare("baseline"), lambda: part.pass_at_k(1)):
        with pytest.raises(OptionError, match="1 answers of 'baseline' are missing"):
            call()


def test_mediation_of_known_shares():
    from mechattn.evaluation.evaluation import Evaluation
    from mechattn.evaluation.graded_answers import GradedAnswer

    def rows(name, right):
        return [
            GradedAnswer(str(i), name, 0, "", (), None, "1", bool(r), True)
            for i, r in enumerate(right)
        ]

    base, total, half = np.ones(200), np.arange(200) % 2 == 0, np.arange(200) % 4 != 1
    made = Evaluation((*rows("baseline", base), *rows("slash", total), *rows("scale", half)), {})
    table = made.mediation(
        "slash", {"scale": "scale", "all": "slash", "none": "baseline"}
    ).set_index("path")
    assert table.share["scale"] == pytest.approx(0.5)
    assert table.share_low["scale"] < 0.5 < table.share_high["scale"]
    assert table.share["all"] == 1 == table.share_low["all"] == table.share_high["all"]
    assert table.share["none"] == 0
    nothing = made.mediation("baseline", {"scale": "scale"})
    assert nothing.share.isna().all()
    assert nothing.change[0] == pytest.approx(-0.25)
    none = table.loc["none"]
    assert none.change_low < 0 < none.change_high, (
        "no answer differs: that is no difference of 0 for sure"
    )
    assert none.change_high < 0.05
    wide, narrow = (
        made.mediation("slash", {"scale": "scale"}, level=level).loc[0] for level in (0.99, 0.8)
    )
    assert wide.change_low < narrow.change_low < narrow.change_high < wide.change_high
    assert wide.share_low < narrow.share_low < narrow.share_high < wide.share_high
    assert table.change["scale"] == pytest.approx(-0.25)


def test_prompts_that_cannot_be_graded(toy):
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
            ma.evaluate(loaded(name), prompt, {"masked": SLASH.masked()}, new_tokens=5)


def test_different_problems_are_not_compared(toy, some, evaluation):
    other = ma.evaluate(toy, some[:3], new_tokens=5)
    with pytest.raises(OptionError, match="different problems"):
        evaluation.compare("slash", other=other)
    with pytest.raises(OptionError, match="no condition 'dash'"):
        evaluation.compare("dash")
