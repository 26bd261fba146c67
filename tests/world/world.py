"""A simulated world: the real service and real clients on a simulated network and clock, all drawn from one seed.

First everything goes wrong that the seed wants to go wrong. Then faults end, and drafts must come back by themselves.
Then all clients leave, and nothing must be left of them.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable

from tests.world.faults import Faults, Limits
from tests.world.invariants import Invariants, Violation
from tests.world.ledger import Ledger
from tests.world.network import Network, WorldRouter
from tests.world.schedule import Clock, Schedule
from tests.world.service import Disk, Service
from tests.world.target import Target

STEPS = 1200
CALM_ROUNDS = 500  # of 20 ms, by which every target has an accepted draft token again: a client renews a dead
# connection after 5 s, connects within 2 s, and sends a text again after 1 s
_SHAKE_S = 0.05  # the mean time between two shakes


class World:
    """One world. `run` raises `Violation`, with the command that replays it, if a rule is broken."""

    def __init__(self, seed: int, steps: int = STEPS, say: Callable[[str], None] | None = None) -> None:
        self._seed = seed
        self._steps = steps
        self._say_line = say
        self._journal = hashlib.blake2b()
        rng = self._rng = random.Random(seed)
        self.clock = Clock()
        self._schedule = Schedule(self.clock, rng)
        self.faults = Faults.drawn(rng)
        self.invariants = Invariants()
        self._disk = Disk()
        self._network = Network(self._schedule, rng, self._arrived)
        num_targets = rng.randint(2, 4)
        self.limits = Limits.drawn(rng, num_targets)
        self.service: Service | None = None
        self.num_lives = self.num_steps = 0
        self._num_hits: dict[bytes, int] = {}  # of each namespace, when faults ended
        self._start_service()
        namespaces = [b"ours", b"theirs", rng.choice([b"ours", b"others"]), b"theirs"]
        self.targets = [self._target(number, namespaces[number]) for number in range(num_targets)]

    @property
    def digest(self) -> str:
        """Of all that has happened: equal for equal worlds."""
        return self._journal.hexdigest()

    def run(self) -> None:
        logger = logging.getLogger("specbranch")
        level = logger.level
        logger.setLevel(level if self._say_line else logging.CRITICAL + 1)
        try:
            self._run()
        except Exception as error:
            rule = error if isinstance(error, Violation) else Violation("containment", f"{error!r} came out")
            command = f"python -m tests.world --seed {self._seed} --steps {self._steps}"
            message = f"{rule} (step {self.num_steps}, {self.clock.now_s:.4f} s; {self.faults}; replay: {command})"
            rule.args = (message,)
            raise rule from error
        finally:
            self._end()
            logger.setLevel(level)

    def _run(self) -> None:
        self._set_faults(self.faults)
        self._schedule.after(self._rng.expovariate(1 / _SHAKE_S), self._shake)
        for _ in range(self._steps):
            self._step()
        self._calm_down()
        while waiting := [target for target in self.targets if not self._has_drafts(target)]:
            self._step()
            if max(target.num_rounds for target in waiting) > CALM_ROUNDS:
                raise Violation("recovery", f"{waiting[0]}: no drafts in {CALM_ROUNDS} rounds without faults")
        self._leave()

    def _has_drafts(self, target: Target) -> bool:
        """Whether drafts were accepted since faults have ended; of a thrifty target, whether they were prepared."""
        if target.num_accepted or not target.is_thrifty or self.service is None:
            return bool(target.num_accepted)
        return self.service.server.store.stats_of(target.namespace)[1].hits > self._num_hits[target.namespace]

    def _step(self) -> None:
        self.num_steps += 1
        self._schedule.step()
        if self.service is not None and self.service.server.runner.engine_failed:
            self._stop_service()  # it ends by itself; whoever looks after it starts it again
        if self.service is not None and self.service.is_touched:
            self.service.is_touched = False
            self.invariants.check(self.service)

    def _calm_down(self) -> None:
        self.say("faults end")
        self._set_faults(Faults())
        self._disk.is_full = False
        if self.service is None:
            self._start_service()
        assert self.service is not None
        for target in self.targets:
            target.calm_down()
            self._num_hits[target.namespace] = self.service.server.store.stats_of(target.namespace)[1].hits

    def _leave(self) -> None:
        self._disk.is_full = self.faults.full_disk > 0
        for target in self.targets:
            target.leave()
        while not all(target.actor.is_over for target in self.targets):
            self._step()
        for _ in range(100):  # answers that are held back for those who have left
            self._step()
        assert self.service is not None
        self.service.settle()
        self.invariants.check_end(self.service)
        self.service.end(is_orderly=True)
        self.service = None

    def _end(self) -> None:
        for target in self.targets:
            target.actor.end()
        if self.service is not None:
            self.service.end(is_orderly=False)

    def say(self, event: str) -> None:
        """Write an event into the journal."""
        line = f"{self.clock.now_s:.6f} {event}"
        self._journal.update(line.encode())
        if self._say_line is not None:
            self._say_line(line)

    def _set_faults(self, faults: Faults) -> None:
        self._network.faults = faults
        if self.service is not None:
            self.service.engine.faults = faults

    def _target(self, number: int, namespace: bytes) -> Target:
        return Target(number, namespace, self._schedule, self.clock, self._network, self._rng, self.invariants)

    def _arrived(self) -> None:
        if self.service is not None:
            self.service.look(0.0)

    def _start_service(self) -> None:
        self.num_lives += 1
        self.say("the service starts")
        ledger = Ledger(self._leaked)
        service = Service(self._schedule, self.clock, self._rng, self._disk, self.limits, self._network)
        self.invariants.service_began(ledger, service.server.store)
        service.engine.faults = self._network.faults
        service.turned = lambda: self.invariants.check_turn(service, self.clock.now_s)

        def heard(client: bytes, frame: bytes) -> None:
            self.say(f"{client.decode()} > {frame.hex()}")

        def said(client: bytes, frame: bytes) -> None:
            self.say(f"{client.decode()} < {frame.hex()}")
            ledger.say(client, frame)

        service.tell_of_served(ledger.hear)
        service.listen(WorldRouter(self._network, heard, said))
        self.service = service

    def _leaked(self, fact: str) -> None:
        raise Violation("namespace", fact)

    def _stop_service(self) -> None:
        if self.service is not None:
            self.say("the service ends")
            self.service.end(is_orderly=self._rng.random() < 0.5)
            self.service = None

    def _shake(self) -> None:
        """Once in a while something happens to the whole world."""
        rng, faults = self._rng, self._network.faults
        self._schedule.after(rng.expovariate(1 / _SHAKE_S), self._shake)
        if self.service is None:
            self._start_service()
        elif rng.random() < faults.restart:
            self._stop_service()
        elif rng.random() < faults.hang:
            self.service.hang(rng.uniform(0.05, 1.0))
        if rng.random() < faults.reconnect and self._network.links:
            self._network.drop(rng.choice(self._network.links))
        if rng.random() < faults.client_restart:
            rng.choice(self.targets).restart()
        if rng.random() < faults.leap:
            self.say("the clock leaps")
            self.clock.leap(rng.choice([0.01, 0.5, 30.0, 86_400.0]))
        if rng.random() < faults.wall_jump:
            self.clock.set_wall(rng.uniform(-1e6, 1e6))
        self._disk.is_full = rng.random() < 4 * faults.full_disk
