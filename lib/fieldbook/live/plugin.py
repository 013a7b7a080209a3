"""A vLLM general plugin that tells which code a process of the server really runs. It is copied beside the server and imports nothing but the standard library.

vLLM loads general plugins in its API server, its engine and every worker. This one starts a thread that waits for one question, a file of places in
vLLM's source, answers it with what is in memory, and ends. Reading the files alone would not do: a module may have been imported before it was patched,
and a patched module may be one that the active path never uses.
"""

import gc
import hashlib
import json
import os
import sys
import threading
import time
import types

FOLDER = "FIELDBOOK_LIVE"
QUESTION = "question.json"
POLL_S = 0.25


def register() -> None:
    """The entry point: wait for the question in this process, and in those that are forked off it."""
    if os.environ.get(FOLDER) and not getattr(register, "done", False):
        register.done = True
        _start()
        os.register_at_fork(after_in_child=_start)


def _start() -> None:
    threading.Thread(target=_answer, args=(os.environ[FOLDER],), name="fieldbook-live", daemon=True).start()


def _answer(folder: str) -> None:
    question = os.path.join(folder, QUESTION)
    while not os.path.exists(question):
        if not os.path.isdir(folder):
            return
        time.sleep(POLL_S)
    with open(question) as file:
        places = json.load(file)["places"]
    try:
        # All objects of a worker are some millions, so they are gone through once.
        kinds = {type(one) for one in gc.get_objects()}
        answer = {**_process(), "places": [_place(root_of_vllm(), kinds, **place) for place in places], "runners": _runners(kinds)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked has to hear of it
        answer = {**_process(), "error": f"{type(error).__name__}: {error}"}
    target = os.path.join(folder, f"answer-{os.getpid()}.json")
    with open(f"{target}.part", "w") as file:
        json.dump(answer, file)
    os.replace(f"{target}.part", target)


def root_of_vllm() -> str:
    """Folder of the vllm package of this process."""
    return os.path.dirname(os.path.abspath(sys.modules["vllm"].__file__))


def _process() -> dict:
    """Who answers: rank among all workers, and in its pipeline and tensor-parallel group; none in the engine and the API server."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    ranks = {}
    for name, group in (("rank", "_WORLD"), ("pp_rank", "_PP"), ("tp_rank", "_TP")):
        found = getattr(state, group, None)
        ranks[name] = None if found is None else getattr(found, "rank" if name == "rank" else "rank_in_group")
    return {"pid": os.getpid(), **ranks}


def _runners(kinds: set) -> list[str]:
    """Model runners that have an object in this process: which of vLLM's two it is."""
    return sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__name__.endswith("ModelRunner")})


def _place(root: str, kinds: set, file: str, symbol: str) -> dict:
    """State of one function: 'not loaded', 'unused' (the module is imported, and no object in this process reaches the function), or 'active'.
    kinds: types of all objects in this process.

    sha256 is that of the file that the module was imported from, same whether the code in memory is what that file compiles to.
    """
    path = os.path.join(root, *file.split("/"))
    found = {"file": file, "symbol": symbol, "path": None, "sha256": None, "state": "not loaded", "same": None}
    module = next((one for one in list(sys.modules.values()) if _file_of(one) == path), None)
    if module is None:
        return found
    with open(path, "rb") as opened:
        source = opened.read()
    found |= {"path": path, "sha256": hashlib.sha256(source).hexdigest(), "state": "unused"}
    owner, _, name = symbol.rpartition(".")
    functions = _reached(module, kinds, owner, name)
    if functions:
        wanted = _compiled(compile(source, path, "exec"), symbol.split("."))
        found |= {"state": "active", "same": wanted is not None and all(wanted in _codes(one) for one in functions)}
    return found


def _file_of(module) -> str | None:
    file = getattr(module, "__file__", None)
    return os.path.abspath(file) if isinstance(file, str) else None


def _reached(module, kinds: set, owner: str, name: str) -> list:
    """The function as it is reached: by its name in the module; through the class of every object that has it, overriding included; or by a class that
    needs no object for it."""
    if not owner:
        return [vars(module)[name]] if name in vars(module) else []
    kind = vars(module).get(owner)
    if not isinstance(kind, type):
        return []
    if isinstance(vars(kind).get(name), (staticmethod, classmethod)):
        return [getattr(kind, name)]
    return [getattr(one, name) for one in kinds if kind in one.__mro__ and hasattr(one, name)]


def _codes(function, depth: int = 4) -> list:
    """Code of a function and of those that it wraps, as decorators do."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or depth == 0:
        return []
    inner = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    wrapped = [one for one in [getattr(function, "__wrapped__", None), *inner] if isinstance(one, (types.FunctionType, types.MethodType))]
    return [code, *(other for one in wrapped for other in _codes(one, depth - 1))]


def _compiled(code, names: list[str]):
    """The code object of a symbol among those of a compiled module, None where it is not there."""
    for name in names:
        code = next((one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name), None)
        if code is None:
            return None
    return code
