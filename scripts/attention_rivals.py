"""Other libraries' attention on the same cases, in the layout that is natural to them: [batch, positions, heads, H].

They are given exact lengths and no stale rows. What one of them cannot express in one call it is not asked. A rival
with few bytes may be served by the device's cache: its inputs are at most so many arrays, not one large cache.

PyTorch's FlexAttention, which would take windows and soft caps, is left out: it is code that torch.compile generates,
minutes of it for these cases, and for decode rows of several lengths it wants a block mask made anew every turn.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.attention_cases import Case
from scripts.attention_inputs import expected, head_error, tolerance
from scripts.attention_timing import CHAIN, chain_of, figures, on_cpu, outcome, rotated_bytes, time_launches
from scripts.limits import Limits

SAMPLES = 8


class Dense(NamedTuple):
    """A case as a dense batch of `tokens` query rows each.

    Query t of batch b sees keys up to `lengths[b] - tokens + t`.
    """

    batch: int
    tokens: int
    lengths: np.ndarray
    causal: bool
    window: int | None

    @property
    def ragged(self) -> bool:
        return bool((self.lengths != self.lengths[0]).any())

    @property
    def behind(self) -> int:
        """Keys in front of the first query, where all are alike."""
        return int(self.lengths[0]) - self.tokens


class Rival(NamedTuple):
    """`measure` gives the result over the first pair and seconds a call; `cannot` says why a case is not asked."""

    module: str
    unavailable: Callable[[], str | None]
    cannot: Callable[[Dense, Case], str | None]
    measure: Callable[..., tuple[np.ndarray, list[float]]]  # (case, dense, q, pairs of k and v, scale, chain, repeat)


def dense(case: Case) -> Dense | str:
    """The case as a batch, or why it is none. A decode row with a window is given its window's keys alone."""
    if case.kind == "mixed" or None in case.decode or len(set(case.chunks)) > 1:
        return "not one batch of equal rows"
    if case.decode:
        lengths = np.array([at + 1 for at in case.decode if at is not None], np.int32)
        return Dense(len(lengths), 1, np.minimum(lengths, case.window or lengths), False, None)
    (start, tokens), window = case.chunks[0], case.window
    if window is not None and window >= start + tokens:
        window = None
    return Dense(len(case.chunks), tokens, np.full(len(case.chunks), start + tokens, np.int32), True, window)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def _no_jax(problem: Dense, case: Case) -> str | None:
    if problem.causal and problem.behind:
        return "its causal mask starts at the first key, the queries do not"
    return None


def _torch_missing() -> str | None:
    if reason := _missing("torch"):
        return reason
    return None if importlib.import_module("torch").cuda.is_available() else "torch sees no GPU"


def _no_torch(problem: Dense, case: Case) -> str | None:
    if case.soft_cap is not None or problem.window is not None:
        return "it has neither window nor soft cap"
    return "it has no lengths" if problem.ragged else None


def _time_jax(call: Callable[..., jax.Array], q, sets, chain: int, repeat: int) -> tuple[np.ndarray, list[float]]:
    """`call(q, k, v)`: its first result, and seconds a call as `attention_timing` takes them of ours."""
    one = jax.jit(call)

    @jax.jit
    def run(q, sets):
        first = q = one(q, *sets[0])
        for index in range(1, chain):
            q = one(q, *sets[index % len(sets)])
        return q, first

    def launch(count: int) -> None:
        x = q
        for index in range(count):
            x, _ = run(x, turns[index % len(turns)])
        jax.block_until_ready(x)

    turns = [sets] if chain > 1 else [[pair] for pair in sets]
    out = np.asarray(run(q, turns[0])[1])
    return out, [taken / chain for taken in time_launches(launch, repeat)]


def _measure_jax(case: Case, problem: Dense, q, sets, scale: float, chain: int, repeat: int):
    how: dict[str, Any] = {
        "scale": scale,
        "is_causal": problem.causal,
        "implementation": "xla" if on_cpu() else "cudnn",
    }
    if problem.ragged:
        how["key_value_seq_lengths"] = jnp.asarray(problem.lengths)
    if problem.window is not None:
        how["local_window_size"] = (problem.window - 1, 0)
    return _time_jax(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **how), q, sets, chain, repeat)


def _measure_tokamax(case: Case, problem: Dense, q, sets, scale: float, chain: int, repeat: int):
    attention = importlib.import_module("tokamax").dot_product_attention
    how: dict[str, Any] = {"scale": scale, "is_causal": problem.causal}
    if problem.ragged:
        how["key_value_seq_lengths"] = jnp.asarray(problem.lengths)
    if problem.window is not None:
        how["local_window_size"] = (problem.window - 1, 0)
    return _time_jax(lambda q, k, v: attention(q, k, v, **how), q, sets, chain, repeat)


