"""Other routes, and who may use them."""

import json
import os
from pathlib import Path

import httpx2
import pytest
from host_rig import HOST, Script, Served, leftovers, until
from openai import AuthenticationError, OpenAI

from northchat.host.guard import is_loopback


def test_models(served: Served) -> None:
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
    (model,) = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("scripted").id == "scripted"
    listed = httpx2.get(f"{served.url}/v1/models").json()["data"][0]
    assert listed["max_model_len"] == listed["context_length"] == 2048


def test_health(served: Served) -> None:
    health = httpx2.get(f"{served.url}/health").json()
    assert health["status"] == "ready"
    assert health["can_call_tools"] is False
    assert (health["running"], health["waiting"], health["clients"], health["core_restarts"]) == (0, 0, 0, 0)
    assert httpx2.head(f"{served.url}/").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/northchat/stop", 404, "not_found"),
        ("GET", "/northchat/attach", 404, "not_found"),
    ],
)
def test_wrong_paths_and_methods(served: Served, method: str, path: str, status: int, code: str) -> None:
    response = httpx2.request(method, served.url + path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example:80"}, 403),
        ({"host": ""}, 403),
        ({"host": "["}, 403),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:9"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
def test_pages_in_browsers_are_turned_away(served: Served, headers: dict[str, str], status: int) -> None:
    response = httpx2.get(f"{served.url}/v1/models", headers=headers)
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


def test_with_a_key_everything_but_health_needs_it(script: Script) -> None:
    served = Served(script, NORTHCHAT_API_KEY="secret").wait()
    try:
        assert OpenAI(base_url=f"{served.url}/v1", api_key="secret").models.list().data
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()
        for path in ("/", "/v1/models", "/nowhere", "/metrics"):
            assert httpx2.get(served.url + path).status_code == 401
        assert httpx2.get(f"{served.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        # A name of this machine that we can't know is fine for who has the key.
        headers = {"host": "mybox.lan", "authorization": "Bearer secret"}
        assert httpx2.get(f"{served.url}/v1/models", headers=headers).status_code == 200
    finally:
        served.stop()


def test_loopback() -> None:
    ours = ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "a.localhost", "LOCALHOST"]
    others = ["0.0.0.0", "localhost.evil", "", "::", "10.0.0.1"]  # noqa: S104
    assert [host for host in ours + others if is_loopback(host)] == ours


def run_served(script: Script, address: str, key: str = "") -> tuple[int, str]:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, str(HOST), "--model", str(script.path), "--serve", address],
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "NORTHCHAT_API_KEY": key},
    )
    return done.returncode, done.stdout + done.stderr


def test_other_machines_are_let_in_only_with_a_key(script: Script) -> None:
    code, output = run_served(script, "0.0.0.0:0")
    assert code == 1
    assert "NORTHCHAT_API_KEY" in output
    assert output.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(served: Served, script: Script) -> None:
    code, output = run_served(script, f"127.0.0.1:{served.port}")
    assert code == 1
    assert f"can't listen on 127.0.0.1:{served.port}" in output
    assert output.count("\n") == 1


def test_a_runtime_directory_that_can_t_be_used_is_one_line(
    home: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Neither a directory that can be written to, nor a place for our own.
        patch.setenv("XDG_RUNTIME_DIR", "/nowhere")
        patch.setenv("TMPDIR", str(home))
        (home / f"northchat-{os.getuid()}").write_text("not a directory")
        code, output = run_served(script, "127.0.0.1:0")
    assert code == 1
    assert str(home) in output
    assert output.count("\n") == 1


def test_a_model_that_can_t_load_ends_serving_with_its_line(script: Script) -> None:
    script.set(fail="the model file is truncated; download it again")
    code, output = run_served(script, "127.0.0.1:0")
    assert code == 1
    assert output.splitlines()[-1].endswith("the model file is truncated; download it again")
    assert "Traceback" not in output


def test_while_loading_requests_are_put_off(script: Script) -> None:
    script.set(load=1.5)
    served = Served(script)

    def answer() -> httpx2.Response | None:
        try:
            return httpx2.post(
                f"{served.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
            )
        except httpx2.ConnectError:
            return None

    response = until(answer)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "model_loading"
    assert httpx2.get(f"{served.url}/health").status_code == 503
    # openai-python waits and tries again by itself.
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=5)
    assert client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}]).choices
    assert "Serving" in served.stop()
    assert served.process.returncode == 0
    assert not leftovers(str(script.path))


def test_a_stalled_client_costs_nothing_but_its_own_stream(served: Served) -> None:
    """A client that doesn't read: others go on, and what it would have read is aborted when it goes."""
    import socket

    served.script.set(delay=0.0005)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 64}], "stream": True}).encode()
    before = len(served.script.log)
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: any(line.startswith("submit") for line in served.script.log[before:]))
        client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
        assert client.chat.completions.create(model="x", messages=[{"role": "user", "content": "y"}]).choices
