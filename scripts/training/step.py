"""One update of a transformer from packed sequences: loss, gradients summed by tokens, AdamW, over all local devices.

The token rows of a batch run flat through the model that serves, with its attention implementation `packed`; layers and
loss are those operations of XLA that have gradients. Parameters are replicated and rows of tokens divided among the
devices. On a CPU the same state and batches give the same bits. The embedding's gradient is a scatter, whose order of
sums a GPU leaves open unless `XLA_FLAGS=--xla_gpu_deterministic_ops=true` says otherwise.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from model.config import ModelConfig
from model.transformer import Transformer
from pallas_kernels import cpu
from pallas_kernels.attention import cache_shapes
from scripts.training.lora import Lora, init_adapters, merged
from scripts.training.optimizer import Recipe, optimizer, schedule

LOGITS_BYTES = 64 << 20  # of float32 logits that are held at once; of more, those of a part of the tokens at a time
_REPLICATED, _BY_ROWS = PartitionSpec(), PartitionSpec("rows")


class Batch(NamedTuple):
    """Packed sequences: NumPy arrays `[R, L]`, R rows of L tokens.

    A row holds sequences one after the other, padding last. `segments`: which of them a token belongs to, rising; L
    where it is padding. `positions`: of the token within its sequence, from 0. `targets`: the token that follows, any
    where `weights` is 0. `weights`: 1 where the target counts, else 0.
    """

    tokens: Any  # int32, as segments, positions and targets
    segments: Any
    positions: Any
    targets: Any
    weights: Any  # float32


class TrainState(NamedTuple):
    """All that training changes: a pytree, replicated over the devices, donated to each step."""

    params: nnx.State  # float32: all parameters, or the adapters alone
    opt_state: optax.OptState
    step: jax.Array  # int32: updates made


class StepFigures(NamedTuple):
    loss: float  # nats a token
    tokens: int  # whose targets counted
    grad_norm: float  # of the mean over tokens, before clipping
    learning_rate: float
    finite: bool  # loss and gradients; if not, nothing was updated


class Trainer:
    """The compiled functions of a run, one a shape of batch, and what does not change in it.

    `model` is where `init` starts, and stays as it is. With `lora` it is frozen and `TrainState` holds adapters alone.
    Parameters, their sums of gradients and the optimiser are float32; the model runs in `compute_dtype`, its logits
    and the loss are float32. `remat` keeps only what enters each layer for the backward pass. `devices`: all local ones
    if None.

    Raises ValueError for a compute dtype or a rank that is not possible.
    """

    def __init__(
        self,
        model: Transformer,
        recipe: Recipe,
        *,
        compute_dtype: Any = jnp.float32,
        remat: bool = False,
        lora: Lora | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        if compute_dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"compute_dtype must be float32 or bfloat16, not {jnp.dtype(compute_dtype)}")
        self.config, self.lora = model.config, lora
        self.devices = list(jax.local_devices() if devices is None else devices)
        self._graph, self._start = nnx.split(model)
        mesh = jax.make_mesh((len(self.devices),), ("rows",), (AxisType.Auto,), devices=self.devices)
        self._replicated, self._by_rows = NamedSharding(mesh, _REPLICATED), NamedSharding(mesh, _BY_ROWS)
        self._optimizer, self._schedule = optimizer(recipe), schedule(recipe)
        self._base = None
        if lora is not None:
            init_adapters(lora, self._start)  # refuses now what it would refuse later
            self._base = _copy(self._start, self._replicated)
            self._merge = jax.jit(functools.partial(merged, lora))
        loss = functools.partial(self._loss, dtype=compute_dtype, remat=remat)
        self._evaluate = self._on_all_devices(loss, mesh)
        self._gradient = self._on_all_devices(jax.value_and_grad(loss), mesh)
        self._add = jax.jit(lambda one, other: jax.tree.map(jnp.add, one, other), donate_argnums=0)
        self._update = jax.jit(self._updated, donate_argnums=0, out_shardings=self._replicated)

    def init(self) -> TrainState:
        """The state before the first update."""
        trained = self._start if self.lora is None else init_adapters(self.lora, self._start)
        params = _copy(trained, self._replicated)
        opt_state = jax.jit(self._optimizer.init, out_shardings=self._replicated)(params)
        return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), self._replicated))

    def step(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, StepFigures]:
        """One update by the gradient of the mean over all tokens that count in all of `batches`.

        The batches, micro-batches of one step, run one after the other and their gradients are summed. `state` is
        donated; it may also come from a checkpoint, as NumPy arrays or on any device.

        Raises ValueError for batches that are not as `Batch` says, or in which no token counts.
        """
        for batch in batches:
            self._check(batch)
        tokens = sum(int(np.sum(batch.weights)) for batch in batches)
        if tokens == 0:
            raise ValueError(f"no token of these {len(batches)} batches counts: weights must be 1 somewhere")
        state = jax.device_put(state, self._replicated)
        sums = None
        for batch in batches:
            one = self._gradient(state.params, self._base, jax.device_put(batch, self._by_rows))
            sums = one if sums is None else self._add(sums, one)
        state, figures = self._update(state, sums, np.float32(tokens))
        loss, grad_norm, learning_rate, finite = (value.item() for value in jax.device_get(figures))
        return state, StepFigures(loss, tokens, grad_norm, learning_rate, finite)

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[float, float]:
        """The summed negative log-likelihood in nats of the targets that count, and how many they are.

        Raises ValueError as `step`; no token need count.
        """
        self._check(batch)
        params = jax.device_put(state.params, self._replicated)
        total = self._evaluate(params, self._base, jax.device_put(batch, self._by_rows))
        return float(total), float(np.sum(batch.weights))

    def model(self, state: TrainState) -> Transformer:
        """What has been trained, in float32 on the first device, with adapters added: a copy that no step changes."""
        params = jax.device_put(state.params, self._replicated)
        whole = params if self.lora is None else self._merge(self._base, params)
        return nnx.merge(self._graph, _copy(whole, SingleDeviceSharding(self.devices[0])))

    def _check(self, batch: Batch) -> None:
        check_batch(batch, self.config)
        if len(batch.tokens) % len(self.devices):
            raise ValueError(f"{len(batch.tokens)} rows of tokens are not a multiple of {len(self.devices)} devices")

    def _loss(self, params: nnx.State, base: nnx.State | None, batch: Batch, *, dtype: Any, remat: bool) -> jax.Array:
        if self.lora is not None and base is not None:
            params = merged(self.lora, base, params)
        model = nnx.merge(self._graph, jax.tree.map(lambda one: one.astype(dtype), params))
        return summed_loss(model, batch, remat=remat)

    def _on_all_devices(self, function: Callable, mesh: jax.sharding.Mesh) -> Callable:
        """Jitted: `function(params, base, batch)` of each device's own rows, summed over the devices."""

        def run(params, base, batch):
            # Seen as each device's own, so that gradients are summed over the devices once, here, and not where used.
            params, base = lax.pcast((params, base), "rows", to="varying")
            return lax.psum(function(params, base, batch), "rows")

        specs = (_REPLICATED, _REPLICATED, _BY_ROWS)
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_REPLICATED))

    def _updated(self, state: TrainState, sums: tuple[jax.Array, nnx.State], tokens: jax.Array):
        """The state after an update by summed loss and gradients, the same where they are not finite; the figures."""
        loss, gradients = jax.tree.map(lambda total: total / tokens, sums)
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        changes, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, changes)
        new = TrainState(params, opt_state, state.step + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        return kept, (loss, grad_norm, self._schedule(state.step), finite)


def summed_loss(model: Transformer, batch: Batch, *, remat: bool = False) -> jax.Array:
    """The summed negative log-likelihood in nats, float32, of the targets that count. It has a gradient.

    The model runs in the dtype of its weights. What rows of padding give reaches neither loss nor gradients.
    """
    config, (rows, length) = model.config, batch.tokens.shape
    flat = Batch(*(field.reshape(-1) for field in batch))
    shapes = cache_shapes("packed", rows, config.num_kv_heads, length, config.head_dim)
    cache = tuple(tuple(jnp.zeros(shape, model.embed.weight.dtype) for shape in shapes) for _ in config.layers)
    how = {"num_decode": 0, "implementation": "packed", "remat": remat}
    with cpu.differentiable(True):
        hidden, _ = model(flat.tokens, flat.segments, flat.positions, cache, **how)
        with jax.named_scope("loss"):
            return _summed_nll(model, hidden, flat.targets, flat.weights)


def _summed_nll(model: Transformer, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """A part of the tokens at a time where logits are large: they are computed again for the gradient, and not kept."""

    def of_part(hidden, targets, weights):
        logits = model.unembed(hidden)
        # A comparison, not an index, whose gradient would be a scatter.
        chosen = jnp.where(jnp.arange(logits.shape[1])[None, :] == targets[:, None], logits, 0.0).sum(-1)
        return jnp.sum(jnp.where(weights > 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0))

    T = len(targets)
    parts = -(-T * model.config.vocab_size * 4 // LOGITS_BYTES)
    if parts == 1:
        return of_part(hidden, targets, weights)
    size = -(-T // parts)
    split = [
        jnp.pad(one, ((0, size * parts - T), *[(0, 0)] * (one.ndim - 1))).reshape(parts, size, *one.shape[1:])
        for one in (hidden, targets, weights)
    ]
    return lax.map(lambda part: jax.checkpoint(of_part)(*part), tuple(split)).sum()


def check_batch(batch: Batch, config: ModelConfig) -> None:
    """Raises ValueError, naming field and value, for a batch that is not as `Batch` says."""
    shapes = {name: np.shape(field) for name, field in batch._asdict().items()}
    if len(set(shapes.values())) != 1 or len(shapes["tokens"]) != 2 or 0 in shapes["tokens"]:
        raise ValueError(f"the fields of a batch must have one shape, rows by tokens, not {shapes}")
    for name, field in batch._asdict().items():
        if (dtype := np.asarray(field).dtype) != (wanted := np.float32 if name == "weights" else np.int32):
            raise ValueError(f"{name} must be {wanted.__name__}, not {dtype}")
    length = shapes["tokens"][1]
    limits = {"tokens": config.vocab_size, "segments": length + 1, "positions": min(length, config.max_positions)}
    for name, limit in limits.items():
        _check_range(name, getattr(batch, name), limit)
    padding = batch.segments == length
    if not np.isin(batch.weights, (0.0, 1.0)).all() or batch.weights[padding].any():
        raise ValueError("weights must be 0 or 1, and 0 where the segment says padding")
    _check_range("targets", batch.targets[batch.weights > 0], config.vocab_size)
    new = np.diff(batch.segments, axis=1, prepend=-1)
    before = np.pad(batch.positions, ((0, 0), (1, 0)))[:, :-1]
    wrong = (new < 0) | (~padding & (batch.positions != np.where(new > 0, 0, before + 1)))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"row {row}, token {column}: segment {batch.segments[row, column]}, position "
            f"{batch.positions[row, column]}: sequences must rise from token to token and each begin at position 0"
        )


def _check_range(name: str, values: np.ndarray, limit: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < limit:
        raise ValueError(f"{name} must be from 0 to {limit - 1}, not {values.min()} to {values.max()}")


def _copy(params: nnx.State, sharding: jax.sharding.Sharding) -> nnx.State:
    """In float32, in memory of its own."""
    return jax.device_put(jax.tree.map(lambda one: jnp.array(one, jnp.float32, copy=True), params), sharding)
