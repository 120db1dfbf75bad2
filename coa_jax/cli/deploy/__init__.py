"""Manifests and scripts of `coa pod`, to start a run on many hosts."""
