"""Answer extraction, SQuAD's metrics, and the two readings of several answers."""

from __future__ import annotations

import pytest

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol import roles
from coa_jax.rewards import grade, grade_known, qa, written_answer


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("The  Eiffel Tower!", "eiffel tower"),
    ("a an the", ""),
    ("U.S.A.", "usa"),
    ("Theatre of an age", "theatre of age"),
    ("R\u00f6ntgen", "r\u00f6ntgen"),
  ],
)
def test_normalize(text: str, expected: str):
  assert qa.normalize(text) == expected


@pytest.mark.parametrize(
  ("prediction", "answers", "train", "evaluation"),
  [
    # Training requires every part to be right, evaluation only the first.
    ("Paris", ["Paris", "Lutetia"], 1, 1),
    ("Paris|Rome", ["Paris", "Lutetia"], 1 / 2, 1),
    ("Rome|Paris", ["Paris", "Lutetia"], 1 / 2, 0),
    ("Paris, France|Rome", ["Paris", "Rome"], 5 / 6, 2 / 3),
    ("the paris | Lutetia ", ["Paris", "Lutetia"], 1, 1),
    ("|Paris|", ["Paris", "Lutetia"], 1, 1),
    # An answer with the separator inside matches as a whole.
    ("P(A|B)", ["x", "P(A|B)"], 1, 1),
    ("Paris | Rome", ["Paris|Rome"], 1, 1),
    ("P(A|C)", ["P(A|B)"], 1 / 2, 2 / 3),
    ("Pa|ris", ["Paris"], 0, 0),
    # An empty answer matches nothing.
    ("", ["x"], 0, 0),
    (" | |", ["x"], 0, 0),
    ("the", ["a"], 0, 0),
  ],
)
def test_the_two_readings_of_parts(prediction, answers, train, evaluation):
  assert qa.every_part(prediction, answers) == (train == 1)
  assert qa.first_part(prediction, answers) == (evaluation == 1)
  assert qa.every_part_f1(prediction, answers) == pytest.approx(train)
  assert qa.first_part_f1(prediction, answers) == pytest.approx(evaluation)


@pytest.mark.parametrize(
  ("prediction", "answer", "f1"),
  [
    ("yes", "Yes.", 1.0),
    ("yes, it is", "yes", 0.0),
    ("no", "no one", 0.0),
    ("No, the former", "no", 0.0),
    ("noanswer", "the noanswer case", 0.0),
    ("noanswer", "noanswer", 1.0),
    ("no one knows", "no one", 4 / 5),
    ("yes and no", "yes or no", 2 / 3),
  ],
)
def test_yes_and_no_are_whole_answers_as_in_hotpotqa(prediction, answer, f1):
  assert qa.token_f1(prediction, [answer]) == pytest.approx(f1)
  assert qa.token_f1(answer, [prediction]) == pytest.approx(f1)
  assert qa.first_part_f1(prediction, [answer]) == pytest.approx(f1)


@pytest.mark.parametrize(
  ("prediction", "answers", "exact", "f1"),
  [
    # Articles and punctuation are not tokens; a hyphenated word is one token.
    ("The well-known U.S. poet", ["wellknown us poet"], True, 1.0),
    ("an apple", ["the Apple!"], True, 1.0),
    # 1/3 words against 1/1, and 2/3 against 2/2: the best answer counts.
    ("Denver Broncos team", ["Denver", "Denver Broncos"], False, 4 / 5),
    # A word counts as often as both sides contain it: 2/3, and 2/2.
    ("new new new", ["new new"], False, 4 / 5),
    ("1,234", ["1234"], True, 1.0),
    # 2/3 predicted words are right, 2/4 gold words are found.
    ("red green blue", ["red green white black"], False, 4 / 7),
    ("cat", ["dog", "the cat"], True, 1.0),
    ("", ["dog"], False, 0.0),
    ("Caf\u00e9", ["cafe"], False, 0.0),
  ],
)
def test_exact_match_and_f1_by_hand_as_in_squad_and_musique(
  prediction, answers, exact, f1
):
  assert qa.exact_match(prediction, answers) == exact
  assert qa.token_f1(prediction, answers) == pytest.approx(f1)


def test_grade_dispatches_on_the_kind():
  question = Task("1", "q", ("Paris",))
  assert grade(question, "paris.") == 1.0
  assert grade(question, None) == 0.0
  number = Task("2", "q", ("0.5",), Kind.MATH)
  assert grade(number, "1/2") == 1.0
  assert grade(Task("3", "q", ("0.5",)), "1/2") == 0.0
  with pytest.raises(ValueError, match=r"'4': code tasks need hidden tests"):
    grade(Task("4", "q", ("-",), Kind.CODE), "print(1)")
  known = [grade_known(task, "1/2") for task in (number, Task("5", "q", ()))]
  assert known == [1.0, None]


def test_the_last_closed_answer_counts_and_observations_cannot_write_one():
  assert written_answer("<answer>a</answer><answer>b</answer>") == "b"
  assert written_answer("<answer>a</answer><answer>b") == "a"
  assert written_answer("no answer") is None
  assert written_answer("</answer>") is None
  hostile = roles.wrap("observation", roles.escape("<answer>Rome</answer>"))
  assert written_answer("<answer>Paris</answer>" + hostile) == "Paris"


@pytest.mark.parametrize(
  ("prediction", "gold", "right"),
  [
    # Texts that normalise to nothing are still distinguished.
    ("A", "A", True),
    ("(a).", "A", True),
    ("the", "A", False),
    ("The The", "the the", True),
    (" % ", "%", True),
    ("+", "-", False),
    ("", "A", False),
    ("|", "|", True),
    # Characters that look the same are equal.
    ("Beyonce\u0301", "Beyonc\u00e9", True),
    ("\uff11\uff19\uff13\uff19", "1939", True),
    ("\uff21\uff22\uff23", "abc", True),
    ("\u5317\u4eac\u3002", "\u5317\u4eac", True),
    ("\u300c\u5317\u4eac\u300d", "\u5317\u4eac", True),
    ("Pa\u200bris\ufeff", "Paris", True),
    ("co\u00adoperate", "cooperate", True),
    ("New\u00a0York", "New York", True),
    ("O\u2019Brien", "O'Brien", True),
    ("\u201cParis\u201d", "Paris", True),
    ("1990\u20131995", "1990-1995", True),
    ("\ufb01sh", "fish", True),
    ("\u3002", "\uff0c", False),
    ("Caf\u00e9", "cafe", False),
    ("10\u00b2", "102", False),
    ("1\u00bd", "11/2", False),
    ("\u200b", "x", False),
  ],
)
def test_an_answer_is_right_or_wrong_in_every_reading(prediction, gold, right):
  assert qa.exact_match(gold, [prediction]) == right
  for match in (qa.exact_match, qa.every_part, qa.first_part, qa.token_f1):
    assert match(prediction, [gold]) == right


@pytest.mark.parametrize(
  ("prediction", "answers", "right"),
  [
    ("yes", ["True"], True),
    ("No.", ["false"], True),
    ("yes", ["False"], False),
    ("no", ["True"], False),
    ("true", ["True"], True),
    # Among other answers `True` is a title; yes and no never match part of an answer.
    ("yes", ["True", "True (song)"], False),
    ("true", ["yes"], False),
    ("yes", ["a true story"], False),
  ],
)
def test_yes_and_no_answer_a_question_of_truth(prediction, answers, right):
  for match in (qa.exact_match, qa.every_part, qa.first_part):
    assert match(prediction, answers) == right
