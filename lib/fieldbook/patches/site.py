"""One place in vLLM's source: where it is by class, function and shape of the statement, what is wrong there, and the edit.

Nothing is located by line or by copied context. A site that is not there exactly once is not recognised, and then nothing is written.
"""

import ast
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst
import libcst.matchers as m

# In a comment on every line that an edit adds, so that it is told from a mend of someone else's.
MARK = "fieldbook"


@dataclass(frozen=True)
class Site:
    """stock: matcher of the statement with the defect; mended: of the one without. Both are looked for in the body of `symbol` (Class.function or function).

    edit(statement, function): the mended statements in place of the stock one, without touching anything else; none for a site that other edits only rely
    on. keeps: the mended statement comes beside the stock one, which stays. helper: source of functions that are appended to the module, which the edit
    calls. gone: what it means when neither is there ('not recognised', or 'mended' where upstream took the statement away); trace: what is
    left of it in another form, which is not recognised either. needed: whether a tree without the file or class is one that is not recognised; else it
    does not have the defect. wants: has to be somewhere in the module, or the defect cannot be in it. requires: what the edit relies on in the function,
    names above all; without one of them the function is not recognised.
    """

    file: str
    symbol: str
    stock: m.BaseMatcherNode
    mended: m.BaseMatcherNode
    edit: Callable[[cst.CSTNode, cst.FunctionDef], cst.CSTNode | cst.FlattenSentinel] | None
    helper: str = ""
    keeps: bool = False
    trace: m.BaseMatcherNode | None = None
    gone: str = "not recognised"
    needed: bool = True
    wants: m.BaseMatcherNode | None = None
    requires: tuple[m.BaseMatcherNode, ...] = ()


@lru_cache(maxsize=32)
def parse(text: bytes) -> cst.Module | None:
    """Parsed source, kept because one file is asked about many times; None when it is no Python."""
    try:
        return cst.parse_module(text)
    except (cst.ParserSyntaxError, UnicodeDecodeError):
        return None


def function_of(module: cst.Module, symbol: str) -> cst.FunctionDef | None:
    """The function that a symbol names, None where there is not exactly one.

    Looked up level by level: a search through the whole tree of a file of 7,000 lines takes half a second.
    """
    owner, _, name = symbol.rpartition(".")
    bodies = [module.body]
    if owner:
        bodies = [node.body.body for node in module.body if isinstance(node, cst.ClassDef) and node.name.value == owner]
    found = [node for body in bodies for node in body if isinstance(node, cst.FunctionDef) and node.name.value == name]
    return found[0] if len(found) == 1 else None


# Layout: no matcher of the catalogue asks for it, and it is two thirds of a tree.
_LAYOUT = ("whitespace", "leading", "trailing", "lines_after", "header", "footer", "lpar", "rpar", "lbracket", "rbracket", "comma", "semicolon")


@lru_cache
def _parts(kind: type) -> tuple[str, ...]:
    return tuple(name for name in kind.__dataclass_fields__ if not name.startswith(_LAYOUT))


