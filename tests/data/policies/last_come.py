"""A policy of a user's own: last come, first served, and nobody decodes beside more than one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from batching.policies import Decision, View


class LastCome:
    preempts = False

    def decide(self, view):
        admit = sorted(view.waiting, key=lambda one: -one.arrived)[: view.free]
        prefill = [*admit, *view.prefilling]
        return Decision(admit=admit, prefill=prefill, decode=len(prefill) < 2)


class Broken:
    def __init__(self):
        raise RuntimeError("no such thing")


class Empty:
    pass


@dataclass
class Typed:
    """With annotations that are read later."""

    rows: int = 7

    def decide(self, view: View) -> Decision:
        admit = view.waiting[: view.free]
        return Decision(admit=admit, prefill=[*view.prefilling, *admit], prefill_rows=self.rows)
