"""Kernels of the attention core; they know nothing of models or schedules and import jax alone."""
