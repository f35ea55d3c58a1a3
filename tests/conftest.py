"""Options and fixtures for all tests."""

import pytest
from hypothesis import HealthCheck, settings

import deploy  # noqa: F401  first of all: what it sets, gRPC reads when it is imported
from support.checkpoints import TinyShape, write_small_checkpoint, write_tiny_checkpoint
from support.length import times
from support.seeds import Seeds

# How long an example takes says nothing on a machine that others use too.
settings.register_profile(
    "pdserve", deadline=None, max_examples=times(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pdserve")


def pytest_addoption(parser):
    parser.addoption("--repeat", type=int, default=1, help="run each test so many times, to find flakes")
    parser.addoption("--seed", type=int, default=None, help="run simulations under this seed only")


def pytest_generate_tests(metafunc):
    count = metafunc.config.getoption("--repeat")
    if count > 1:
        metafunc.fixturenames.append("_repetition")
        metafunc.parametrize("_repetition", range(count))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    seeds = getattr(item, "funcargs", {}).get("seeds")
    if report.failed and seeds is not None and seeds.current is not None:
        report.sections.append(("replay", f"python -m pytest '{item.nodeid}' --seed {seeds.current}"))
    return report


@pytest.fixture
def seeds(request):
    """The seeds to simulate; a failure shows the command that replays it."""
    return Seeds(request.config.getoption("--seed"))


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    """A small random Llama behind the embedded model's tokenizer: for whole clusters."""
    return write_small_checkpoint(tmp_path_factory.mktemp("small") / "small-llama")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny random Llama without a tokenizer: for engines."""
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", shape=shape)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that start a cluster are one group, which `--dist loadgroup` keeps in one process: one cluster runs at a
    time. tests/cluster comes last of them: its cluster lives from then on, and a process can hold only one."""
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.xdist_group("cluster"))
    items.sort(key=lambda item: item.path.parent.name == "cluster")
    if hasattr(config, "workerinput"):  # one of several processes: the group takes longest, so one begins with it
        items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
