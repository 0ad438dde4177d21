"""Lets the planned faults happen, each in a thread of its own, and writes down when each began and ended."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from tests.chaos.faults import Fault, Kind
from tests.chaos.fleet import lose_data
from tests.chaos.history import clock_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.chaos.fleet import AgentPlace, Child, Fleet

REBALANCES: Final = 3
HEAL_WITHIN_S: Final = 120.0


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happened: from the moment that its victim was hit to the one when it was itself again."""

    kind: Kind
    victim: str
    began_ms: int
    ended_ms: int
    storm: int = 0


class Nemesis:
    """Runs a plan against a fleet."""

    def __init__(self, fleet: Fleet, on_progress: Callable[[str], None]) -> None:
        self.injected: list[Injected] = []
        self.failures: list[str] = []
        """What a fault should not have brought about: a process that can't be stopped, a broker that can't start."""
        self._fleet = fleet
        self._on_progress = on_progress
        self._threads: list[threading.Thread] = []

    def run(self, plan: list[Fault]) -> None:
        """Let each fault begin at its instant; returns when all are healed."""
        start_s = time.monotonic()
        for number, fault in enumerate(plan, 1):
            time.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
            self._on_progress(f"Fault {number} of {len(plan)}: {str(fault).strip()}")
            thread = threading.Thread(target=self._inject, args=(fault,), name=fault.kind)
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.join(HEAL_WITHIN_S)
            if thread.is_alive():
                self.failures.append(f"{thread.name}: not healed within {HEAL_WITHIN_S:g} s")

    def _inject(self, fault: Fault) -> None:
        fleet = self._fleet
        agent = fleet.agents[fault.victim % len(fleet.agents)]
        consumer = fleet.consumers[fault.victim % len(fleet.consumers)]
        upstream = fleet.upstreams[fault.victim % len(fleet.upstreams)]
        try:
            match fault.kind:
                case Kind.AGENT_KILLED | Kind.AGENT_RESTARTED | Kind.AGENT_FROZEN:
                    self._disturb_agent(fault, agent)
                case Kind.TABLES_LOST:
                    self._disturb_agent(fault, fleet.agents[0])
                case Kind.REBALANCES:
                    self._rebalance(fault, fleet.guest)
                case Kind.CONSUMER_KILLED | Kind.LEDGER_COPY_LOST | Kind.CONSUMER_FROZEN:
                    self._disturb_child(fault, consumer)
                case Kind.UPSTREAM_KILLED | Kind.UPSTREAM_FROZEN:
                    self._disturb_child(fault, upstream)
                case Kind.BROKER_KILLED | Kind.BROKER_FROZEN | Kind.BROKER_BOUNCED:
                    self._disturb_broker(fault)
        except Exception as error:  # noqa: BLE001  # a thread's error would be lost, and the run would look well
            self.failures.append(f"{fault.kind}: {error!r}")

    def _disturb_agent(self, fault: Fault, place: AgentPlace) -> None:
        with self._hit(fault, place.name, place.turn):
            if fault.kind is Kind.AGENT_FROZEN:
                place.agent.freeze()
                time.sleep(fault.hold_s)
                place.agent.thaw()
                return
            if fault.kind is Kind.AGENT_RESTARTED:
                place.stop()
            else:
                place.kill()
            if fault.kind is Kind.TABLES_LOST:
                place.lose_tables()
            time.sleep(fault.hold_s)
            place.start()

    def _rebalance(self, fault: Fault, guest: AgentPlace) -> None:
        """An agent joins and leaves, cleanly and not, faster than the group can come to rest."""
        with self._hit(fault, guest.name, guest.turn):
            for number in range(REBALANCES):
                guest.start()
                time.sleep(2.0 + fault.hold_s)  # a process takes so long until it can join
                if number % 2:
                    guest.kill()
                else:
                    guest.stop()
                time.sleep(fault.hold_s)

    def _disturb_child(self, fault: Fault, child: Child) -> None:
        with self._hit(fault, child.name, child.turn):
            if fault.kind in {Kind.CONSUMER_FROZEN, Kind.UPSTREAM_FROZEN}:
                child.freeze()
                time.sleep(fault.hold_s)
                child.thaw()
                return
            child.kill()
            if fault.kind is Kind.LEDGER_COPY_LOST:
                lose_data([child])
            time.sleep(fault.hold_s)
            child.start()

    def _disturb_broker(self, fault: Fault) -> None:
        brokers = self._fleet.brokers
        with brokers.turn:
            brokers.settle()
            number = fault.victim % brokers.node_count
            node = brokers.node(number)
            with self._hit(fault, f"broker-{number}"):
                if fault.kind is Kind.BROKER_FROZEN:
                    node.pause()
                    time.sleep(fault.hold_s)
                    node.resume()
                    return
                if fault.kind is Kind.BROKER_BOUNCED:
                    node.stop()
                else:
                    node.kill()
                time.sleep(fault.hold_s)
                node.start()

    @contextmanager
    def _hit(self, fault: Fault, victim: str, turn: threading.Lock | None = None) -> Iterator[None]:
        with ExitStack() as held:
            if turn is not None:
                held.enter_context(turn)
            began_ms = clock_ms()
            yield
            self.injected.append(
                Injected(kind=fault.kind, victim=victim, began_ms=began_ms, ended_ms=clock_ms(), storm=fault.storm)
            )
