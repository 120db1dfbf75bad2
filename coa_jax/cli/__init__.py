"""The command line: the only room of the library with flags and environment."""

import os

# Said at import, and of no use to anybody here: no model of transformers is run.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