def _descendants(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """A node and all below it but layout, in the order of the source."""
    found, waiting = [], [node]
    while waiting:
        one = waiting.pop()
        if type(one) in (list, tuple):
            waiting += reversed(one)
        elif hasattr(type(one), "_visit_and_replace_children"):
            found.append(one)
            waiting += [getattr(one, name) for name in reversed(_parts(type(one)))]
    return tuple(found)


# A function is searched for every site in it.
_of_function = lru_cache(maxsize=16)(_descendants)


def findall(node: cst.CSTNode, matcher: m.BaseMatcherNode) -> list[cst.CSTNode]:
    """As libcst's, which copies the tree on its way; here nodes of another type than the matcher's are left out before anything is compared."""
    kind = type(matcher).__name__
    concrete = hasattr(cst, kind)
    below = (_of_function if isinstance(node, cst.FunctionDef) else _descendants)(node)
    return [one for one in below if (not concrete or type(one).__name__ == kind) and m.matches(one, matcher)]


def state(site: Site, module: cst.Module | None) -> str:
    """'present', 'mended', 'does not apply' or 'not recognised'. module: None for a file that is no Python."""
    function = function_of(module, site.symbol) if module else None
    if function is None:
        absent = module is not None and not site.needed and not _names(module, site.symbol.partition(".")[0])
        return "does not apply" if absent else "not recognised"
    stock, mended = len(findall(function, site.stock)), len(findall(function, site.mended))
    if site.wants is not None and not findall(module, site.wants):
        return "mended"
    if (stock, mended) == (1, 0):
        known = all(findall(function, one) for one in site.requires)
        return ("present" if site.edit else "does not apply") if known else "not recognised"
    if (stock, mended) == ((1, 1) if site.keeps else (0, 1)):
        return "mended"
    left = site.trace is not None and findall(function, site.trace)
    return site.gone if stock == mended == 0 and not left else "not recognised"


def state_in(site: Site, text: bytes | None) -> str:
    """The same as `state` of a file's source, None for a file that is not there; of which only the function in question is parsed where Python's own parser
    finds it once. A look at an installation is to take two seconds, and libcst takes one for a file of 7,000 lines."""
    if text is None:
        return "not recognised" if site.needed else "does not apply"
    module = _piece(text, site.symbol)
    if module is None:
        return state(site, parse(text))
    if site.wants is not None and not findall(parse(text), site.wants):
        return "mended"
    return state(dataclasses.replace(site, wants=None), module)


@lru_cache(maxsize=64)
def _piece(text: bytes, symbol: str) -> cst.Module | None:
    """A module with nothing but one function, in its class; None where there is not exactly one, or it cannot be cut out."""
    owner, _, name = symbol.rpartition(".")
    nodes = _definitions(text)
    if owner:
        nodes = [member for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner for member in node.body]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1:
        return None
    first = min([found[0].lineno, *(one.lineno for one in found[0].decorator_list)])
    lines = text.splitlines(keepends=True)[first - 1 : found[0].end_lineno]
    return parse((f"class {owner}:\n".encode() if owner else b"") + b"".join(lines))


def _names(module: cst.Module, name: str) -> bool:
    return any(isinstance(node, cst.ClassDef | cst.FunctionDef) and node.name.value == name for node in module.body)


def line_of(symbol: str, text: bytes) -> int | None:
    """Line where a symbol (Class.function, function or class) is defined, 1 for the first; None where it is not, or the text is no Python."""
    nodes, found = _definitions(text), None
    for name in symbol.split("."):
        found = next((node for node in nodes if getattr(node, "name", None) == name), None)
        if found is None:
            return None
        nodes = getattr(found, "body", [])
    return found.lineno


@lru_cache(maxsize=64)
def _definitions(text: bytes) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


class _Replace(cst.CSTTransformer):
    """Puts the edit in the place of the stock statement of one function."""

    def __init__(self, site: Site, function: cst.FunctionDef):
        self.site, self.function, self.inside, self.done = site, function, False, 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if node is self.function:
            self.inside = True

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if original_node is self.function:
            self.inside = False
        return updated_node

    def on_leave(self, original_node, updated_node):
        updated_node = super().on_leave(original_node, updated_node)
        if self.inside and m.matches(original_node, self.site.stock):
            self.done += 1
            return self.site.edit(updated_node, self.function)
        return updated_node


def edited(site: Site, module: cst.Module) -> cst.Module:
    """The module with the site mended, everything else byte for byte as it was. Call it where state() is 'present'."""
    function = function_of(module, site.symbol)
    transformer = _Replace(site, function)
    # Only the function is walked; its body takes the place of the old one in the module.
    changed = function.visit(transformer)
    owner, _, _ = site.symbol.rpartition(".")
    body = list(module.body)
    for at, node in enumerate(body):
        if node is function:
            body[at] = changed
        elif owner and isinstance(node, cst.ClassDef) and node.name.value == owner and any(member is function for member in node.body.body):
            members = [changed if member is function else member for member in node.body.body]
            body[at] = node.with_changes(body=node.body.with_changes(body=members))
    if site.helper:
        # What another patch of the same file has brought is not brought again.
        there = {cst.Module([]).code_for_node(node).strip() for node in body if not isinstance(node, cst.ClassDef)}
        wanted = cst.parse_module(site.helper, config=module.config_for_parsing).body
        added = [node for node in wanted if cst.Module([]).code_for_node(node).strip() not in there]
        if added:
            gap = [cst.EmptyLine(indent=False)] * 2
            body += [added[0].with_changes(leading_lines=[*gap, *(line for line in added[0].leading_lines if line.comment)]), *added[1:]]
    return module.with_changes(body=body)


@dataclass(frozen=True)
class Defect:
    """One entry of the catalogue. sites: edited together or not at all; none for a defect that is only looked for (look).

    effect: what it does to you; reports: numbers in the field reports ('000-3'); upstream: pull requests and issues; met_by(params, spec): whether a box
    and model would meet it; bundle: ids that go with it. look(read) answers for a whole tree, read(path) giving a file's source or None. blocks: a box that
    meets it must not be served with it. excludes: ids that treat the same thing another way. refused(params, spec): why it must not be applied for a box,
    '' where it may; with it, a patch is only applied for a box that is given.
    """

    id: str
    title: str
    effect: str
    symptom: str
    drop_when: str
    met_by: Callable
    sites: tuple[Site, ...] = ()
    reports: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    bundle: tuple[str, ...] = ()
    look: Callable | None = None
    blocks: bool = True
    excludes: tuple[str, ...] = ()
    refused: Callable | None = None