def _measure_torch(backend: str, case: Case, problem: Dense, q, sets, scale: float, chain: int, repeat: int):
    """PyTorch's SDPA by one of its backends, its calls recorded as one CUDA graph."""
    torch = importlib.import_module("torch")
    attend = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    choose = importlib.import_module("torch.nn.attention")
    lower_right = importlib.import_module("torch.nn.attention.bias").causal_lower_right
    q, sets = jax.block_until_ready((q, sets))
    x = torch.from_dlpack(q).transpose(1, 2)
    pairs = [tuple(torch.from_dlpack(array).transpose(1, 2) for array in one) for one in sets]
    how: dict[str, Any] = {"scale": scale, "enable_gqa": case.heads != case.kv_heads}
    if problem.causal and problem.behind:
        how["attn_mask"] = lower_right(problem.tokens, problem.tokens + problem.behind)
    elif problem.causal:
        how["is_causal"] = True

    def calls(x, count: int):
        for index in range(count):
            x = attend(x, *pairs[index % len(pairs)], **how)
        return x

    with choose.sdpa_kernel(getattr(choose.SDPBackend, backend)), torch.no_grad():
        out = calls(x, 1).transpose(1, 2).float().cpu().numpy()
        calls(x, chain)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls(x, chain)

    def launch(count: int) -> None:
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()

    return out, [taken / chain for taken in time_launches(launch, repeat)]


def _torch(backend: str) -> Rival:
    def measure(*args: Any) -> tuple[np.ndarray, list[float]]:
        try:
            return _measure_torch(backend, *args)
        finally:
            importlib.import_module("torch").cuda.empty_cache()  # for JAX to have

    return Rival("torch", _torch_missing, _no_torch, measure)


RIVALS = {
    "jax_nn": Rival("jax", lambda: None, _no_jax, _measure_jax),
    "tokamax": Rival("tokamax", lambda: _missing("tokamax"), _no_jax, _measure_tokamax),
    "torch_flash": _torch("FLASH_ATTENTION"),
    "torch_cudnn": _torch("CUDNN_ATTENTION"),
}


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(seed, *, shape, dtype):
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


@jax.jit
def _one_head(array, b, head):
    return array[b, :, head]


def worst_error(case: Case, problem: Dense, q, k, v, out: np.ndarray, scale: float) -> float:
    """Of a sample of rows and heads, as for our own."""
    if not np.isfinite(out.astype(np.float32)).all():
        return float("inf")
    rng, G, worst, q = np.random.default_rng(0), case.heads // case.kv_heads, 0.0, np.asarray(q)
    for _ in range(SAMPLES):
        b, t, head = (int(rng.integers(count)) for count in (problem.batch, problem.tokens, case.kv_heads))
        end = int(problem.lengths[b]) - problem.tokens + t + 1
        seen = slice(max(0, end - (problem.window or end)), end)
        heads = slice(head * G, (head + 1) * G)
        keys, values = (np.asarray(_one_head(array, b, head))[seen] for array in (k, v))
        right = expected(q[b, t, heads], keys, values, scale=scale, soft_cap=case.soft_cap)
        worst = max(worst, head_error(out[b, t, heads], right))
    return worst


def measure(case: Case, name: str, dtype: str, limits: Limits, repeat: int) -> dict[str, Any]:
    """As `attention_timing.measure`, of a rival."""
    rival = RIVALS[name]

    def run() -> dict[str, Any]:
        problem = dense(case)
        reason = rival.unavailable() or (problem if isinstance(problem, str) else rival.cannot(problem, case))
        if reason is None and case.soft_cap is not None:
            reason = "it has no soft cap"
        if reason is not None or isinstance(problem, str):
            return {"status": "cannot", "reason": reason}
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        shape = (problem.batch, int(problem.lengths.max()), case.kv_heads, case.head_dim)
        one_bytes = 2 * int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        work = case.work(jnp.dtype(dtype).itemsize)
        chain = chain_of(work, limits)
        copies = max(1, min(CHAIN, -(-rotated_bytes() // one_bytes)))
        q = _normal(0, shape=(problem.batch, problem.tokens, case.heads, case.head_dim), dtype=dtype)
        arrays = [_normal(seed, shape=shape, dtype=dtype) for seed in range(1, 2 * copies + 1)]
        sets = list(zip(arrays[::2], arrays[1::2], strict=True))
        out, taken = rival.measure(case, problem, q, sets, scale, chain, repeat)
        error, allowed = (
            worst_error(case, problem, q, *sets[0], out, scale),
            tolerance(dtype, jax.default_backend(), name),
        )
        checked = {"error": error, "allowed_error": allowed}
        if not error <= allowed:
            return {"status": "wrong", "reason": f"off by {error:.2g} of the largest value", **checked}
        how = {"copies": copies, "calls_a_program": chain}
        return {"status": "ok", **checked, **figures(taken, work, limits), **how}

    return outcome(case, dtype, name, run)
