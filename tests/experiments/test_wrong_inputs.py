"""Wrong and odd inputs through the launchers: one clear line each, no traceback."""

from __future__ import annotations

import os

import forked
import pytest

WORLD = "evaluate --config=configs/evaluate_world.py:tiny"
GOOD = f"{WORLD} --config.tasks.uri=good.jsonl --config.tools.corpus=pages.jsonl"
SFT = "sft --config=configs/sft_world.py:tiny"
RL = "rl --config=configs/rl_world.py:tiny"
SELECT = "tasks --config=configs/select_world.py:tiny"

# (command, words of the refusal); a command's words may name files from FILES.
TABLE = [
  # --- Config files and arguments.
  ("sft --config=nowhere.py", "nowhere.py: there is no such config file"),
  ("sft --config=folder", "folder: there is no such config file"),
  ("sft --config=empty.jsonl", "defines no function get_config"),
  ("sft --config=binary.jsonl", "binary.jsonl"),
  ("sft --config=", "--config"),
  ("sft", "error: --config must be given; see --help"),
  (f"{WORLD}:", "evaluate_world answers '' and 'tiny', not 'tiny:'"),
  ("rl --config=configs/rl_world.py:gpro", "names are grpo"),
  ("sft --config=placeholder.py", "'data' lacks field 'trajectories'"),
  ("sft --config=recursive.py", "recursive.py: the config contains itself"),
  # --- Flags: names and types.
  (f"{SFT} --config.data.=3", "--config.data.: names no field"),
  (f"{SFT} --config.=3", "--config.: names no field"),
  (f"{SFT} --config.data..steps=3", "--config.data..steps: names no field"),
  (f"{SFT} --config.data.trajectories=None", "'data' lacks field 'trajectories'"),
  (f"{SFT} --config.data.steps={'7' * 5000}", "data.steps=777"),
  ("sft --config.data.steps=4", "--config.data.steps=4 needs a config to change"),
  ("sft --workdirr=x", "Unknown command line flag 'workdirr'"),
  (f"{SFT} --config.data.stepz=3", "sft_world.py: config section 'data' has no field"),
  (f"{SFT} --config.data.stepz=3", "'stepz'; did you mean 'steps'?"),
  (f"{SFT} --config.datum.steps=3", "sft_world.py: config has no section 'datum'; did"),
  (f"{SFT} --config.optim.lr.x=1", "optim.lr.x: lr is a value and has no fields"),
  (f"{GOOD} --config.eval.k=fast", "eval.k[0] is 'fast'; it must be of type int"),
  (f"{SFT} --config.data.steps=ten", "data.steps"),
  (f"{SFT} --config.data.steps=1.5", "data.steps"),
  (f"{SFT} --config.data.steps=", "data.steps"),
  (f"{SFT} --config.data=3", "data is a section; set its fields by --config.data.F"),
  (f"{RL} --config.algo.loss=grpo", "--config.help=algo.loss lists them"),
  (f"{SFT} --config.optim.lr=nan", "lr is nan; it must be a finite number"),
  (f"{SFT} --config.data.seed=99999999999999999999", "seed is 99999999999999999999"),
  (f"{SFT} --config.optim.name=\u0430dam", "name '\u0430dam'; accepted: adamw, muon"),
  (f"{SFT} --config.mesh.fsdp=3", "fsdp"),
  (f"{SFT} --workdir=", "--workdir is empty"),
  (f"{SFT} --workdir=az://bucket/run", "accepted: gs://BUCKET/PATH"),
  (f"{SFT} --workdir=good.jsonl", "good.jsonl"),
  (f"{SFT} extra", "unexpected argument 'extra'"),
  # --- Files: missing, empty, folders, or of another kind.
  (f"{SFT} --config.data.trajectories=nowhere.jsonl", "nowhere.jsonl"),
  (f"{SFT} --config.data.trajectories=folder", "folder"),
  (f"{SFT} --config.data.trajectories=empty.jsonl", "empty.jsonl"),
  (f"{SFT} --config.data.trajectories=binary.jsonl", "binary.jsonl"),
  (f"{SFT} --config.data.trajectories=good.jsonl", "good.jsonl"),
  (f"{WORLD} --config.tasks.uri=nowhere.jsonl", "nowhere.jsonl"),
  (f"{WORLD} --config.tasks.uri=empty.jsonl", "empty.jsonl"),
  (f"{WORLD} --config.tasks.uri=binary.jsonl", "binary.jsonl"),
  (f"{WORLD} --config.tasks.uri=nan.jsonl", "nan.jsonl"),
  (f"{WORLD} --config.tasks.uri=cut.jsonl", "cut.jsonl"),
  (f"{WORLD} --config.tasks.uri=deep.jsonl", "deep.jsonl:1: nested too deeply"),
  (f"{WORLD} --config.tasks.uri=digits.jsonl", "digits.jsonl:1: not JSON (a whole num"),
  (f"{WORLD} --config.tasks.uri=twice.jsonl", "twice.jsonl:1: not JSON (an object has"),
  (f"{SFT} --config.data.trajectories=half.jsonl", "half.jsonl:1: '\\ud800' is half"),
  (f"{GOOD} --config.tasks.families=('no',)", "no"),
  (f"{GOOD} --config.init=", "init"),
  (f"{GOOD} --config.init=nowhere", "nowhere"),
  (f"{GOOD} --config.init=Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
  (f"{GOOD} --config.init=good.jsonl", "good.jsonl"),
  (f"{GOOD} --config.init=folder", "folder"),
  # --- Contradicting fields.
  (f"{GOOD} --config.eval.greedy=False --config.eval.samples=0", "nothing to play"),
  (f"{GOOD} --config.eval.k=(1,4)", "k has 4; it must be from 1 to samples=3"),
  (f"{GOOD} --config.eval.k=(1,) --config.eval.samples=0", "so no k can be given"),
  (f"{SELECT} --config.select.at_mots=1.0", "did you mean 'at_most'"),
  (f"{SELECT} --config.selects.x=1", "config has no section 'selects'"),
  (f"{SELECT} --config.select.without=nowhere.jsonl", "select.without: there is no"),
  (f"{GOOD} --config.eval.samples=1000000000", "eval.samples=1000000000"),
  (f"{GOOD} --config.rollout.variant=webb", "unknown protocol variant 'webb'"),
  (f"{GOOD} --config.rollout.style=terse", "terse"),
  (f"{GOOD} --config.tools.tools=('serach',)", "serach"),
  (f"{GOOD} --config.reward.graders.qa=judge", "needs reward.judge"),
  (f"{GOOD} --config.reward.graders.qa=exact", "graders['qa'] is 'exact'; accepted"),
  (f"{RL} --config.algo.batch.length=8", "a trajectory must fit a row"),
  (f"{RL} --config.algo.sampling.samples=1", "sampling.samples is 1"),
  (
    f"{GOOD} --config.tasks.fields=dict(question='q')",
    "tasks.fields is a section; set its fields by --config.tasks.fields.FIELD",
  ),
  (
    f"{GOOD} --config.tools.functions={{'f':dict(function='a:b')}}",
    "--config.tools.functions: the value must be a literal",
  ),
  (f"{RL} --config.algo.batch.minibatches=9", "batch.minibatches=9 is above"),
  (f"{RL} --config.algo.sampling.staleness=2", "needs loss.is_clip above 0"),
]
FILES = {
  "empty.jsonl": b"",
  "binary.jsonl": bytes(range(256)) * 4,
  "good.jsonl": b'{"id": "1", "question": "2 + 3", "answers": ["5"], "family": "f"}\n',
  "nan.jsonl": b'{"id": "1", "question": NaN, "answers": ["5"]}\n',
  "cut.jsonl": b'{"id": "1", "question": "2 + 3", "answers": ["5"]}\n{"id": "2", "que',
  "deep.jsonl": b'{"question": "2", "answers": ["5"], "meta": %s1%s}'
  % (b'{"a": ' * 900, b"}" * 900),
  "digits.jsonl": b'{"question": "2 + 3", "answers": [%s]}' % (b"7" * 5000),
  "twice.jsonl": b'{"question": "2 + 3", "answers": ["5"], "answers": ["6"]}',
  "half.jsonl": b'{"task_id": "t", "segments": [{"text": "\\ud800"}]}',
  "placeholder.py": b"""
import ml_collections
from ml_collections import config_dict
def get_config():
  data = dict(trajectories=config_dict.required_placeholder(str))
  return ml_collections.ConfigDict(dict(data=data))
""",
  "recursive.py": b"""
import ml_collections
def get_config():
  config = ml_collections.ConfigDict(dict(data={}))
  config.data.me = config
  return config
""",
  "pages.jsonl": b'{"id": "p", "title": "a", "text": "b"}\n',
}


@pytest.mark.slow
def test_each_is_refused_in_one_clear_line(tmp_path):
  # --- Files in a folder with a space and an accent in its name.
  folder = tmp_path / "my donn\u00e9es"
  os.makedirs(folder / "folder")
  for name, content in FILES.items():
    (folder / name).write_bytes(content)
  (folder / "configs").symlink_to(forked.ROOT / "configs")
  wrong = []
  for command, reason in TABLE:
    name, *words = command.split()
    if "--workdir" not in command:
      words.append("--workdir=run")
    words.append("--compile_cache=")
    done = forked.run(f"experiments.{name}", *words, folder=folder)
    # A line about the tasks may come before the error.
    *said, error = (done.stdout + done.stderr).splitlines() or [""]
    one_line = error.startswith("error: ") and len(said) <= 1
    one_line = one_line and all("qa (" in line for line in said)
    if done.returncode != 2 or not one_line or reason not in done.stdout + done.stderr:
      wrong.append(f"{command}\n  {reason}\n  {done}")
  assert not wrong, "\n".join(wrong)
  # A config and scratch files bind nothing: the next run may have another config.
  left = set(os.listdir(folder / "run"))
  assert left <= {".lock", "config.json", "tokenizer", "data"}
