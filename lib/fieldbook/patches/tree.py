"""Where the vLLM package is, and which release: of this environment, of another Python, or a folder. Nothing imports it."""

import importlib.util
import re
import subprocess
from pathlib import Path

from ..errors import BadInput
from ..schema import Params

_FIND = (
    "import importlib.util as u; s = u.find_spec('vllm'); "
    "print(list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else '')"
)


def vllm_tree() -> Path:
    """Folder of the vLLM package in this environment, found without importing it. Raises BadInput when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput("no vLLM in this environment; `make report` sets one up")
    return Path(next(iter(spec.submodule_search_locations)))


def tree_of_python(python: str, asked: str = "patches --python") -> Path:
    """Folder of the vLLM package that another Python would import, an editable checkout included. Raises BadInput when there is none."""
    try:
        done = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{asked}: {python!r} does not run: {error}") from None
    found = done.stdout.strip()
    if done.returncode or not found:
        raise BadInput(f"{asked}: {python} has no vllm package; give the Python of the environment that vLLM is installed in")
    return Path(found)


def tree_of_box(params: Params) -> Path:
    """Folder of the vLLM package that a box is served with: of engine.python, else of this environment. Raises BadInput when there is none."""
    return tree_of_python(params.engine.python, "engine.python") if params.engine.python else vllm_tree()


def checked(folder: Path) -> Path:
    """The folder, if it is a vllm package. Raises BadInput otherwise."""
    if not (folder / "__init__.py").is_file():
        raise BadInput(f"patches --tree: {folder} is no vllm package; give the folder that holds its __init__.py")
    return folder


def release(tree: Path) -> str | None:
    """Release of a vllm package, from the file that its build writes or the metadata beside it; None where neither tells."""
    file = tree / "_version.py"
    text = file.read_text(errors="replace") if file.is_file() else ""
    if (found := re.search(r"^(?:__version__\s*=\s*version|version|__version__)\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.M)) is not None:
        return found[1]
    for folder in sorted(tree.parent.glob("vllm*.dist-info")):
        if (name := re.fullmatch(r"vllm(?:_cpu)?-([^-]+)\.dist-info", folder.name)) is not None:
            return name[1]
    return None
