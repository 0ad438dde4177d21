"""A broker's address is chosen once."""

from __future__ import annotations

import socket

import pytest

from pipeline.embedded import BrokerStartError
from pipeline.embedded.loopback_ports import choose_ports, is_free
from pipeline.embedded.server_properties import BrokerPorts

pytestmark = pytest.mark.unit

_KNOWN = BrokerPorts(client=20001, controller=20002)


def test_known_ports_are_kept_while_they_are_free() -> None:
    """Clients that know the address find the broker again after a restart."""
    assert choose_ports(_KNOWN, free=lambda _: True) == _KNOWN


def test_only_the_port_that_is_taken_changes() -> None:
    """The controller's port is nobody's business but the broker's: it must not drag the clients' port along."""
    ports = choose_ports(_KNOWN, free=lambda port: port != _KNOWN.controller)

    assert ports.client == _KNOWN.client
    assert ports.controller not in {_KNOWN.client, _KNOWN.controller}


def test_new_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    """A port that the kernel hands to outgoing connections may be gone when the broker comes back."""
    for _ in range(200):
        ports = choose_ports(None, free=lambda _: True)

        assert ports.client != ports.controller
        assert min(ports.client, ports.controller) >= 20_000
        assert max(ports.client, ports.controller) < 32_768


def test_the_search_for_a_port_is_bounded() -> None:
    """A machine without free ports gets a sentence, not a loop."""
    with pytest.raises(BrokerStartError, match="No free port"):
        choose_ports(None, free=lambda _: False)


def test_a_port_with_a_listener_is_not_free() -> None:
    """The probe that the choice rests on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert not is_free(port)
    assert is_free(port)


def test_a_port_of_connections_that_are_still_closing_is_free() -> None:
    """For a minute after a stop the kernel remembers the connections; a restart must not move because of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first is the one that waits
            assert client.recv(1) == b""

    assert is_free(port)
