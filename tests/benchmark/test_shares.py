"""What a job takes of a GPU and of a machine of a cluster, whatever the cluster is made of."""

from pathlib import Path

import pytest
from tiny_grids import MIXED, TINY

from majepa.benchmark.cluster import _hold, _share
from majepa.benchmark.jobs import jobs_of
from majepa.benchmark.room import BASELINE, GIB, MAJEPA
from majepa.config import ConfigError

CPU = {"CPU": 16.0}
GPU = {"CPU": 16.0, "GPU": 1.0}
GPUS = {"CPU": 64.0, "GPU": 2.0}
BASELINE_JOB = jobs_of(TINY.cells())[0]
MAJEPA_JOB = jobs_of(MIXED.cells())[0]


def held(machines, shares):
    """Of a long row of jobs, those that are worked on at first."""
    return next(count for count in range(len(shares)) if not _hold(machines, shares[: count + 1]))


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus", "baselines", "majepas"),
    [
        ([CPU, CPU], None, None, 16, 16),
        ([{"CPU": 1.0}], None, None, 1, 1),
        ([{"CPU": 0.0}, CPU], None, None, 8, 8),
        ([GPU], None, None, 14, 2),
        ([GPU, CPU], None, None, 14, 2),
        ([GPUS], None, None, 28, 4),
        ([GPU, GPUS], None, None, 42, 6),
        ([GPU], 4, None, 4, 2),
        ([GPU], None, 0.5, 2, 2),
        ([GPU], None, 0.25, 4, 4),
        ([GPU], None, 0.0, 8, 8),
    ],
)
def test_machines_hold_as_many_jobs_as_their_shares_allow(machines, cpus, gpus, baselines, majepas):
    for job, count in ((BASELINE_JOB, baselines), (MAJEPA_JOB, majepas)):
        assert held(machines, [_share(job, machines, cpus, gpus)] * 60) == count


def test_jobs_of_both_kinds_share_a_gpu():
    large, small = (_share(job, [GPU], None, None) for job in (MAJEPA_JOB, BASELINE_JOB))
    assert held([GPU], [large] + [small] * 60) == 1 + 7
    assert held([GPU], [small] * 8 + [large] * 60) == 8


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus"), [([CPU], 17, None), ([CPU], None, 1.0), ([], None, None)]
)
def test_a_job_that_fits_nowhere_is_refused(machines, cpus, gpus):
    with pytest.raises(ConfigError, match="no machine of the cluster"):
        _share(BASELINE_JOB, machines, cpus, gpus)


def test_the_page_says_what_a_gpu_holds():
    page = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text()
    for names, need in (("MA-JEPA", MAJEPA), ("MAPPO, QMIX, MAT", BASELINE)):
        line = f"| {names} | 1/{need.per_gpu} | {need.memory // GIB} GiB |"
        assert line in page and page.count(f"1/{need.per_gpu} ") == 1
