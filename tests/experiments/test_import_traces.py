"""Released traces, from the file to a trained model, with the program's messages."""

from __future__ import annotations

import hashlib
import json
import pathlib
import runpy
import subprocess

import forked
import pytest
import recorded
from forked import ROOT

from coa_jax import sft
from coa_jax.protocol.trajectory import Author, read_trajectories

HEAD = (
  "You can use these functions.\n1. <think>...</think>\n2. <web_search>...</web_search>"
)


def record(number: int) -> dict[str, str]:
  """A web agent's trace in the layout of the released files."""
  grades = (
    "information_conflict : Good tool_effectiveness : Fair trajectory_monitoring : Good"
  )
  output = f"""
<think>
I need the page of town {number}.
</think>
<plan>
1. search 2. read
</plan>
<think>search first</think>
<web_search>
town {number}
</web_search>
<observation>
Page 1: <b>town {number}</b> has <plan> in its text.
</observation>

<think>It names the town.</think>
<reflection>{grades}</reflection>
<think>Enough.</think>
<suggested_answer>{number}</suggested_answer>
<think>It fits.</think>
<double_check>The score this time is:4</double_check>
<answer>
{number}
</answer>"""
  question = f"\n\nTask:\nWhich town is number {number}?"
  return {"instruction": HEAD + question, "input": "", "output": output}


def program(*flags: str) -> subprocess.CompletedProcess[str]:
  return forked.run("experiments.import_traces", *flags)


def imported(*flags: str) -> list[str]:
  """Runs the program, which must succeed; returns its printed lines."""
  return forked.finish("import_traces", *flags).stdout.splitlines()


@pytest.mark.slow
def test_from_alpaca_records_to_a_trained_model(tmp_path):
  rows = [record(i) for i in range(12)]
  rows[3]["output"] = rows[3]["output"].replace("</observation>", "")
  rows[5]["output"] = rows[5]["output"].replace("is:4", "is:2")
  rows[7]["output"] = "Well. " + rows[7]["output"]
  source, out = tmp_path / "WebAgentSFTDataset.json", tmp_path / "run" / "traces.jsonl"
  source.write_text(json.dumps(rows))

  first, *named, last = imported(f"--file={source}", "--variant=web", f"--out={out}")
  named, hints = named[:3], named[3:]
  assert first == f"{source}: format alpaca, by its first row"
  assert [line.partition(": ")[0] for line in named] == [
    f"WebAgentSFTDataset-{i}" for i in (3, 5, 7)
  ]
  assert "unclosed: observation" in named[0]
  assert "illegal_transition: an answer after a failing score" in named[1]
  assert "stray_text" in named[2]
  assert [line.split(": ")[1] for line in hints] == [
    *("illegal_transition", "stray_text", "unclosed"),
  ]
  assert hints[0].startswith("hint: illegal_transition: try --keep_illegal")
  assert last == "9 kept, 3 dropped (1 illegal_transition, 1 stray_text, 1 unclosed)"

  trajectories = read_trajectories(out)
  assert len(trajectories) == 9
  for t in trajectories:
    (tool,) = [s for s in t.segments if s.author == Author.TOOL]
    assert tool.text.startswith("<observation>\nPage 1: ") and "&lt;plan>" in tool.text

  more = [f"--file={source}", "--variant=web", f"--out={tmp_path}/styled.jsonl"]
  last_line = imported(*more, "--formats.copies=1")[-1]
  assert last_line.startswith("18 kept, 9 of them augmented, 3 dropped")
  styled = read_trajectories(tmp_path / "styled.jsonl")
  assert [t for t in styled if "copy" not in t.meta] == trajectories
  for t in styled[1::2]:
    name, layout = t.meta["format"]["web_search"]
    question = t.meta["question"]
    prompt = "".join(s.text for s in t.segments if s.author == Author.PROMPT)
    assert question in prompt and f"<{name}>" in prompt and layout in prompt
    assert question.startswith("Which town is number") and HEAD not in prompt

  config = runpy.run_path(str(ROOT / "configs" / "sft_gsm8k.py"))["get_config"]("tiny")
  config.data.trajectories = str(out)
  config.data.update(steps=4, validation=2, vocab_size=320, length=768, rows=2)
  results = sft.run(config, str(tmp_path / "run" / "sft"))
  assert (results["steps"], results["trajectories"]) == (4, 7)
  assert results["left_out_too_long"] == 0
  assert results["loss"] < 6 and results["validation_loss"] < 6
  assert (tmp_path / "run" / "sft" / "model" / "model.safetensors").exists()


def test_illegal_records_on_demand(tmp_path):
  rows = [record(0)]
  rows[0]["output"] = rows[0]["output"].replace("is:4", "is:2")
  source, out = tmp_path / "t.json", tmp_path / "t.jsonl"
  source.write_text(json.dumps(rows))
  flags = (f"--file={source}", "--variant=web", f"--out={out}", "--keep_illegal")
  assert imported(*flags)[1:] == ["1 kept, 0 dropped"]
  assert "illegal_transition" in read_trajectories(out)[0].meta["fault"]


