"""Without a network a name on the hub is refused within seconds; nothing else of the process
changes.
"""

import socket
import threading
import time

import pytest

from nblib import hub, models


@pytest.fixture
def online(monkeypatch):
    """The tests forbid the hub; here it may be tried, at an address of ours."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.fixture
def listener():
    """A port of this machine that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_port_that_answers_one_that_does_not_and_a_host_that_is_not_there(online, listener):
    answers = {
        f"http://127.0.0.1:{listener}": True,
        f"http://127.0.0.1:{closed_port()}": False,
        "https://no-such-host.invalid": False,
        "https://127.0.0.1:many": False,
    }
    for address, answer in answers.items():
        online(address)
        assert hub.is_reachable() is answer, address


def test_a_proxy_is_tried_in_place_of_the_hub(online, listener, monkeypatch):
    online("https://no-such-host.invalid")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener}")
    assert hub.is_reachable()
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{closed_port()}")
    assert not hub.is_reachable()


def test_a_look_up_of_the_host_that_never_ends_is_not_waited_for(online, monkeypatch):
    online("https://slow.invalid")
    over = threading.Event()
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: over.wait(30))
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    began = time.monotonic()
    assert not hub.is_reachable() and time.monotonic() - began < 2
    over.set()


def test_offline_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(hub, "_connects", lambda *_: pytest.fail("it tried"))
    assert not hub.is_reachable()


@pytest.mark.parametrize("load", [models.load_config, models.load_tokenizer, models.load])
def test_without_a_network_a_hub_name_is_one_sentence_within_seconds(online, load, capfd):
    online(f"http://127.0.0.1:{closed_port()}")
    began = time.monotonic()
    with pytest.raises(
        FileNotFoundError, match="model 'nobody/has-this': no folder with"
    ) as caught:
        load("nobody/has-this")
    assert time.monotonic() - began < 5
    assert "is not reachable from here" in str(caught.value) and "\n" not in str(caught.value)
    assert "Retrying" not in capfd.readouterr().err


def test_a_folder_is_loaded_without_a_look_at_the_network(online, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_connects", lambda *_: pytest.fail("it tried"))
    models.tiny(64, hidden=32, layers=1, heads=2).save_pretrained(tmp_path)
    assert models.load(str(tmp_path)).config.vocab_size == 64
