"""Options and fixtures for all tests."""

import pytest

from support.checkpoints import write_small_checkpoint


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
