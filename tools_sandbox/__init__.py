"""Tools for a policy: a sandboxed Python and a search index. Users enter by `client`.

Standalone: nothing here imports jax or coa_jax.
"""
