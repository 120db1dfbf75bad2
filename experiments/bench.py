"""The two flags that every benchmark takes, defined once."""

from __future__ import annotations

from absl import flags

QUICK = flags.DEFINE_bool("quick", False, "Less of everything: under a minute.")
OUT = flags.DEFINE_string("out", "", "JSON file to write the figures to.")
