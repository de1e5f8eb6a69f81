"""Jobs handed out, tried again and written down; the workers are made up."""

import json
import time
from collections import deque

import pytest
from rich.console import Console
from tiny_grids import MIXED, TINY, finish

from majepa.benchmark.folder import claim
from majepa.benchmark.jobs import jobs_of
from majepa.benchmark.live import Board
from majepa.benchmark.runner import INTERRUPTED, LOSSES, Runner
from majepa.benchmark.workers import Ended


class FakeWorkers:
    """Each wait ends the job that was started first, as the plan for its name says."""

    def __init__(self, root, plan=None, slots=1):
        self.root = root
        self.plan = {name: deque(ends) for name, ends in (plan or {}).items()}
        self.slots = slots
        self.started = []
        self.most = 0
        self.running = deque()
        self.calls = []

    def has_room(self, job):
        return len(self.running) < self.slots

    def start(self, job):
        self.started.append(job.name)
        self.running.append(job)
        self.most = max(self.most, len(self.running))
        return "here"

    def wait(self, seconds):
        if "stop" in self.calls:
            return [Ended(self.running.popleft().name, "here", "it was asked to stop")]
        job = self.running[0]
        ends = self.plan.get(job.name)
        end = ends.popleft() if ends else "finish"
        if end == "wait":
            time.sleep(0.01)
            return []
        self.running.popleft()
        if end == "finish":
            for cell in job.cells:
                finish(self.root, cell)
            return [Ended(job.name, "here")]
        if end == "nothing":
            return [Ended(job.name, "here")]
        return [Ended(job.name, "here", end, is_lost=end == "lost")]

    def stop(self):
        self.calls.append("stop")

    def kill(self):
        self.calls.append("kill")


@pytest.fixture
def root(tmp_path):
    claim(tmp_path / "grid", TINY)
    return tmp_path / "grid"


def run(root, workers, *, is_interrupted=lambda: False, **options):
    board = Board(root, TINY, Console(quiet=True))
    runner = Runner(root, workers, board, **{"retries": 2, **options})
    return runner.run(jobs_of(TINY.cells()), is_interrupted)


def events(root, *names):
    lines = [json.loads(line) for line in (root / "jobs.jsonl").read_text().splitlines()]
    return [tuple(line[name] for name in names) for line in lines]


def test_seeds_are_packed_where_they_fit_and_the_longest_jobs_come_first():
    jobs = jobs_of(MIXED.only().cells())
    assert [job.name for job in jobs] == [
        "majepa-corridor-1", "majepa-corridor-2", "majepa-3m-1", "majepa-3m-2",
        "mappo-corridor", "mappo-3m",
    ]  # fmt: skip
    assert [cell.seed for cell in jobs[-1].cells] == [1, 2]


def test_all_jobs_are_done_a_few_at_a_time(root):
    workers = FakeWorkers(root, slots=2)
    finished = []
    outcome = run(root, workers, when_finished=lambda: finished.append(1))
    assert (outcome.failed, outcome.stopped) == ({}, None)
    assert workers.started == ["mappo-3m", "mappo-2m_vs_1z"]
    assert workers.most == 2 and finished == [1, 1]
    assert sorted(events(root, "event", "job", "attempt", "machine")) == [
        ("finished", "mappo-2m_vs_1z", 1, "here"),
        ("finished", "mappo-3m", 1, "here"),
        ("started", "mappo-2m_vs_1z", 1, "here"),
        ("started", "mappo-3m", 1, "here"),
    ]


def test_no_more_jobs_than_slots(root):
    workers = FakeWorkers(root, slots=1)
    run(root, workers)
    assert workers.most == 1


def test_a_job_that_fails_is_tried_again_after_the_others(root):
    workers = FakeWorkers(root, {"mappo-3m": ["exit code 1", "exit code 1"]})
    outcome = run(root, workers)
    assert outcome.failed == {}
    assert workers.started == ["mappo-3m", "mappo-2m_vs_1z", "mappo-3m", "mappo-3m"]
    assert events(root, "event", "job", "attempt")[1] == ("failed", "mappo-3m", 1)


def test_a_job_that_fails_too_often_is_given_up_and_the_others_go_on(root):
    workers = FakeWorkers(root, {"mappo-3m": ["exit code 1"] * 9})
    outcome = run(root, workers)
    assert outcome.failed == {"mappo-3m": "exit code 1"}
    assert workers.started.count("mappo-3m") == 3
    assert workers.started.count("mappo-2m_vs_1z") == 1


def test_a_job_that_ends_well_without_results_has_failed(root):
    outcome = run(root, FakeWorkers(root, {"mappo-3m": ["nothing"] * 9}), retries=0)
    assert "without the final evaluations" in outcome.failed["mappo-3m"]


def test_lost_machines_are_no_fault_of_the_job(root):
    workers = FakeWorkers(root, {"mappo-3m": ["lost"] * LOSSES})
    assert run(root, workers, retries=0).failed == {}
    assert workers.started.count("mappo-3m") == LOSSES + 1


def test_nor_are_they_forgiven_for_ever(root):
    workers = FakeWorkers(root, {"mappo-3m": ["lost"] * (LOSSES + 5)})
    assert run(root, workers, retries=0).failed == {"mappo-3m": "lost"}
    assert workers.started.count("mappo-3m") == LOSSES + 1


def test_an_interruption_stops_what_runs_and_starts_nothing(root):
    workers = FakeWorkers(root, {"mappo-3m": ["wait"] * 99})
    outcome = run(root, workers, is_interrupted=lambda: bool(workers.started))
    assert outcome.stopped == INTERRUPTED and outcome.failed == {}
    assert workers.started == ["mappo-3m"]
    assert workers.calls[0] == "stop"
    assert events(root, "event", "job") == [("started", "mappo-3m"), ("stopped", "mappo-3m")]


def test_a_second_interruption_kills(root):
    workers = FakeWorkers(root)

    def insist(seconds):
        raise KeyboardInterrupt

    workers.wait = insist
    assert run(root, workers).stopped == INTERRUPTED
    assert workers.calls == ["kill"]


def test_the_time_limit_stops_what_runs(root):
    workers = FakeWorkers(root, {"mappo-3m": ["wait"] * 1_000})
    outcome = run(root, workers, seconds=0.05)
    assert outcome.stopped == "the time limit of 0:00:00 was reached"
    assert workers.started == ["mappo-3m"] and workers.calls[0] == "stop"


def test_whatever_goes_wrong_no_job_is_left_behind(root):
    workers = FakeWorkers(root)

    def break_down():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(root, workers, when_finished=break_down)
    assert workers.calls == ["kill"]
