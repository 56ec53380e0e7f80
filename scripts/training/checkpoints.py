"""What a run needs to go on, every bit of it, in Orbax folders that are complete or are not there."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from scripts.command import Refused
from scripts.training.data import Position
from scripts.training.step import TrainState

UNKNOWN = math.inf  # the loss of a step that was not evaluated: never the best


class Checkpoints:
    """A folder for each step, `folder/STEP`: the last `keep` and the one with the lowest evaluation loss.

    Each is written beside its place and renamed when it is complete. What a killed process left is cleared away here,
    so that one process at a time may have it open; any number may `read_only`, beside that one, and change nothing.
    """

    def __init__(self, folder: Path, keep: int = 2, *, read_only: bool = False) -> None:
        policy = AnyPreservationPolicy([LatestN(keep), BestN(get_metric_fn=_loss, reverse=True, n=1)])
        options = ocp.CheckpointManagerOptions(
            best_fn=_loss,
            best_mode="min",
            preservation_policy=policy,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            lightweight_initialize=read_only,  # else a step that another process deletes meanwhile is an error
            # Else threads wait for a folder that could not be made, for minutes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            save_root_metadata=False,
        )
        self.folder, self._saving = folder, 0
        handlers = {"state": ocp.StandardCheckpointHandler(), "position": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    @property
    def best(self) -> int | None:
        """The step with the lowest evaluation loss, the last one where none was evaluated."""
        losses = {step: self.loss(step) for step in self.steps}
        return min(losses, key=lambda step: (losses[step], -step), default=None)

    def loss(self, step: int) -> float:
        """At its evaluation, `UNKNOWN` if there was none. Raises Refused if it cannot be read."""
        return self._do(f"step {step} could not be read", lambda: _loss(self._manager.metrics(step)))

    def save(self, state: TrainState, position: Position, loss: float = UNKNOWN) -> None:
        """Writes while training goes on, from a copy in host memory; waits for the save before.

        Raises Refused if that one or this one cannot be written.
        """
        self.wait()
        self._saving = step = int(state.step)
        arrays = {name: np.array(leaf) for name, leaf in _named(state).items()}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(arrays), position=ocp.args.JsonSave(position._asdict()))
        self._do(
            f"step {step} could not be saved", lambda: self._manager.save(step, args=saved, metrics={"loss": loss})
        )

    def wait(self) -> None:
        """Until what was saved is complete. Raises Refused if it cannot be written."""
        self._do(f"step {self._saving} could not be saved", self._manager.wait_until_finished)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, Position]:
        """The state as NumPy arrays, in the structure of `like`. Raises Refused for another run's, or a damaged one."""
        wanted = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _named(like).items()}
        failed = f"step {step} could not be read"
        tree = self._do(failed, lambda: self._manager.item_metadata(step)["state"].tree)
        found = {name: tuple(one.shape) for name, one in tree.items()}
        for name in sorted(wanted.keys() | found.keys()):
            shape = wanted[name].shape if name in wanted else "no such array"
            if found.get(name) != shape:
                raise Refused(f"{self.folder}: {failed}: {name} is {found.get(name, 'missing')}, expected {shape}")
        asked = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), position=ocp.args.JsonRestore())
        read = self._do(failed, lambda: self._manager.restore(step, args=asked))
        leaves = [read.state[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), Position(**read.position)

    def _do(self, failed: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # Orbax and TensorStore raise all kinds
            raise Refused(f"{self.folder}: {failed}: {error}") from error


def _loss(metrics: Mapping[str, float] | None) -> float:
    return UNKNOWN if metrics is None else metrics["loss"]


def _named(state: TrainState) -> dict[str, Any]:
    """Every array by its path, such as params.layers.0.attention.qkv.weight."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
