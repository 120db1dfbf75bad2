"""Manifests and scripts that start a run on many hosts, for `coa pod`."""
