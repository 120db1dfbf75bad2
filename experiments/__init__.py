"""Programs: launchers, the quickstart, benchmarks. All flags live here."""

import os

# Said at import, and of no use to anybody here: no model of transformers is run.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
