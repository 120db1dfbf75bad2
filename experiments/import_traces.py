"""Turns published traces into trajectories that SFT reads.

  python -m experiments.import_traces --file=WebAgentSFTDataset.json --variant=web \
    --out=runs/web/trajectories.jsonl
  python -m experiments.sft --config=configs/X.py --workdir=runs/web/sft \
    --config.data.trajectories=runs/web/trajectories.jsonl

Reads the released Chain-of-Agents SFT format: alpaca records, a whole trajectory as the
output. What has no single reading is dropped; every dropped row is named with the
reason on standard output, and the last line has the counts.
"""

from __future__ import annotations

from collections import Counter

from absl import app, flags

from coa_jax.protocol.roles import VARIANTS, get_variant
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.teacher.importers import read_alpaca
from experiments.launch import stop, with_clear_errors

_FILE = flags.DEFINE_string("file", None, "JSON list of alpaca records.", required=True)
_OUT = flags.DEFINE_string("out", None, "JSON lines to write.", required=True)
_VARIANT = flags.DEFINE_enum(
  "variant", None, list(VARIANTS), "Dialect of the records.", required=True
)
_KEEP_ILLEGAL = flags.DEFINE_bool(
  "keep_illegal",
  False,
  "Keep records that can be read but break the dialect's order rules.",
)


def main(argv: list[str]) -> None:
  """Writes the file and says what became of every record."""
  if argv[1:]:
    stop(f"unexpected argument {argv[1]!r}")
  variant = get_variant(_VARIANT.value)
  kept, dropped = with_clear_errors(
    lambda: read_alpaca(_FILE.value, variant, _KEEP_ILLEGAL.value)
  )
  for record in dropped:
    print(f"{record.task_id}: {record.reason}: {record.detail}")
  reasons = Counter(record.reason for record in dropped)
  counts = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
  if not kept:
    stop(f"{_FILE.value}: no record is left to train on ({counts or 'it is empty'})")
  write_jsonl(_OUT.value, kept)
  print(f"{len(kept)} kept, {len(dropped)} dropped{f' ({counts})' if counts else ''}")


if __name__ == "__main__":
  app.run(main)
