"""Options and fixtures for all tests."""

import pytest
from hypothesis import HealthCheck, settings

import deploy  # noqa: F401  first of all: what it sets, gRPC reads when it is imported
from support.checkpoints import TinyShape, write_small_checkpoint, write_tiny_checkpoint
from support.length import times

# How long an example takes says nothing on a machine that others use too.
settings.register_profile(
    "pdserve", deadline=None, max_examples=times(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pdserve")


def pytest_addoption(parser):
    parser.addoption("--repeat", type=int, default=1, help="run each test so many times, to find flakes")


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--repeat")
    if count > 1:
        metafunc.fixturenames.append("_repetition")
        metafunc.parametrize("_repetition", range(count))


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    """A small random Llama behind the embedded model's tokenizer: for whole clusters."""
    return write_small_checkpoint(tmp_path_factory.mktemp("small") / "small-llama")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny random Llama without a tokenizer: for engines."""
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", shape=shape)


# Where tests start clusters. They stay in one of several processes: a process can hold one cluster, and two clusters at
# a time would be too much for two cores. All of these carry the mark `cluster`, and no other test does.
_CLUSTER_TESTS = ("tests/cluster/", "tests/newcomer/", "tests/drills/test_defects.py", "tests/deploy/test_start.py")


def pytest_collection_modifyitems(config, items):
    """tests/cluster comes last: its cluster lives from then on."""
    for item in items:
        if item.nodeid.startswith(_CLUSTER_TESTS) != (item.get_closest_marker("cluster") is not None):
            raise pytest.UsageError(f"{item.nodeid}: the mark `cluster` and {__file__}'s list of places disagree")
    items.sort(key=lambda item: item.nodeid.startswith("tests/cluster/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests go to whichever process is free, but those that start clusters all to one: `--dist loadscope`."""
    from xdist.scheduler import LoadScopeScheduling

    class OneProcessForClusters(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "clusters" if nodeid.startswith(_CLUSTER_TESTS) else nodeid

    return OneProcessForClusters(config, log)
