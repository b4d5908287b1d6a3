"""Doors that other machines can reach need TLS and a token, or --insecure; KV events have neither."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
pytest.importorskip("httptools", reason="needs kvarts[serve]")
pytest.importorskip("zmq", reason="needs kvarts[serve]")

from kvarts.base.errors import ConfigError
from kvarts.doors.grpc.server import Binding
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.openai.server import Address

from builders.certificates import make_certificate
from builders.server_process import kvarts_process

OUTSIDE = ("0.0.0.0", "[::]", "192.168.1.4", "example.org")
INSIDE = ("127.0.0.1", "[::1]", "localhost", "127.9.9.9")


def http_door(host: str, has_token: bool, tls: dict[str, Any], insecure: bool) -> object:
    return Address(host=host.strip("[]"), has_keys=has_token, insecure=insecure, **tls)


def grpc_door(host: str, has_token: bool, tls: dict[str, Any], insecure: bool) -> object:
    return Binding(host=host, asks_for_token=has_token, insecure=insecure, **tls)


@pytest.mark.parametrize("door", [http_door, grpc_door])
def test_both_doors_keep_one_rule(door: Any, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    for host in (*OUTSIDE, *INSIDE):
        for has_token in (False, True):
            for tls in ({}, {"tls_cert": cert, "tls_key": key}):
                for insecure in (False, True):
                    if host in INSIDE or (has_token and tls) or insecure:
                        door(host, has_token, tls, insecure)
                        continue
                    with pytest.raises(ConfigError, match="or give --insecure"):
                        door(host, has_token, tls, insecure)


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_kv_events_stay_on_this_machine_unless_they_are_insecure(field: str) -> None:
    here: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://[::1]:5558"}
    KvEventsConfig(**here)
    KvEventsConfig(**{**here, field: "ipc:///tmp/events"})
    for endpoint in ("tcp://*:5559", "tcp://0.0.0.0:5559", "tcp://eth0:5559", "tcp://[::]:5559"):
        with pytest.raises(ConfigError, match=r"tokens of all prompts.*--insecure"):
            KvEventsConfig(**{**here, field: endpoint})
        KvEventsConfig(**{**here, field: endpoint}, insecure=True)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["serve", "sessions", "--mock", "--host", "0.0.0.0"], "host"),
        (["serve", "sessions", "--mock", "--host", "0.0.0.0", "--http-port", "0"], "host"),
        (["mock", "--host", "0.0.0.0", "--port", "0"], "host"),
        (["serve", "--model", "nowhere", "--host", "0.0.0.0"], "host"),
        (["mock", "--port", "0", "--kv-events", "tcp://*:0"], "kv_events"),
        (["mock", "--port", "0", "--kv-events", "tcp://127.0.0.1:0", "--set", "kv_events_replay=tcp://*:0"],
         "kv_events_replay"),
        (["replay", "--kv-events", "tcp://*:0"], "kv_events"),
    ],
)  # fmt: skip
def test_commands_refuse_to_open_a_door_to_others_without_protection(
    arguments: list[str], option: str, run_command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    protection = {"serve": ["--api-key-file"], "mock": ["--api-key-file"], "replay": []}[arguments[0]]
    if "sessions" in arguments:
        protection = ["--token-file"]
    with_token = [*protection, str(token)] if protection else []
    for more in ([], with_token):
        assert run_command(*arguments, *more) == 2
        error = capsys.readouterr().err
        assert f"{option.replace('_', '-')}: other machines reach" in error.replace("_", "-"), error
        assert "or give --insecure" in error


def read_health(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/health")
    connection.getresponse()


def test_both_doors_of_a_session_server_are_encrypted_with_one_certificate(tmp_path: Path) -> None:
    import grpc

    from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

    from builders.session_server import SessionsStub

    cert, key = make_certificate(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:secret\n")
    options = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(tokens)]
    doors = ["--host", "0.0.0.0", "--port", "0", "--http-port", "0"]
    with kvarts_process("serve", "sessions", "--mock", "--speedup", "100", *doors, *options) as server:
        grpc_port = int(server.wait_for(r"listening on 0\.0\.0\.0:(\d+) .*\(TLS, a token is asked for\)")[1])
        http_port = int(server.wait_for(r"https://0\.0\.0\.0:(\d+)/v1")[1])
        trusting = ssl.create_default_context(cafile=str(cert))
        asked = {"model": "mock", "prompt": "hello", "max_tokens": 3, "session_id": "one"}
        for token, status in (("wrong", 401), ("secret", 200)):
            connection = http.client.HTTPSConnection("127.0.0.1", http_port, context=trusting, timeout=20)
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = connection.getresponse()
            assert answer.status == status, answer.read()
            connection.close()
        plain = http.client.HTTPConnection("127.0.0.1", http_port, timeout=20)
        with pytest.raises((OSError, http.client.HTTPException)):
            read_health(plain)
        plain.close()
        with grpc.secure_channel(f"127.0.0.1:{grpc_port}", grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            listed = SessionsStub(channel).List(
                added.ListRequest(), metadata=(("authorization", "Bearer secret"),), timeout=20
            )
            assert [session.label for session in listed.sessions] == ["one"]
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"is_expired": True}, {"hosts": "DNS:example.org"}, {}])
def test_clients_refuse_a_mocks_wrong_certificate_and_it_goes_on(wrong: dict[str, Any], tmp_path: Path) -> None:
    """{}: another certificate than the client trusts. A client that checks nothing is answered after all of them."""
    cert, key = make_certificate(tmp_path, "wrong", **wrong)
    trusted = cert if wrong else make_certificate(tmp_path, "other")[0]
    with kvarts_process("mock", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        host, port = server.wait_for(r"https://([\d.]+):(\d+)").groups()
        checking, unchecked = ssl.create_default_context(cafile=trusted), ssl._create_unverified_context()
        for _ in range(5):
            with (
                closing(http.client.HTTPSConnection(host, int(port), context=checking, timeout=20)) as connection,
                socket.create_connection((host, int(port)), timeout=20) as plain,
            ):
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")  # not TLS at all
                with pytest.raises(ssl.SSLCertVerificationError):
                    connection.request("GET", "/health")
        with closing(http.client.HTTPSConnection(host, int(port), context=unchecked, timeout=20)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        assert not [line for line in server.lines if "Traceback" in line]