def oagents(number: int) -> dict:
  """An OAgents run; number 3 is wrong, and tests hold out number 4's question."""
  town = f"town number {number}"
  called = {"name": "google_search", "arguments": {"query": town, "filter_year": 1999}}
  wrong = number == 3
  return {
    "question": f"Which of all the old towns by the river is {town}?",
    "prediction": "no" if wrong else str(number),
    "true_answer": str(number),
    "intermediate_steps": [
      {"facts": f"I look for {town}.", "plan": "1. search"},
      {
        "model_output": "go",
        "tool_calls": [called],
        "observations": f"<answer> {town}",
      },
    ],
  }


def filtering(source: pathlib.Path, held_out: pathlib.Path) -> tuple[str, ...]:
  """Flags to import OAgents runs and drop those that overlap held-out questions."""
  return (
    f"--file={source}",
    "--variant=web",
    "--convert.missing_think=Go on.",
    "--convert.score_right",
    "--filter",
    f"--filters.benchmarks={held_out}",
    "--filters.overlap_words=13",
    "--filters.keep_unreflected=1.0",
  )


def test_foreign_runs_are_filtered_and_counted(tmp_path):
  source, held_out = tmp_path / "runs.jsonl", tmp_path / "eval.jsonl"
  source.write_text("".join(json.dumps(oagents(i)) + "\n" for i in range(10)))
  held_out.write_text(json.dumps({"question": oagents(4)["question"], "answer": "4"}))
  flags = (*filtering(source, held_out),)
  written = {}
  for suffix, workers in (("jsonl", 0), ("parquet", 1)):
    out = tmp_path / f"t.{suffix}"
    first, *lines, last = imported(*flags, f"--out={out}", f"--workers={workers}")
    written[suffix] = read_trajectories(out)
    assert "format oagents" in first
    assert "runs-0: lost: step 1: argument filter_year=1999 of google_search" in lines
    assert any(line.startswith("runs-3: illegal_transition") for line in lines)
    assert last == "8 kept, 1 dropped (1 illegal_transition)"
    assert lines[-1] == "filter contamination: 1 dropped (1 benchmark)"
    manifest = json.loads((tmp_path / f"t.{suffix}.manifest.json").read_text())
    file_hash = hashlib.sha256(out.read_bytes()).hexdigest()
    assert manifest["sha256"] == {out.name: file_hash}
    funnel = manifest["counts"]["filters"]
    assert funnel["contamination"]["dropped"] == {"benchmark": 1}
    assert (manifest["before"]["trajectories"], manifest["after"]["trajectories"]) == (
      *(9, 8),
    )
    for picture in ("funnel", "statistics"):
      image = (tmp_path / f"t.{suffix}.{picture}.png").read_bytes()
      assert image.startswith(b"\x89PNG")
  assert all(rows == written["jsonl"] for rows in written.values())
  assert {t.reward for t in written["jsonl"]} == {1.0}


def test_shards_write_what_one_process_writes(tmp_path):
  source, held_out = tmp_path / "runs.jsonl", tmp_path / "eval.jsonl"
  rows = [oagents(i) for i in (*range(10), 5, 3)]  # a near duplicate, another wrong run
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  held_out.write_text(json.dumps({"question": oagents(4)["question"], "answer": "4"}))
  flags = (
    *filtering(source, held_out),
    "--filters.max_similarity=0.9",
    "--formats.copies=1",
  )
  whole = imported(*flags, f"--out={tmp_path}/whole/t.jsonl")
  assert "near_duplicate)" in str(whole) and "2 illegal_transition" in str(whole)
  out = tmp_path / "cut" / "t.jsonl"
  for number in (2, 0, 0, 1):
    assert not out.exists()
    cut = imported(*flags, f"--out={out}", f"--shard={number}/3")
  assert cut == whole
  for name in ("t.jsonl", "t.jsonl.manifest.json", "t.jsonl.funnel.png"):
    assert (tmp_path / "cut" / name).read_bytes() == (
      tmp_path / "whole" / name
    ).read_bytes(), name

  # A shard of another input is refused.
  source.write_text(json.dumps(oagents(1)))
  done = program(*flags, f"--out={out}", "--shard=1/3")
  assert done.returncode == 2 and "the other shards have sha256=" in done.stderr


