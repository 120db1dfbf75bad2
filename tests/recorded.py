"""One conversation as recorded by each system: two parallel searches, then a third."""

from __future__ import annotations

import json
import pathlib

QUESTION = "Who?"
CALLS = [("web_search", "q1", "o1"), ("web_search", "q2", "o2")]
CALLS += [("web_search", "q3", "no page")]
THOUGHTS = ("I look it up.", "Once more.")
ANSWER = "Ada"
_FILE = pathlib.Path(__file__).parent / "fixtures" / "recorded_rows.jsonl"
_LINES = [json.loads(line) for line in _FILE.read_text().splitlines()]
# Name -> (format, row).
ROWS = {line["name"]: (line["format"], line["row"]) for line in _LINES}
