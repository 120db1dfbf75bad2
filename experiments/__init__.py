"""Launchers of `coa_jax.cli`'s commands, the quickstart, benchmarks."""

import coa_jax.cli  # noqa: F401 - sets what the environment of every program has
