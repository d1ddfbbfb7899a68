"""Servers with the exact request and response shapes of vLLM and SGLang, on a tiny model; and their faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tests.support import tiny

Route = Callable[[dict[str, Any]], Any]


class Stub:
    """A model behind routes. ``faults``: called with path and body first; an int is a status, a dict an answer."""

    def __init__(self, kind: str = "llama", seed: int = 0, source: str = "tiny", **options: Any) -> None:
        self.model = tiny.MAKERS[kind](seed, **options)
        self.tokenizer = tiny.tokenizer_of(kind)
        self.source = source
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.fault: Callable[[str, dict[str, Any]], Any] = lambda path, body: None
        self.headers: dict[str, str] = {}
        self.keys: list[str] = []
        self._lock = threading.Lock()

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        with self._lock:
            return self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)

    def greedy(self, ids: Sequence[int], count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Token and distribution at each place, the end token the last."""
        ids = list(ids)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        for _ in range(count):
            row = self.logprobs(ids)[-1]
            token = int(row.argmax())
            yield token, row
            if token in ends:
                return
            ids.append(token)

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve on a port of this machine; the root URL."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _reply(self, body: dict[str, Any]) -> None:
                stub.requests.append((self.path, body))
                stub.keys.append(self.headers.get("authorization", ""))
                status, answer = 200, stub.fault(self.path, body)
                if answer == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                if isinstance(answer, int):
                    status, answer = answer, {"error": {"message": "said by the stub"}}
                elif answer is None:
                    answer = stub.answer(self.path, body)
                    if answer is None:
                        status, answer = 404, {"detail": "Not Found"}
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in stub.headers.items():
                    self.send_header(name, value)
                self.send_header("content-type", "application/json")
                half = answer == b"half"
                self.send_header("content-length", str(len(data) + 100 * half))
                self.end_headers()
                self.wfile.write(data)
                if half:
                    self.close_connection = True
                    self.connection.close()

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


class VllmStub(Stub):
    """``knows_asked``: whether it knows ``logprob_token_ids``."""

    knows_asked = True

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "root": self.source, "max_model_len": 512}]}
        if path == "/tokenize":
            return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids}
        if path != "/v1/completions":
            return None
        choices = [self._choice(i, ids, body) for i, ids in enumerate(body["prompt"])]
        return {"object": "text_completion", "choices": choices[::-1]}  # in any order

    def _choice(self, index: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        tokens, tops = [], []
        asked = body.get("logprob_token_ids") if self.knows_asked else None
        for token, row in self.greedy(ids, body["max_tokens"]):
            shown = asked if asked is not None else row.topk(body.get("logprobs") or 1).indices.tolist()
            tops.append({f"token_id:{t}": float(row[t]) for t in [*shown, token]})
            tokens.append(f"token_id:{token}")
        prompt = None
        if "prompt_logprobs" in body:
            rows = self.logprobs(ids)
            prompt = [None] + [
                {str(t): {"logprob": float(rows[i, t]), "rank": 1, "decoded_token": ""}}
                for i, t in enumerate(ids[1:])
            ]
        logprobs = {"tokens": tokens, "top_logprobs": tops, "token_logprobs": []} if "logprobs" in body else None
        return {"index": index, "text": "", "logprobs": logprobs, "prompt_logprobs": prompt}


class SglangStub(Stub):
    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/get_model_info":
            return {"model_path": self.source, "tokenizer_path": self.source, "is_generation": True}
        if path != "/generate":
            return None
        starts = body["logprob_start_len"]
        return [{"meta_info": self._meta(ids, s, body)} for ids, s in zip(body["input_ids"], starts, strict=True)]

    def _meta(self, ids: list[int], start: int, body: dict[str, Any]) -> dict[str, Any]:
        rows = self.logprobs(ids)
        given = [[None, ids[start], None]]
        given += [[float(rows[i - 1, ids[i]]), ids[i], None] for i in range(start + 1, len(ids))]
        written, tops = [], []
        for token, row in self.greedy(ids, body["sampling_params"]["max_new_tokens"]):
            written.append([float(row[token]), token, None])
            best = row.topk(body.get("top_logprobs_num", 0))
            tops.append([[float(v), int(t), None] for v, t in zip(best.values, best.indices, strict=True)])
        return {"input_token_logprobs": given, "output_token_logprobs": written, "output_top_logprobs": tops}


class LlamaCppStub(Stub):
    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/props":
            return {"default_generation_settings": {"n_ctx": 512}, "total_slots": 2, "model_path": self.source}
        if path == "/tokenize":
            return {"tokens": self.tokenizer(body["content"], add_special_tokens=False).input_ids}
        if path != "/completion":
            return None
        told = []
        for token, row in self.greedy(body["prompt"], body["n_predict"]):
            [[token, _]] = body.get("logit_bias", [[token, 0]])
            best = row.topk(body["n_probs"])
            top = [
                {"id": int(t), "token": "", "bytes": [], "logprob": float(v)}
                for v, t in zip(best.values, best.indices, strict=True)
            ]
            told.append({"id": token, "token": "", "bytes": [], "logprob": float(row[token]), "top_logprobs": top})
        return {"content": "", "completion_probabilities": told}


STUBS: dict[str, type[Stub]] = {"vllm": VllmStub, "sglang": SglangStub, "llamacpp": LlamaCppStub}
