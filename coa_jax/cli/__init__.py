"""The command line: the library's only package with flags and environment."""

import os

# Its warning at import is useless here: no transformers model runs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
