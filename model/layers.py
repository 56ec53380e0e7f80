"""The parts of a layer: norms, linear maps, attention projections, MLP, mixture of experts.

Activations are `[T, ...]`: flat token rows. Every row is computed on its own, so no row depends on its neighbours.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from model.config import LayerConfig, ModelConfig
from model.rope import Rotation, apply_rope
from pallas_kernels import cpu
from pallas_kernels.attention import LayerCache, slot_attention, write_rows

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


def matmul(x: Float[Array, "T I"], weight: Float[Array, "O I"], *, dtype=None) -> Float[Array, "T O"]:
    """`x @ weight.T`, the one place that decides how a dense layer multiplies. Weights lie as in the checkpoints.

    `dtype`: of the result, to which sums are rounded once; that of `x` if None.
    """
    if cpu.takes_matmul(x, weight):
        return cpu.matmul(x, weight)
    if x.shape[0] == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # One row alone XLA multiplies in float32: it converts all the weights first, and sums in another order.
        return matmul(jnp.repeat(x, 2, axis=0), weight, dtype=dtype)[:1]
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def gated(x: Float[Array, "T 2*F"], activation: str) -> Float[Array, "T F"]:
    """`activation(gate) * up` of gate and up beside each other."""

    def formula(x):
        gate, up = jnp.split(x, 2, axis=-1)
        return ACTIVATIONS[activation](gate) * up

    return cpu.gated(x, activation, formula) if cpu.takes_gated(x, activation) else formula(x)


class Linear(nnx.Module):
    """`x @ weight.T + bias`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(init_normal(rngs, (outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        out = matmul(x, self.weight[...])
        return out if self.bias is None else out + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """Zhang and Sennrich (arXiv 1910.07467), in float32. `offset + weight` multiplies (Gemma: offset 1)."""

    def __init__(self, width: int, *, eps: float, offset: float, dtype) -> None:
        self.weight = nnx.Param(jnp.full((width,), 1.0 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        weight = self.weight[...]
        if cpu.takes_norm(x, weight):
            return cpu.norm(x, weight, self._formula, eps=self.eps, offset=self.offset)
        return self._formula(x, weight)

    def _formula(self, x: Float[Array, "*rows D"], weight: Float[Array, " D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        factors = jnp.expand_dims(self.offset + weight.astype(jnp.float32), range(x.ndim - 1))
        return (wide * scale * factors).astype(x.dtype)


class Attention(nnx.Module):
    """Fused QKV projection, optional QK norm, RoPE, cache write, slot attention, output projection."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        heads = config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.width, heads + 2 * kv_heads, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Linear(heads, config.width, bias=config.o_bias, dtype=dtype, rngs=rngs)
        sizes = {"head": (config.head_dim, config.head_dim), "full": (heads, kv_heads)}.get(config.qk_norm or "")
        self.q_norm = make_norm(config, dtype, sizes[0]) if sizes else None
        self.k_norm = make_norm(config, dtype, sizes[1]) if sizes else None

    def project(
        self, x: Float[Array, "T D"], rotation: Rotation | None
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values, normalised, and rotated where the layer has RoPE."""
        config, H = self.config, self.config.head_dim
        q, k, v = jnp.split(self.qkv(x), [config.num_heads * H, (config.num_heads + config.num_kv_heads) * H], axis=-1)
        if config.qk_norm == "full":
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        q, k, v = (part.reshape(x.shape[0], -1, H) for part in (q, k, v))
        if config.qk_norm == "head":
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        if rotation is not None:
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        return q, k, v

    def attend(
        self, q, k, v, cache: LayerCache, slots, positions, *, num_decode: int, implementation: str
    ) -> tuple[Float[Array, "T N*H"], LayerCache]:
        """Write the keys and values, then attend to all that is in the cache."""
        how = {"num_decode": num_decode, "implementation": implementation}
        cache = write_rows(cache, k, v, slots, positions, **how)
        out = slot_attention(
            q,
            cache,
            slots,
            positions,
            window=self.layer.window,
            soft_cap=self.config.attention_soft_cap,
            scale=self.config.attention_scale,
            **how,
        )
        return out.reshape(q.shape[0], -1), cache

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotation: Rotation | None,
        cache: LayerCache,
        slots: Int[Array, " T"],
        positions: Int[Array, " T"],
        **how,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """`how`: as `attend`."""
        out, cache = self.attend(*self.project(x, rotation), cache, slots, positions, **how)
        return self.o(out), cache


class MLP(nnx.Module):
    """Gated MLP (arXiv 2002.05202): `down(activation(gate) * up)`, gate and up fused."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs) -> None:
        bias = config.mlp_bias
        self.activation = config.activation
        self.gate_up = Linear(config.width, 2 * config.mlp_width, bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(gated(self.gate_up(x), self.activation))


class ExpertWeights(nnx.Module):
    """One matrix an expert, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(init_normal(rngs, (experts, outputs, inputs), dtype))


class MixtureOfExperts(nnx.Module):
    """Token-choice top-k routing as in Mixtral (arXiv 2401.04088); only the chosen experts are computed."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs) -> None:
        E, D, F = config.num_experts, config.width, config.moe_intermediate_size
        self.config = config
        self.router = Linear(D, E, dtype=dtype, rngs=rngs)
        self.gate_up = ExpertWeights(E, D, 2 * F, dtype=dtype, rngs=rngs)
        self.down = ExpertWeights(E, F, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        T, D = x.shape
        k = self.config.experts_per_token
        scores = self.router(x).astype(jnp.float32)
        scores = scores - scores.max(axis=-1, keepdims=True)
        best, experts = lax.top_k(scores, k)
        total = cpu.sum_exp(best if self.config.norm_topk else scores)
        weights = jnp.exp(best) / total[:, None]
        out = self._experts(jnp.repeat(x, k, axis=0), experts.reshape(-1)).reshape(T, k, D)
        # Expert after expert: XLA's own sum has another order, and in bfloat16 other roundings, for more rows.
        parts = [out[:, i].astype(jnp.float32) * weights[:, i, None] for i in range(k)]
        return functools.reduce(jnp.add, parts).astype(x.dtype)

    def _experts(self, x: Float[Array, "R D"], experts: Int[Array, " R"]) -> Float[Array, "R D"]:
        """Row r through expert `experts[r]`: rows sorted by expert, one grouped product a matrix."""
        order = jnp.argsort(experts, stable=True)
        counts = jnp.bincount(experts, length=self.config.num_experts)
        # Blocks are a loop of as many turns as the rows need, which has no gradient.
        blocks = jax.default_backend() == "cpu" and not cpu.differentiable.value
        product = _grouped_matmul_blocks if blocks else _grouped_matmul_ragged
        inner = gated(product(x[order], self.gate_up.weight[...], counts), self.config.activation)
        out = product(inner, self.down.weight[...], counts)
        return out[jnp.argsort(order)]


def _grouped_matmul_ragged(x: Float[Array, "R I"], weights: Float[Array, "E O I"], counts: Int[Array, " E"]):
    """Rows in order of expert, `counts` of them each, by XLA's ragged product."""
    return lax.ragged_dot(x, weights.swapaxes(1, 2), counts)


def _grouped_matmul_blocks(x: Float[Array, "R I"], weights: Float[Array, "E O I"], counts: Int[Array, " E"]):
    """The same by blocks of rows: on a CPU XLA's ragged product multiplies every row with every expert.

    A block of rows belongs to one expert, whose weights are read once for it; the last block of an expert is
    computed in full and the rows past its end are overwritten by the next expert's.
    """
    R, inputs = x.shape
    outputs, block = weights.shape[1], 16
    ends = jnp.cumsum(counts)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def one_block(state):
        row, out = state
        expert = jnp.searchsorted(ends, row, side="right")
        rows = lax.dynamic_slice(padded, (row, 0), (block, inputs))
        weight = lax.dynamic_slice(weights, (expert, 0, 0), (1, outputs, inputs))[0]
        out = lax.dynamic_update_slice(out, matmul(rows, weight), (row, 0))
        return jnp.minimum(row + block, ends[expert]), out

    start = (jnp.zeros((), ends.dtype), jnp.zeros((R + block, outputs), x.dtype))
    return lax.while_loop(lambda state: state[0] < R, one_block, start)[1][:R]


def make_norm(config: ModelConfig, dtype, width: int | None = None) -> RMSNorm:
    return RMSNorm(width or config.width, eps=config.norm_eps, offset=config.norm_offset, dtype=dtype)


def normed(norm: RMSNorm | None, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """`x`, normalised where the model has a norm at this place."""
    return x if norm is None else norm(x)


def init_normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype) -> Array:
    """Normal with deviation `inputs ** -0.5`, so that activations keep their size."""
    return jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)
