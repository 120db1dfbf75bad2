"""The command line: the only package that reads flags and environment variables."""

import os

# transformers' import warning is useless here: none of its models runs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
