"""Programs that attack their own grading, without success."""

from __future__ import annotations

import pytest
from hidden_tests import outcome, task

from coa_jax.rewards.code import grader as code
from coa_jax.rewards.code.grader import CodeConfig, CodeGrader
from tests.backend import needs_jail
from tools_sandbox.client import Sandbox

SECRET = 8675309  # the expected value in every attacked test; no program may find it
pytestmark = needs_jail


@pytest.fixture(scope="module")
def grader():
  service = CodeGrader(CodeConfig(test_s=10.0))
  yield service
  service.close()


HIDDEN = {
  "check": {
    "test_code": f"def check(candidate):\n  assert candidate(2) == {SECRET}",
    "entry_point": "f",
  },
  "calls": {"inputs": ["2"], "outputs": [str(SECRET)], "fn_name": "f"},
}
_SEARCH = """
import gc, os, sys, glob
def seen():
  text = open('/proc/self/cmdline').read() + repr(sys.argv) + repr(sys.orig_argv)
  frame = sys._getframe()
  while frame:
    text += repr(frame.f_locals) + repr(frame.f_code.co_consts) + repr(frame.f_globals)
    frame = frame.f_back
  for o in gc.get_objects():
    try: text += repr(o)[:100000] if isinstance(o, (dict, list, tuple)) else ''
    except Exception: pass
  for path in glob.glob('/tmp/**', recursive=True) + ['/proc/self/environ']:
    try: text += open(path).read()
    except Exception: pass
  return text
"""
_FRAMES = """
import sys, os
def f(x):
  frame = sys._getframe()
  while 'request' not in frame.f_locals: frame = frame.f_back
  n, out = frame.f_locals['request']['nonce'], frame.f_locals['out']
"""
ATTACKS = {
  "searches itself": _SEARCH
  + "import re\ndef f(x):\n  found = re.findall(r'867\\d\\d\\d9', seen())\n"
  "  return int(found[0]) if found else None",
  "equals everything": "class E:\n  def __eq__(self, o): return True\n"
  "  def __ne__(self, o): return False\n  def __hash__(self): return 1\n"
  "def f(x): return E()",
  "an int that equals everything": "class E(int):\n  def __eq__(self, o): return True\n"
  "def f(x): return E(3)",
  "patches the harness": "import json, sys, builtins\n"
  "json.dumps = lambda *a, **k: '{\"value\": true}'\n"
  "builtins.AssertionError = Exception\nm = sys.modules['__main__']\n"
  "m._answer = lambda *a: {'verdicts': ['passed']}\ndef f(x): return 1",
  "exits": "import os\ndef f(x):\n  os._exit(0)",
  "exits at once": "import sys\nsys.exit(0)",
  "prints verdicts": "import os\ndef f(x):\n  nonce = __import__('sys').modules["
  "'__main__'].answer_calls.__code__\n  os.write(1, b'passed')\n  return 'passed'",
  "answers twice": _FRAMES + "  for guess in range(8675300, 8675320):\n"
  '    value = \'{"root": %d, "objects": []}\' % guess\n'
  '    line = \'%s 0.0 {"value": %s, "args": null}\\n\' % (n, value)\n'
  "    os.write(out, line.encode())\n  os._exit(0)",
  "poses as the tests": _FRAMES
  + '  os.write(out, (n + \' {"needs": [], "verdicts": ["passed"]}\\n\').encode())\n'
  "  os._exit(0)",
  "deep": "def f(x):\n  a = []\n  for _ in range(100000): a = [a]\n  return a",
  "forged object": _FRAMES
  + "  os.write(out, (n + ' 0.0 ' + '[' * 200000 + '\\n').encode())\n  os._exit(0)",
  "huge": "def f(x): return 'x' * 50_000_000",
  "huge number": "def f(x): return 10 ** 20000",
  "kills": "import os, signal\ndef f(x):\n  os.kill(os.getppid(), 9)\n  return 1",
  "daemon": "import os, time\ndef f(x):\n  if os.fork() == 0:\n"
  "    if os.fork() == 0:\n      os.setsid(); time.sleep(3600)\n    os._exit(0)\n"
  "  return 1",
}


@pytest.mark.parametrize("form", HIDDEN)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_gains_nothing(attack, form, grader):
  answer, why = outcome(grader, HIDDEN[form], ATTACKS[attack])
  assert answer == 0.0 and why != "passed"


def test_the_search_does_find_what_a_program_is_given(grader):
  """The search works, so its failure above is meaningful."""
  visible = {"inputs": [[SECRET]], "outputs": [SECRET], "fn_name": "f"}
  assert outcome(grader, visible, ATTACKS["searches itself"]) == (1.0, "passed")


@pytest.mark.parametrize("form", HIDDEN)
def test_the_same_forms_do_pass_an_honest_program(form, grader):
  honest = f"def f(x): return {SECRET} if x == 2 else None"
  assert outcome(grader, HIDDEN[form], honest) == (1.0, "passed")
  own_frames = (
    "def f(x):\n  print('noise')\n  import sys; sys.stdout = None\n"
    f"  return int('{SECRET}')"
  )
  assert outcome(grader, HIDDEN[form], own_frames) == (1.0, "passed")


def test_nothing_expected_is_ever_sent_beside_the_program(monkeypatch):
  """Why attacks fail: no run receives both the program and the expected values."""
  sent = []

  class Recorder(Sandbox):
    def run(self, program, stdin="", timeout_s=None, memory_mb=None):
      sent.append(program + stdin)
      return super().run(program, stdin, timeout_s, memory_mb)

  monkeypatch.setattr(code, "Sandbox", Recorder)
  service = CodeGrader(CodeConfig())
  mark = "graded_program_was_here"
  for tests in HIDDEN.values():
    service.grade(task(tests), f"def f(x): return '{mark}'")
  printed = {"stdin": ["2"], "expected_output": [str(SECRET)]}
  service.grade(task(printed), f"print('{mark}')")
  service.close()
  assert sum(mark in s and "def f" in s for s in sent) == 2
  for text in sent:
    beside = mark in text and ("def f(x)" in text or "print(" + repr(mark) in text)
    assert not (beside and str(SECRET) in text)
