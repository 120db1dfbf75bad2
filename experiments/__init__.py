"""Launchers for `coa_jax.cli`'s commands, the quickstart and the benchmarks."""

import coa_jax.cli  # noqa: F401 - sets what the environment of every program has
