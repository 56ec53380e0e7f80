"""A policy of a user's own: last come, first served, and nobody decodes beside more than one prompt."""

from batching.policies import Decision


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
