"""Manifests and scripts that start a run on many hosts: of `coa pod`."""
