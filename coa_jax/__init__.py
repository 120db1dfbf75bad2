"""coa-jax: Chain-of-Agents models in JAX, from multi-agent runs to agentic RL."""

__version__ = "0.1.0"
