"""A server of the tests' own: transformers' ``generate`` behind the protocol of vLLM, with faults where asked for."""

import json
import ssl
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import mechattn as ma


@dataclass
class Engine:
    """Generates for one prompt at a time, and remembers its answers."""

    model: Any
    tokenizer: Any
    remembered: dict = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def complete(self, ids, new_tokens, temperature, seed):
        """New token ids, the end token among them, and the log-probability of each token after the first."""
        key = (tuple(ids), new_tokens, temperature, seed if temperature else None)
        with self.lock:
            if key not in self.remembered:
                self.remembered[key] = self._completed(*key)
            return self.remembered[key]

    @torch.no_grad()
    def _completed(self, ids, new_tokens, temperature, seed):
        prompt = torch.tensor([ids])
        options = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            tokens = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=0,
                **options,
            )
        logprobs = self.model(tokens).logits[0, :-1].double().log_softmax(-1)
        logprobs = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        return tokens[0, len(ids) :].tolist(), logprobs


@dataclass
class StandIn:
    """What the server does, and what it was asked.

    Args:
        takes_ids: False as for transformers serve, which takes texts alone.
        tells_ids: Whether it replies with token ids.
        key: The key that it wants.
        longest: The longest sequence, as it says.
        change: Changes a reply.
        fault: Called with the handler and the body of a request; where it returns true, it has replied.
    """

    engine: Engine
    name: str = "toy"
    takes_ids: bool = True
    tells_ids: bool = True
    key: str | None = None
    longest: int | None = None
    change: Callable = lambda reply: reply
    fault: Callable = lambda handler, body: False
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    address: str = ""

    def reply(self, body):
        """As vLLM words it."""
        prompt = body["prompt"]
        sends_ids = isinstance(prompt, list)
        ids = prompt if sends_ids else self.engine.tokenizer(prompt)["input_ids"]
        written, logprobs = self.engine.complete(
            ids, body["max_tokens"], body["temperature"], body.get("seed")
        )
        ends = written[-1:] == [self.engine.tokenizer.eos_token_id]
        choice = {
            "index": 0,
            "text": self.engine.tokenizer.decode(written, skip_special_tokens=True),
            "finish_reason": "stop" if ends else "length",
            "logprobs": None,
        }
        if sends_ids:
            choice["logprobs"] = {"token_logprobs": logprobs[len(ids) - 1 :]}
        if sends_ids and self.tells_ids:
            choice["token_ids"] = written
            if body.get("prompt_logprobs") is not None:
                pairs = zip(ids[1:], logprobs, strict=False)
                told = [{str(token): {"logprob": logprob}} for token, logprob in pairs]
                choice["prompt_logprobs"] = [None, *told]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(written)}
        return self.change({"model": self.name, "choices": [choice], "usage": usage})

    def answers_asked(self, new_tokens):
        """The requests for answers of a run, without those of probes, which are of other lengths."""
        return [body for body in self.bodies if body["max_tokens"] == new_tokens]


class Handler(BaseHTTPRequestHandler):
    """Replies as a StandIn says."""

    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def log_message(self, *args):
        pass

    def send(self, status, content, length=None, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)
        return True

    def refuses(self, body):
        """Whether an error has been sent."""
        self.stand_in.headers.append({name.lower(): text for name, text in self.headers.items()})
        key = self.headers["Authorization"]
        if self.stand_in.key and key != f"Bearer {self.stand_in.key}":
            return self.send(401, {"error": f"who is {key}?"})
        return self.stand_in.fault(self, body)

    def do_GET(self):
        if not self.refuses(None):
            model = {"id": self.stand_in.name, "max_model_len": self.stand_in.longest}
            self.send(200, {"data": [model]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stand_in.bodies.append(body)
        if self.refuses(body):
            return
        if body["model"] != self.stand_in.name:
            self.send(404, {"error": f"The model {body['model']} does not exist."})
        elif isinstance(body["prompt"], list) and not self.stand_in.takes_ids:
            self.send(400, {"detail": "prompt must be a string."})
        else:
            self.send(200, self.stand_in.reply(body))


class Quiet(ThreadingHTTPServer):
    """Says nothing of those who hang up."""

    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass


@contextmanager
def running(stand_in, certificate=None):
    """On the loopback address, for the length of a ``with``; with a certificate over TLS."""
    handler = type("StandInHandler", (Handler,), {"stand_in": stand_in})
    http_server = Quiet(("127.0.0.1", 0), handler)
    scheme = "http"
    if certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        http_server.socket = context.wrap_socket(
            http_server.socket, server_side=True, do_handshake_on_connect=False
        )
    stand_in.address = f"{scheme}://127.0.0.1:{http_server.server_address[1]}/v1"
    threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield stand_in
    finally:
        http_server.shutdown()
        http_server.server_close()


def served(stand_in, prompts, conditions=None, model="toy:llama", new_tokens=12, **options):
    """An evaluation by a stand-in; options of ``ma.Server`` are told from those of ``evaluate``."""
    names = {"key", "timeout", "verify", "served_model"} & set(options)
    settings = {name.removeprefix("served_"): options.pop(name) for name in names}
    server = ma.Server(stand_in.address, **settings)
    return ma.evaluate(model, prompts, conditions, server=server, new_tokens=new_tokens, **options)
