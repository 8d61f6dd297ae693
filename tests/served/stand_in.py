"""A server of the tests' own: plain ``generate`` of transformers behind the protocol of vLLM, with faults where asked for."""

import json
import ssl
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import mechattn as ma


@dataclass
class Engine:
    """Generates for one prompt at a time, and remembers what it has."""

    model: object
    tokenizer: object
    made: dict = field(default_factory=dict)
    read: dict = field(default_factory=dict)
    lock: object = field(default_factory=threading.Lock)

    def complete(self, ids, new_tokens, temperature, seed):
        """Token ids, the end token among them, and the log-probability of each; a greedy answer begins a longer one."""
        key = (tuple(ids), temperature, seed if temperature else None)
        with self.lock:
            limit, made = self.made.get(key, (-1, None))
            if limit < new_tokens if not temperature else limit != new_tokens:
                made = self._completed(torch.tensor([ids]), new_tokens, temperature, seed)
                self.made[key] = new_tokens, made
        return tuple(some[:new_tokens] for some in made)

    def of_prompt(self, ids):
        """The log-probability of each token after the first."""
        with self.lock:
            if tuple(ids) not in self.read:
                self.read[tuple(ids)] = self._of_prompt(ids)
            return self.read[tuple(ids)]

    @torch.no_grad()
    def _of_prompt(self, ids):
        logits = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [float(logits[i, token]) for i, token in enumerate(ids[1:])]

    @torch.no_grad()
    def _completed(self, prompt, new_tokens, temperature, seed):
        sampled = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            out = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens,
                eos_token_id=self.tokenizer.eos_token_id, pad_token_id=0, **sampled,
            )  # fmt: skip
        logits = self.model(out).logits[0].double().log_softmax(-1)
        written = out[0, prompt.shape[1] :].tolist()
        return written, [
            float(logits[prompt.shape[1] - 1 + i, token]) for i, token in enumerate(written)
        ]


@dataclass
class StandIn:
    """What the server does, and what it was asked.

    ``takes_ids=False``: as transformers serve does. ``bos``: how many BOS tokens it adds to a text. ``fault``: called
    with the number of the request; what it gives is done in place of an answer.
    """

    engine: Engine
    name: str = "toy"
    takes_ids: bool = True
    tells_ids: bool = True
    key: str | None = None
    longest: int | None = None
    fault: object = None
    change: object = None  # of what is replied
    raw: object = (
        None  # called with the handler, it replies in place of the server, where it returns True
    )
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    address: str = ""
    busiest: int = 0
    busy: int = 0
    lock: object = field(default_factory=threading.Lock)

    def reply(self, body):
        """As vLLM words it."""
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.engine.tokenizer(prompt)["input_ids"]
        written, logprobs = self.engine.complete(
            ids, body["max_tokens"], body["temperature"], body.get("seed")
        )
        ended = written[-1:] == [self.engine.tokenizer.eos_token_id]
        choice = {
            "index": 0,
            "text": self.engine.tokenizer.decode(written, skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"tokens": [str(t) for t in written], "token_logprobs": logprobs},
        }
        if not isinstance(prompt, list):
            choice["logprobs"] = None
        elif self.tells_ids and body.get("return_token_ids"):
            choice |= {"token_ids": written, "prompt_token_ids": ids}
        if isinstance(prompt, list) and self.tells_ids and body.get("prompt_logprobs") is not None:
            told = self.engine.of_prompt(ids)
            choice["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": p}} for t, p in zip(ids[1:], told, strict=True)),
            ]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(written)}
        made = {
            "id": "x",
            "object": "text_completion",
            "model": self.name,
            "choices": [choice],
            "usage": usage,
        }
        return self.change(made) if self.change else made

    @property
    def asked(self):
        """The completions that it was asked for."""
        return [body for body in self.bodies if body is not None]


def _handler(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def send(self, status, content, length=None, **headers):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data) if length is None else length))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def refused(self):
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            if (
                server.key is not None
                and self.headers.get("Authorization") != f"Bearer {server.key}"
            ):
                self.send(401, {"error": f"who is {self.headers.get('Authorization')}?"})
                return True
            return False

        def do_GET(self):
            if not self.refused() and not (server.raw and server.raw(self)):
                listed = {"id": server.name, "object": "model", "max_model_len": server.longest}
                self.send(200, {"object": "list", "data": [listed]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.bodies.append(body)
                number = len(server.bodies) - 1
                server.busy += 1
                server.busiest = max(server.busiest, server.busy)
            try:
                if not self.refused() and not (server.raw and server.raw(self)):
                    self.answer(body, number)
            finally:
                with server.lock:
                    server.busy -= 1

        def answer(self, body, number):
            if body["model"] != server.name:
                self.send(404, {"error": f"The model {body['model']} does not exist."})
                return
            if isinstance(body["prompt"], list) and not server.takes_ids:
                self.send(400, {"detail": "prompt must be a string."})
                return
            fault = server.fault(number) if server.fault else None
            if fault in (429, 500, 503):
                self.send(fault, {"error": "busy"}, retry_after="0.001")
            elif fault == "slow":
                time.sleep(1.5)
                self.send(200, server.reply(body))
            elif fault == "cut":  # the connection ends in the middle of an answer
                data = json.dumps(server.reply(body)).encode()
                self.send(200, data[: len(data) // 2], length=len(data))
                self.close_connection = True
            elif fault == "half":  # a proxy ends it, and says that it is whole
                data = json.dumps(server.reply(body)).encode()
                self.send(200, data[: len(data) // 2])
            elif fault == "twice":
                made = server.reply(body)
                self.send(200, made | {"choices": made["choices"] * 2})
            elif fault == "aborted":
                made = server.reply(body)
                self.send(
                    200,
                    made
                    | {"choices": [made["choices"][0] | {"finish_reason": "abort", "text": ""}]},
                )
            elif fault == "another":
                self.send(200, server.reply(body) | {"model": "another"})
            else:
                self.send(200, server.reply(body))

    return Handler


@contextmanager
def running(server, certificate=None):
    """On the loopback address, for the length of a ``with``; with a certificate over TLS."""

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, request, client_address):
            pass  # whoever hangs up

    made = Quiet(("127.0.0.1", 0), _handler(server))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        made.socket = context.wrap_socket(
            made.socket, server_side=True, do_handshake_on_connect=False
        )
    server.address = f"http{'s' if certificate else ''}://127.0.0.1:{made.server_address[1]}/v1"
    thread = threading.Thread(
        target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        made.shutdown()
        made.server_close()
        thread.join(10)


def asked_of(server, options):
    """Options of ``evaluate``; those of the server become an ``ma.Server``."""
    of = {
        name: options.pop(name) for name in ("model", "key", "timeout", "verify") if name in options
    }
    return {**options, "server": ma.Server(server.address, **of)}
