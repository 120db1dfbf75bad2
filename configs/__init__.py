"""Experiments as data: each file's get_config(arg) returns a ConfigDict."""
