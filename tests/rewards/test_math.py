"""Math checking is right and bounded in every thread and process."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from dare_lightning.rewards.math import MathReward
from tests.rewards.cases import example, layout, real_examples
from tests.shared import ROOT

LIMIT = 2.0
HOSTILE = ["9^{9^{9^{9}}}", "(10^{10})!", "{" * 10_000 + "}" * 10_000, "10000!!!", r"\int_0^1 x^x dx"]


def boxed(text):
    return rf"So \boxed{{{text}}} it is."


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(timeout_s=LIMIT, workers=8)
    yield reward
    reward.close()


def third(reward):
    (verdict,) = reward([boxed(r"\frac{1}{3}")], [example(r"\frac13")])
    return verdict.reward, verdict.status


def third_in_a_process(queue, reward):
    queue.put(third(reward))
    reward.close()


def test_the_main_thread_a_thread_and_a_daemonic_process_agree(reward):
    assert third(reward) == (1.0, "right")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(third, [reward] * 4)) == [(1.0, "right")] * 4
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=third_in_a_process, args=(queue, reward), daemon=True)
    process.start()
    assert queue.get(timeout=60) == (1.0, "right")
    process.join(10)
    assert third(reward) == (1.0, "right")


def test_a_hostile_batch_takes_a_few_limits_and_the_others_are_scored(reward):
    third(reward)
    kinds = {"right": r"\frac{2}{6}", "wrong": r"\frac{1}{2}"}
    texts = [(kind, boxed(text)) for kind, text in kinds.items()] * 19
    texts += [("unparsed", "no answer"), ("unparsed", boxed("")[:-9])] * 5
    # Different texts, so that no verdict can be reused.
    texts += [("timeout", boxed(HOSTILE[number % 5] + f" + {number}")) for number in range(16)]
    assert len(texts) == 64
    texts = texts[32:] + texts[:32]
    started = time.monotonic()
    verdicts = reward([text for _, text in texts], [example("1/3")] * 64)
    assert time.monotonic() - started < 7 * LIMIT
    assert [verdict.status for verdict in verdicts] == [kind for kind, _ in texts]
    assert all(verdict.reward == (verdict.status == "right") for verdict in verdicts)


@pytest.mark.parametrize("text", [boxed(HOSTILE[0]), boxed("{" * 10_000), "\\boxed{" * 10_000], ids=["a", "b", "c"])
def test_one_hostile_completion_is_cut_off(reward, text):
    third(reward)
    started = time.monotonic()
    (verdict,) = reward([text], [example("1/3")])
    assert time.monotonic() - started < 4 * LIMIT  # one limit where a core is free
    assert verdict.reward == 0.0
    assert third(reward) == (1.0, "right")


def test_a_killed_check_leaves_the_other_runners_alone(reward):
    third(reward)
    server = psutil.Process(reward._server.pid)
    before = {child.pid for child in server.children()}
    reward([boxed(HOSTILE[1])], [example("1/3")])
    after = {child.pid for child in server.children()}
    assert len(before - after) == 1
    assert server.is_running()


def test_nothing_is_left_after_close():
    threads = threading.active_count()
    children = set(psutil.Process().children(recursive=True))
    reward = MathReward(timeout_s=0.5, workers=2)
    third(reward)
    started = set(psutil.Process().children(recursive=True)) - children
    reward([boxed(HOSTILE[0]), boxed(HOSTILE[1])], [example("1/3")] * 2)
    started |= set(psutil.Process().children(recursive=True)) - children
    assert len(started) >= 2
    reward.close()
    reward.close()
    assert psutil.wait_procs(started, timeout=5)[1] == []
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "ending", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "killed"]
)
def test_nothing_is_left_when_the_program_ends(ending):
    script = f"""
import psutil
from dare_lightning.rewards.math import MathReward
from dare_lightning.rewards.base import Example
reward = MathReward()
assert reward([r"\\boxed{{2}}"], [Example([], "2")])[0].status == "right"
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
{ending}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=120
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_a_checker_that_dies_is_replaced(reward):
    third(reward)
    os.kill(reward._server.pid, signal.SIGKILL)
    assert third(reward) == (1.0, "right")


@pytest.mark.parametrize("gold", ["", r"\frac{1}{", "???", "x^2+"])
def test_an_unreadable_reference_is_excluded_and_named(reward, gold, caplog):
    verdicts = reward([boxed(gold), boxed("1"), ""], [example(gold, 12, "math")] * 3)
    assert [(verdict.reward, verdict.status) for verdict in verdicts] == [(0.0, "excluded")] * 3
    assert "math[12]" in caplog.text


@pytest.mark.parametrize(
    ("text", "gold", "status"),
    [
        (boxed("0.5"), r"\frac{1}{2}", "right"),
        (boxed(r"\dfrac12"), r"\frac{1}{2}", "right"),
        (boxed(r"(3, \pi/2)"), r"\left( 3, \frac{\pi}{2} \right)", "right"),
        (boxed("x = 3"), "3", "right"),
        (boxed("1+x"), "x+1", "right"),
        (boxed("9**2"), "9", "wrong"),
        (boxed("9**2"), "81", "right"),
        (boxed("9**(1/2)"), "9", "wrong"),
        (boxed("2*x**{10} + 1"), "2x^{10}+1", "right"),
        (boxed("1") + boxed("2"), "2", "right"),
        (boxed("2") + boxed("1"), "2", "wrong"),
        (layout(boxed("2")) + boxed("1"), "2", "right"),
        (layout("2"), "2", "right"),
        (boxed("2"), r"We find \boxed{2}.", "right"),
        ("2", "2", "unparsed"),
    ],
)
def test_equivalence_and_extraction(reward, text, gold, status):
    assert reward([text], [example(gold)])[0].status == status


@pytest.mark.parametrize("name", ["train/math", "test/math500", "test/aime2024", "test/aime2025"])
def test_real_references_are_right(reward, name):
    examples = [case for case in real_examples(f"data/rl/{name}.parquet", step=100) if case.ground_truth]
    verdicts = reward([boxed(case.ground_truth) for case in examples], examples)
    wrong = [case.ground_truth for case, verdict in zip(examples, verdicts, strict=True) if verdict.status != "right"]
    assert not wrong


def test_real_rows_without_a_reference_are_excluded(reward):
    examples = [case for case in real_examples("data/rl/train/math.parquet") if not case.ground_truth]
    assert examples
    assert {verdict.status for verdict in reward([boxed("1")] * len(examples), examples)} == {"excluded"}


def test_an_empty_batch_starts_nothing():
    reward = MathReward()
    assert reward([], []) == []
    assert reward._server is None


def test_a_pickled_reward_keeps_its_settings():
    copy = pickle.loads(pickle.dumps(MathReward(0.7, 3, 2.0)))
    assert (copy.timeout_s, copy.workers, copy.value) == (0.7, 3, 2.0)


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"workers": 0}])
def test_limits_must_be_positive(settings):
    with pytest.raises(ValueError, match="positive"):
        MathReward(**settings)
