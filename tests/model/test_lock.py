"""Two threads on one loaded model take turns, whatever they call; models that share nothing don't wait."""

import copy
import pickle
import threading

import pytest
import torch
from transformers import LlamaForCausalLM

import mechattn as ma
from mechattn.evaluation import server_probe as probe
from mechattn.model import hooked as lock
from mechattn.model.hooked import facts_of
from tests.tiny_families import bridge_of, tiny_model

SLASH = ma.MeaninglessTokens("/", count=3)
ASKED = ma.Prompt("What is 2 + 3?", id="a", solution="5")
ANSWERED = [ma.Prompt(f"What is 2 + {n}?", id=str(n), answer=f" It is {2 + n}.") for n in (3, 4)]


def run(**options):
    return lambda model: ma.run(model, "What is 2 + 3?", {}, layers=0, **options)


def ablated(model):
    with torch.no_grad(), ma.interventions.HeadAblation(((0, 0),)).on(model):
        model(torch.arange(5, 9)[None])


USES = {
    "auto": run(engine="auto"),
    "evaluate": lambda model: ma.evaluate(model, [ASKED], new_tokens=1),
    "probe of a server": lambda model: probe.reference_of(
        facts_of(model).native, model.tokenizer, [5, 6], [7]
    ),
    "patch": lambda model: ma.patch(model, ANSWERED, SLASH, at=[(0, 0)], direction="denoising"),
    "record_keys_values": lambda model: ma.record_keys_values(model, [ASKED], SLASH, layers=0),
    "verify_model": ma.verify_model,
    "load_model": lambda model: ma.load_model(model),
    "an intervention by itself": ablated,
}


@pytest.fixture(scope="module")
def model():
    """A model of this file's own, which another test does not find broken if one fails here."""
    return bridge_of(tiny_model("Llama"))


@pytest.fixture
def waited(monkeypatch):
    """Threads that had to wait, each as the sentence that it was told; nobody waits ten seconds for it."""
    told = []
    monkeypatch.setattr(lock, "_SECONDS_BEFORE_WARNING", 0.0)
    monkeypatch.setattr(lock, "warn", told.append)
    return told


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_second_thread_waits_until_the_first_has_ended(model, use, waited, monkeypatch):
    met, seen, second = threading.Event(), [], []
    monkeypatch.setattr(lock, "warn", lambda sentence: (waited.append(sentence), met.set()))

    def meet(*_):
        """In the first forward pass, another thread begins the same; no further until it waits, or is here too."""
        seen.append(threading.get_ident())
        if len(set(seen)) == 2:
            met.set()
        if len(seen) == 1:
            second.append(threading.Thread(target=use, args=(model,)))
            second[0].start()
            assert met.wait(60)
            seen.append("on")

    use(model)  # what is found out once about a model is known from now on
    if use is USES["load_model"]:
        facts = facts_of(model)  # as if it were not verified yet
        facts.report = None
        facts.to_verify = True
    handles = [
        each.register_forward_pre_hook(meet) for each in (model.blocks[0], facts_of(model).native)
    ]
    try:
        use(model)
    finally:
        [handle.remove() for handle in handles]
    second[0].join()
    assert seen.index("on") == 1, "both threads were inside the model"
    assert "another thread has used " in waited[0]


def held_by_others(model):
    """Whether a second thread has to wait for the model, as it finds out itself."""
    found = []

    def look():
        locks = lock._locks_of(model)
        free = [each.acquire(blocking=False) for each in locks]
        [each.release() for each, taken in zip(locks, free, strict=True) if taken]
        found.append(not all(free))

    (thread := threading.Thread(target=look)).start()
    thread.join()
    return found[0]


def test_models_that_share_something_share_the_lock(model):
    config = model.original_model.config
    one, other, alone = (
        LlamaForCausalLM(config),
        LlamaForCausalLM(config),
        LlamaForCausalLM(copy.deepcopy(config)),
    )
    with lock.holding(one):
        assert held_by_others(one)
        assert held_by_others(other), (
            "streaming is switched on in the configuration, which both have"
        )
        assert not held_by_others(alone)
    assert not held_by_others(one)
    with lock.holding(model):
        assert held_by_others(model.original_model)
        assert held_by_others(facts_of(model).native), (
            "answers are generated on the parameters of the hooked model"
        )


def test_loaded_and_copied_models_have_their_own_locks(toy):
    with lock.holding(toy):
        assert not held_by_others(ma.load_model("toy:llama", verify=False))
        native = facts_of(toy).native
        assert not held_by_others(copy.deepcopy(native))
        assert not held_by_others(pickle.loads(pickle.dumps(native)))
    with lock.holding("toy:llama"), lock.holding(torch.nn.Identity()):
        pass  # there is nothing to hold


def test_the_lock_is_reentrant_and_freed_after_an_error(model):
    def fails(same):
        with lock.holding(same):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lock.alone(fails)(model)
    assert not held_by_others(model)
