"""What the tests share: a loaded toy, tiny checkpoints with random weights, random patterns far from uniform."""

import gc
import os
import shutil
import signal
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# The hub is asked for nothing, and a name that is on it alone is refused at once, not after five attempts (23 s).
# huggingface_hub reads this once, when it is imported, so it stands before all that import it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it when it is imported

import jaxtyping
import pytest
import torch

import mechattn as ma
from mechattn.engine.run import make_plan
from mechattn.errors import ModelError
from mechattn.model.checkpoint import toy_folder, toy_tokenizer
from mechattn.model.gguf_files import packaged_file
from tests.tiny_families import tiny_model

# A CPU that is imitated in torch's own kernels has to be imitated in oneDNN too, which reads this at its first use. torch asks
# oneDNN whether the CPU packs bfloat16; with AMX there, and kernels of AVX2, its attention raises as on no real CPU.
IMITATED = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
if (capability := os.environ.get("ATEN_CPU_CAPABILITY")) in IMITATED:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", IMITATED[capability])

# In these folders shapes and types are checked while a test runs, of the packages that `make test` names. Tests of bad
# input are left out, as the checker's error would come before ours; in the other folders some tests give such input too.
TYPED = {"analysis", "engine", "evaluation", "functional", "interventions", "model", "prompts"}
SHARED = Path(__file__).parents[2] / "shared"  # data and models of others, beside the clone
GSM8K = SHARED / "data" / "gsm8k_test.jsonl"
MODELS = Path(os.environ.get("MECHATTN_MODELS", SHARED / "models"))
SITE = Path(__file__).parents[1] / "site"
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def need(what, there, how):
    """Skip a test that lacks something from outside the clone; in CI it fails, unless MECHATTN_WITHOUT names it."""
    if not there:
        excused = not os.environ.get("CI") or what in os.environ.get("MECHATTN_WITHOUT", "").split()
        (pytest.skip if excused else pytest.fail)(f"no {what}: {how}")


def run_part(model, prompts, conditions=None, analyses=None, *, places, **options):
    """The result of some prompts, at these places of a larger set: what a job's worker makes of a chunk."""
    plan = make_plan(model, conditions, analyses, ma.RunOptions(**options))
    return plan.calibrated(prompts).result(prompts, plan.sequences(prompts), places)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whatever opens a browser or reads the site is marked so: nobody has to think of it."""
    for item in items:
        for fixture, mark in (("chromium", "browser"), ("site", "site")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    folder = item.path.parent.name
    gives_bad_input = "test_bad_input" in item.nodeid or "test_reported_faults" in item.nodeid
    jaxtyping.config.update("jaxtyping_disable", folder not in TYPED or gives_bad_input)


def pytest_collection_finish():
    """What the imports have made stays to the end: it is not looked through again and again for what could be freed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped, and why, in one line for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    for why, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {why}")


@pytest.fixture(scope="session")
def chromium():
    need("browser", CHROMIUM, "apt-get install chromium")
    return CHROMIUM


@contextmanager
def launched(chromium):
    """Chromium, opened; while it is, nothing else can run an event loop in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def browser(chromium):
    with launched(chromium) as opened:
        yield opened


@pytest.fixture(scope="session")
def site():
    need("site", (SITE / "index.html").is_file(), "`make docs` builds it")
    return SITE


@pytest.fixture(scope="session")
def models():
    """Models that others trained."""
    need("models", MODELS.is_dir(), f"they are not in {MODELS}; MECHATTN_MODELS names their folder")
    return MODELS


@pytest.fixture(scope="session")
def questions():
    """Questions that others wrote."""
    need("questions", GSM8K.exists(), f"there is no {GSM8K}")
    return GSM8K


@pytest.fixture(scope="session")
def smollm2():
    """The name of a small trained model; ``shared(smollm2)`` loads it once."""
    name = "real:smollm2"
    try:
        packaged_file(name)
    except ModelError as error:
        need("smollm2", False, f"`make figures` fetches it ({error})")
    return name


@cache
def loaded_once(name, **options):
    """A toy or packaged model with these options, or the tiny model of a family, by name: for tests that change neither it nor what is known of it."""
    if name.startswith(("toy:", "real:")):
        return ma.load_model(name, **options)
    tokenizer = toy_tokenizer("toy:llama")
    return ma.load_model(tiny_model(name, len(tokenizer)), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def shared():
    """``loaded_once``."""
    return loaded_once


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of toy:llama, for tiny models."""
    return toy_tokenizer("toy:llama")


@pytest.fixture(scope="session")
def toy(shared):
    """The shipped toy:llama."""
    return shared("toy:llama")


@pytest.fixture(scope="session")
def prompts():
    """Twelve word problems of different lengths."""
    return ma.load_prompts("word-problems", limit=12)


def short_problems(count, with_answer=True):
    """Problems of about twenty tokens, each longer than the one before, for what does not depend on the length."""
    problems = []
    for index in range(count):
        first, second = 31 + index, 7 - index
        question = f"Tom has {first} shells and finds {second}{' and 2' * index}. How many?"
        answer = f"{first} + {second} = {first + second}" if with_answer else ""
        problems.append(ma.Prompt(question, answer=answer, system="Solve.", id=str(index)))
    return problems


@pytest.fixture(scope="module")
def read_on_demand():
    """However small a result is, its per-prompt values are read when they are needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.store.reading.SHARE_READ_AT_ONCE", 0)
        patch.setattr("mechattn.store.reading.SMALL_ARRAY", 0)
        yield


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, as in a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def short_prompts():
    """Five of these, without answers."""
    return short_problems(5, with_answer=False)


@pytest.fixture(scope="session")
def slash_result(toy, prompts):
    """The toy on the twelve problems, with and without 55 slashes, every prompt's positions kept."""
    return ma.run(toy, prompts, {"slash": ma.MeaninglessTokens()}, keep="prompts")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A directory with a random tiny Llama whose attention is far from uniform, and the toy's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(toy_folder("toy:llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def random_pattern():
    """A maker of causal patterns [head, query, key], rows summing to 1, far from uniform."""

    def make(heads: int, length: int, seed: int = 0, window: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        scores = 3 * torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    return make


@pytest.fixture
def unreached(monkeypatch):
    """Makes a model fail the test when it runs; gives the model."""

    def reached(*args, **kwargs):
        # No handler of errors takes this for one.
        pytest.fail("the model ran before the input was checked")

    def guarded(model):
        for way in ("run_with_hooks", "forward"):  # a pass without hooks takes the second
            monkeypatch.setattr(model, way, reached)
        monkeypatch.setattr(model._mechattn.native, "forward", reached)
        return model

    return guarded


@pytest.fixture
def no_forward(toy, unreached):
    """A toy whose forward pass must not be reached."""
    return unreached(toy)
