"""Fixtures for everyone."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # on a busy machine any example may take long
settings.load_profile("untimed")

RAY_SETTINGS = {
    "RAY_worker_niceness": "0",  # 15 otherwise, which loses against everything else on a small machine
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # every report waits for this poll
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; silences its announcement
}


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For two processes side by side (`make test`): one begins with all tests of Ray, and no file is in both."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("ray") else item.path.name))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One small Ray for all tests that need one: starting it takes longer than most of them."""
    os.environ.update(RAY_SETTINGS)

    import ray

    from ray_yolo.runtime.cluster import own_token

    own_token()
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
