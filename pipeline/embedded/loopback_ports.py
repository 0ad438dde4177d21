"""Ports for the embedded broker: free when first chosen, and the same ones ever after.

Clients that know the address of a broker find it again after a restart only if it comes back at the same one.
"""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from pipeline.embedded.broker_errors import BrokerStartError
from pipeline.embedded.server_properties import LOOPBACK, BrokerPorts

if TYPE_CHECKING:
    from collections.abc import Callable

# Below the range from which the kernel takes the source ports of outgoing connections (32768 on Linux, 49152
# elsewhere). A port inside it could be gone when the broker comes back, even to a client of the broker itself: one that
# keeps connecting to a port where nobody listens is sooner or later given that very port as its source, and is then
# connected to itself.
_PORT_FIRST = 20_000
_PORT_COUNT = 10_000
_ATTEMPTS_MAX = 200


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does: connections of an earlier broker that are still closing don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_ports(known: BrokerPorts | None, *, free: Callable[[int], bool] = is_free) -> BrokerPorts:
    """The `known` ports where they are still free, others where they are not.

    Raises:
        BrokerStartError: no free port was found in a bounded number of attempts.

    """
    client = known.client if known and free(known.client) else _any_free(free, taken=0)
    controller = known.controller if known and free(known.controller) else _any_free(free, taken=client)
    return BrokerPorts(client=client, controller=controller)


def _any_free(free: Callable[[int], bool], *, taken: int) -> int:
    for _ in range(_ATTEMPTS_MAX):
        port = _PORT_FIRST + secrets.randbelow(_PORT_COUNT)
        if port != taken and free(port):
            return port
    last = _PORT_FIRST + _PORT_COUNT - 1
    raise BrokerStartError(f"No free port on {LOOPBACK} from {_PORT_FIRST} to {last} in {_ATTEMPTS_MAX} attempts.")