def test_rl_rows_are_tasks(tmp_path):
  source = tmp_path / "rl.jsonl"
  row = {"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {}}
  source.write_text(json.dumps(row))
  done = program(f"--file={source}", "--variant=web", f"--out={tmp_path / 't.jsonl'}")
  assert done.returncode == 2 and "use the file as tasks.uri" in done.stderr


def chat(number: int) -> dict:
  """A single agent's run with a tool, as OpenAI chat messages."""
  call = {"name": "web_search", "arguments": json.dumps({"query": f"town {number}"})}
  return {
    "messages": [
      {"role": "user", "content": f"Which town is number {number}?"},
      {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": call}],
      },
      {"role": "tool", "tool_call_id": "1", "content": f"Town {number} is Ur."},
      {"role": "assistant", "content": "Ur"},
    ]
  }


def test_a_single_agents_runs_come_with_the_variant_that_the_error_names(tmp_path):
  file, out = tmp_path / "chat.jsonl", tmp_path / "out.jsonl"
  file.write_text("".join(json.dumps(chat(n)) + "\n" for n in range(3)))
  flags = (f"--file={file}", f"--out={out}")
  done = program(*flags, "--variant=unified")
  assert done.returncode == 2 and "try --variant=" in done.stderr
  hint = done.stderr.split("try ")[1].split(" and ")[0]
  assert "3 kept" in imported(*flags, hint, "--convert.missing_think=Go on.")[-1]
  assert "<answer> Ur</answer>" in read_trajectories(out)[0].text
  assert "<crawl_page>" in read_trajectories(out)[0].segments[0].text
  tools = (
    "--described_tools=web_search",
    "--described_tools=tool:get_weather=weather of a city",
  )
  imported(*flags, hint, "--convert.missing_think=Go on.", *tools)
  prompt = read_trajectories(out)[0].segments[0].text
  assert "<web_search>" in prompt and "<crawl_page>" not in prompt
  assert "- get_weather: weather of a city." in prompt


def test_refusals_are_one_line(tmp_path):
  failing = record(0)["output"].replace("is:4", "is:2")
  sources = {
    "web": [record(0)],
    "stray": [{**record(0), "output": "Well."}],
    "failing": [{**record(0), "output": failing}],
    "odd": {},
    "rl": [{"prompt": [], "reward_model": {}}],
    "chat": [chat(0)],
  }
  for name, rows in sources.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(rows))
  alone = "--variant=unified-plan-reflection-suggested_answer-double_check"
  described = ("--convert.missing_think=Go on.", "--described_tools=code")
  table = [
    ("web --variant=web --filters.min_calls=9", "is given without --filter, which "),
    ("web --variant=web --filters.min_cals=9", "min_cals"),
    ("web --variant=unify", "unknown protocol variant 'unify'"),
    ("rl --variant=web", "these rows are tasks, without trajectories; use the file as"),
    ("web --variant=web --shard=2/2", "I is below N"),
    (
      "stray --variant=web",
      "no record is left to train on (1 stray_text); the text ",
    ),
    ("failing --variant=web", "1 illegal_transition); try --keep_ill"),
    ("web --variant=web --prompt=brief --formats.copies=1", "only --prompt=full descr"),
    ("odd --variant=web", "are those of no format"),
    (f"chat {alone} --keep_illegal", "--keep_illegal is for formats"),
    (f"chat {alone}", "web_search", *described),
  ]
  out = tmp_path / "out.jsonl"
  for command, message, *more in table:
    name, *flags = command.split()
    done = program(f"--file={tmp_path / name}.json", f"--out={out}", *flags, *more)
    if "min_cals" in command:  # ml_collections refuses it in its own way
      assert done.returncode and message in done.stderr, (command, done)
      continue
    assert done.returncode == 2 and "Traceback" not in done.stderr, (command, done)
    assert message in done.stderr, (command, done)
  assert not out.exists()
  web = tmp_path / "web.json"
  done = program(f"--file={web}", f"--out={web}", "--variant=web")
  assert done.returncode == 2 and "web.json" in done.stderr
  assert json.loads(web.read_text()) == sources["web"]


@pytest.mark.parametrize("format_", ["chat", "atif"])
def test_conversations_end_to_end(tmp_path, format_):
  """Good rows are kept with their calls; a row with an unread call is dropped.

  tests/importers/test_shapes.py reads every system's.
  """
  rows = [row for f, row in recorded.ROWS.values() if f == format_]
  bad = json.loads(json.dumps(rows[0]).replace("Ada", "<tool_call>f(1)</tool_call>"))
  source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
  source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, bad, rows[0]]))
  alone = "unified-plan-reflection-suggested_answer-double_check"
  flags = [f"--variant={alone}", "--convert.missing_think=Go on.", f"--out={out}"]
  lines = imported(f"--file={source}", *flags)
  assert lines[0] == f"{source}: format {format_}, by its first row"
  assert lines[-1] == f"{len(rows) + 1} kept, 1 dropped (1 unread_call)"
  assert any(line.startswith("hint: unread_call: ") for line in lines)
  trajectories = read_trajectories(out)
  for t in trajectories:
    calls = [(c.name, c.arguments, c.result) for c in t.calls]
    assert calls == recorded.CALLS
    assert t.text.endswith(f"<answer> {recorded.ANSWER}</answer>")
