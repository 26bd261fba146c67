"""What each of many has used lately, so that those who used least can go first."""

from __future__ import annotations

from collections import OrderedDict

_MOST = 1024  # that are told apart


class Usage:
    """Amounts by key; what was used counts half after `half_life_s`. Who has used nothing for longest makes way.

    `newcomer` is what an unknown key counts as: those who are known to use little go before strangers.
    """

    def __init__(self, half_life_s: float, newcomer: float = 0.0) -> None:
        self._half_life_s = half_life_s
        self._newcomer = newcomer
        self._used: OrderedDict[bytes, tuple[float, float]] = OrderedDict()  # amount, and when it was that

    def of(self, key: bytes, now_s: float) -> float:
        """What counts now."""
        amount, at_s = self._used.get(key, (self._newcomer, now_s))
        return float(amount * 0.5 ** ((now_s - at_s) / self._half_life_s))

    def add(self, key: bytes, amount: float, now_s: float) -> None:
        """So much more was used."""
        self._used[key] = (self.of(key, now_s) + amount, now_s)
        self._used.move_to_end(key)
        if len(self._used) > _MOST:
            self._used.popitem(last=False)
