"""Looks through source code for what would run a data file, unpack an archive to names of its own, or listen on the network."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# Never named at all, called or not: full names, whatever they were imported as.
FORBIDDEN = {
    "runs what a file holds": [
        "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._load", "pickle._loads", "_pickle.load", "_pickle.loads",
        "_pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "shelve.Shelf", "yaml.unsafe_load",
        "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader",
        "yaml.FullLoader", "yaml.CLoader", "yaml.CUnsafeLoader", "yaml.CFullLoader", "torch.hub.load", "pandas.read_pickle",
        "torch.jit.load", "torch.package.PackageImporter",
    ],
    "runs text as a program": [
        "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile", "os.system", "os.popen",
        "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "runpy.run_path",
    ],
    "unpacks an archive to the names it holds": [
        "shutil.unpack_archive", "torchvision.datasets.utils.extract_archive",
        "torchvision.datasets.utils.download_and_extract_archive",
    ],
    "listens": [
        "socket.create_server", "asyncio.start_server", "asyncio.start_unix_server", "multiprocessing.connection.Listener",
        "multiprocessing.managers.BaseManager",
    ],
    "is a name that another may take first": ["tempfile.mktemp"],
}  # fmt: skip
FORBIDDEN_MODULES = {
    "dill": "runs what a file holds",
    "cloudpickle": "runs what a file holds",
    "joblib": "runs what a file holds",
    "shelve": "runs what a file holds",
    "marshal": "runs what a file holds",
    "http.server": "listens",
    "socketserver": "listens",
    "xmlrpc": "listens",
    "flask": "listens",
}
FORBIDDEN_METHODS = {
    "extract": "unpacks an archive to the names it holds",
    "extractall": "unpacks an archive to the names it holds",
    "bind": "listens",
    "listen": "listens",
}
_SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
_WHY = {name: why for why, names in FORBIDDEN.items() for name in names}


def find_forbidden(source: str) -> list[str]:
    """ "line N: name: what is wrong with it" for each find, in the order of the lines."""
    tree = ast.parse(source)
    scan = _Scan(tree)
    found = {problem for node in ast.walk(tree) for problem in scan.problems(node)}
    return [f"line {line}: {what}" for line, what in sorted(found)]


class _Scan:
    def __init__(self, tree: ast.Module) -> None:
        self._names = dict(_imported(tree))  # local name -> full name
        loaders = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        self._loaders = _SAFE_LOADERS | {
            c.name for c in loaders if any(self._full(b) in _SAFE_LOADERS for b in c.bases)
        }

    def problems(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        """(line, what) of one node, without those inside it."""
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            names = [self._full(node)]
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in self._problems_of_call(node))
            return
        else:
            return
        for name in names:
            module = next((m for m in FORBIDDEN_MODULES if name == m or name.startswith(f"{m}.")), None)
            why = _WHY.get(name) or (module and FORBIDDEN_MODULES[module])
            if why:
                yield node.lineno, f"{name} {why}"

    def _problems_of_call(self, node: ast.Call) -> Iterator[str]:
        name, given = self._full(node.func), {k.arg: k.value for k in node.keywords if k.arg}
        if name == "torch.load" and not _is(given.get("weights_only"), True):
            yield "torch.load without weights_only=True runs what a file holds"
        if name == "numpy.load" and "allow_pickle" in given and not _is(given["allow_pickle"], False):
            yield "numpy.load with allow_pickle runs what a file holds"
        if name in ("yaml.load", "yaml.load_all"):
            loader = given.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
            if loader is None or self._full(loader) not in self._loaders:
                yield f"{name} without a SafeLoader runs what a file holds"
        if "shell" in given and not _is(given["shell"], False):
            yield "shell= runs text as a program"
        if isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_METHODS:
            yield f".{node.func.attr} {FORBIDDEN_METHODS[node.func.attr]}"

    def _full(self, node: ast.expr) -> str:
        """Dotted name as imported; empty for what is no name (the result of a call, ...)."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            before = self._full(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
