"""What clients are told when something is wrong, and what the server does under load."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from adafuse_engine import Engine
from adafuse_engine.config import ServerConfig
from adafuse_engine.errors import InvalidArgumentError
from adafuse_engine.server import create_app
from adafuse_engine.testing import ScriptedMember
from tests.support.http import running
from tests.support.scripted import ENDLESS, NO_LIMIT, wait_for

ANSWER = " Paris is the capital."


@pytest.fixture(scope="module")
def server():
    with Engine(members=[ScriptedMember(name, ANSWER) for name in ("a", "b")]) as engine:
        with running(engine) as served:
            yield served


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"prompt": ""}, 400, None, "no text"),
        ({"prompt": "?", "temprature": 1}, 400, "temprature", "temperature"),
        ({"prompt": "?", "temperature": -1}, 400, None, "temperature"),
        ({"prompt": "?", "n": 2}, 400, None, "n: "),
        ({"prompt": "?", "top_p": 0.5}, 400, None, "top_p"),
        ({"prompt": [1, 2]}, 400, None, "token ids"),
        ({"prompt": []}, 400, None, "empty"),
        ({"prompt": "?", "max_tokens": "many"}, 400, "max_tokens", "integer"),
        ({"prompt": "word " * 20_000}, 400, "messages", "context window"),
        ({"prompt": "?", "model": "gpt-4"}, 404, "model", "adafuse, a, b"),
        ({}, 400, "prompt", "required"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_answered_says_why(server, body, status, param, says, stream):
    answer = server.post("/v1/completions", {**body, "stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "?"}], "tool_choice": "required"}, "no tools"),
        ({"messages": [{"role": "user", "content": "?"}], "tools": [{}]}, "no tool"),
        ({"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_a_chat_that_cannot_be_answered_says_why(server, body, says):
    answer = server.post("/v1/chat/completions", body)
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True)


def test_what_is_no_json_or_no_route_is_told_in_the_same_form(server):
    assert httpx.post(server.url + "/completions", content=b"{").json()["error"]["type"] == "invalid_request_error"
    missing = httpx.get(server.url + "/nothing")
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "Not Found")


def test_lone_surrogates_are_the_clients_fault(server):
    answer = httpx.post(
        server.url + "/completions", content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400


def test_a_member_that_fails_is_a_500_and_the_next_request_is_answered():
    def fail(number: int) -> None:
        if number == 3:
            raise RuntimeError("secret of the house")

    with Engine(members=[ScriptedMember("a", ANSWER, on_forward=fail)]) as engine, running(engine) as server:
        first = server.post("/v1/completions", {"prompt": "?"})
        assert first.status_code == 500
        assert "secret" not in first.text
        assert server.post("/v1/completions", {"prompt": "?"}).json()["choices"][0]["text"] == ANSWER


def test_an_error_within_a_stream_is_its_last_event():
    with Engine(members=[ScriptedMember("a", ANSWER, nan_from=7)]) as engine, running(engine) as server:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="adafuse", prompt="?", stream=True)
            with pytest.raises(openai.APIError, match="NaN"):
                list(stream)
        assert server.metric(
            "adafuse_requests_total", route="/v1/completions", model="adafuse", status="500"
        ) == 1  # fmt: skip


def test_the_key_is_asked_for_and_never_told():
    with Engine(members=[ScriptedMember("a", ANSWER)]) as engine, running(engine, api_key="kéy") as server:
        for headers in ({}, {"Authorization": "Bearer other"}):
            refused = server.post("/v1/completions", {"prompt": "?"}, headers=headers)
            assert (refused.status_code, "kéy" in refused.text) == (401, False)
        assert httpx.get(server.root + "/metrics").status_code == 401
        assert httpx.get(server.root + "/health").status_code == 200
        right = {"Authorization": "Bearer kéy".encode()}
        assert server.post("/v1/completions", {"prompt": "?"}, headers=right).status_code == 200
    assert "kéy" not in repr(ServerConfig(api_key="kéy"))


def test_an_empty_environment_variable_does_not_leave_the_server_open(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with Engine(members=[ScriptedMember("a", ANSWER)]) as engine:
        with pytest.raises(InvalidArgumentError, match="NO_SUCH_KEY"):
            create_app(engine, ServerConfig(api_key_env="NO_SUCH_KEY"))
        with pytest.raises(InvalidArgumentError, match="called 'a' already"):
            create_app(engine, ServerConfig(model_name="a"))


def test_other_host_names_and_large_bodies_are_refused():
    with Engine(members=[ScriptedMember("a", ANSWER)]) as engine:
        with running(engine, max_body_bytes=2000) as server:
            assert httpx.get(server.url + "/models", headers={"Host": "evil.example"}).status_code == 400
            large = {"prompt": "word " * 1000}
            assert server.post("/v1/completions", large).status_code == 413

            def pieces():
                yield json.dumps(large).encode()

            chunked = httpx.post(
                server.url + "/completions", content=pieces(), headers={"content-type": "application/json"}
            )
            assert chunked.status_code == 413


def test_a_full_queue_is_429_with_retry_after_and_frees_itself():
    member = ScriptedMember("a", **ENDLESS)
    with Engine(members=[member], max_concurrency=1) as engine, running(engine, max_queue=1) as server:
        body = {"prompt": "?", "max_tokens": NO_LIMIT, "stream": True}
        with contextlib.ExitStack() as open_streams:
            first = httpx.stream("POST", server.url + "/completions", json=body, timeout=30)
            lines = open_streams.enter_context(first).iter_lines()
            next(lines)
            second = httpx.Client(timeout=httpx.Timeout(30, read=0.3))
            with pytest.raises(httpx.ReadTimeout), second.stream("POST", server.url + "/completions", json=body):
                pass
            wait_for(lambda: server.metric("adafuse_requests_inside") == 1)

            async def many() -> list[int]:
                async with httpx.AsyncClient(timeout=httpx.Timeout(30, read=1.0)) as client:

                    async def one() -> int:
                        with contextlib.suppress(httpx.ReadTimeout):
                            return (await client.post(server.url + "/completions", json=body)).status_code
                        return 0

                    return await asyncio.gather(*(one() for _ in range(3)))

            assert sorted(asyncio.run(many())) == [0, 429, 429]
            refused = server.metric("adafuse_requests_total", route="refused", model="", status="429")
            assert refused == 2
        wait_for(lambda: server.metric("adafuse_requests_inside") == 0)
        wait_for(lambda: member.open_sessions == 0)
        assert server.post("/v1/completions", {"prompt": "?", "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_engine(stream):
    member = ScriptedMember("a", **ENDLESS)
    with Engine(members=[member]) as engine, running(engine) as server:
        body = {"prompt": "?", "max_tokens": NO_LIMIT, "stream": stream}
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=0.5) as client:
            with client.stream("POST", server.url + "/completions", json=body) as answer:
                next(answer.iter_lines())
        wait_for(lambda: member.open_sessions == 0)
        wait_for(lambda: server.metric(
            "adafuse_requests_total", route="/v1/completions", model="adafuse", status="499"
        ) == 1)  # fmt: skip


async def test_sixty_four_clients_get_their_own_answers():
    def echo(prompt: str) -> str:
        return f" You said {prompt.strip()} to me."

    members = [ScriptedMember(name, echo, delay=0.001) for name in ("a", "b")]
    with Engine(members=members) as engine, running(engine) as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:

            async def ask(number: int) -> str:
                prompt = f"number-{number}"
                if number % 2:
                    made = await client.completions.create(model="adafuse", prompt=prompt)
                    return made.choices[0].text
                stream = await client.completions.create(model="adafuse", prompt=prompt, stream=True)
                return "".join([c.choices[0].text async for c in stream])

            texts = await asyncio.gather(*map(ask, range(64)))
        assert texts == [f" You said number-{n} to me." for n in range(64)]
        assert server.metric("adafuse_tokens_total", model="adafuse", kind="completion") > 64


def test_metrics_count_what_was_done(server):
    before = server.metric("adafuse_forward_passes_total", member="a")
    server.post("/v1/completions", {"prompt": "?"})
    assert server.metric("adafuse_forward_passes_total", member="a") > before
    assert "adafuse_request_seconds_bucket" in httpx.get(server.root + "/metrics").text


SERVED = """
import sys
from adafuse_engine import Engine
from adafuse_engine.config import ServerConfig
from adafuse_engine.server.run import serve
from adafuse_engine.testing import ScriptedMember
with Engine(members=[ScriptedMember("a", " one two three four five six", delay=0.1)]) as engine:
    serve(engine, ServerConfig(port=0, drain_s=20))
print("closed")
"""


def test_sigterm_lets_running_requests_end_and_takes_no_more():
    with subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True) as process:
        root = process.stdout.readline().split(" at ")[1].strip().removesuffix("/v1")
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(root + "/ready").status_code == 200:
                    break
            assert time.monotonic() < deadline
        with httpx.stream(
            "POST", root + "/v1/completions", json={"prompt": "?", "stream": True}, timeout=30
        ) as got:
            lines = got.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) == 0
        assert process.stdout.read().strip() == "closed"
        with pytest.raises(httpx.ConnectError):
            httpx.get(root + "/health")
