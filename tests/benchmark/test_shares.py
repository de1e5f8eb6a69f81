"""What a job takes of a machine of a cluster, whatever the cluster is made of."""

import pytest

from majepa.benchmark.cluster import _places, _share
from majepa.config import ConfigError

CPU = {"CPU": 16.0}
GPU = {"CPU": 16.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus", "jobs"),
    [
        ([CPU, CPU], None, None, 16),
        ([{"CPU": 1.0}], None, None, 1),
        ([{"CPU": 0.0}, CPU], None, None, 8),
        ([GPU], None, None, 14),
        ([GPU, CPU], None, None, 14),
        ([GPU], 4, None, 4),
        ([GPU], None, 0.5, 2),
        ([GPU], None, 0.0, 8),
    ],
)
def test_machines_hold_as_many_jobs_as_their_shares_allow(machines, cpus, gpus, jobs):
    share = _share(machines, cpus, gpus)
    assert sum(_places(machine, share) for machine in machines) == jobs


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus"), [([CPU], 17, None), ([CPU], None, 1.0), ([], None, None)]
)
def test_a_job_that_fits_nowhere_is_refused(machines, cpus, gpus):
    with pytest.raises(ConfigError, match="no machine of the cluster"):
        _share(machines, cpus, gpus)
