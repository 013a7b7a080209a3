"""Live tests start real vLLM servers with the small real model, one at a time, and leave none behind."""

import importlib.util
import os

import pytest

from fieldbook import models, params, paths, server


def pytest_collection_modifyitems(items):
    """Without vLLM there is nothing to be live."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if "/live/" in str(item.fspath):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed in this environment"))


@pytest.fixture(scope="session")
def quick():
    """Params of the quick live box, its model prepared."""
    loaded = params.load(paths.root() / "tests" / "params" / "quick.yml")
    models.ensure(loaded)
    return loaded


@pytest.fixture
def run_dir(tmp_path):
    """A run folder whose servers are stopped when the test ends, however it ends."""
    folder = tmp_path / "run"
    folder.mkdir()
    os.environ.pop("FIELDBOOK_OWNER", None)
    yield folder
    server.stop_all(folder)
