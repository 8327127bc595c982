"""The source has no call that runs what a file holds, unpacks archives or listens; each rule of the scan is seen to catch."""

import pytest

from tests.conftest import ROOT
from tests.unit.code_scan import find_forbidden

SCANNED = [path for folder in ("trainer", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py")]
HELPERS = [
    ROOT / "tests" / name for name in ("conftest.py", "data/pictures.py", "data/drawing.py", "integration/launch.py")
]


def test_the_source_runs_no_data_unpacks_nothing_and_listens_for_ranks_only() -> None:
    assert len(SCANNED) > 60
    found = {
        str(path.relative_to(ROOT)): find_forbidden(path.read_text(encoding="utf-8")) for path in SCANNED + HELPERS
    }
    meant = found.pop("trainer/distributed/rendezvous.py")  # the store by which the ranks find each other
    assert all(problem.endswith("socket.create_server listens") for problem in meant)
    assert {path: problems for path, problems in found.items() if problems} == {}


CAUGHT = [
    "import pickle; pickle.load(f)",
    "import pickle as p; p.loads(b)",
    "from pickle import loads",
    "from pickle import Unpickler as U; U(f).load()",
    "import pickle; read = pickle.load",
    "import dill",
    "import cloudpickle.cloudpickle",
    "from joblib import load",
    "import shelve",
    "from marshal import loads",
    "import torch; torch.load(f)",
    "import torch; torch.load(f, weights_only=False)",
    "import torch; torch.load(f, weights_only=flag)",
    "from torch import load; load(f, map_location='cpu')",
    "import numpy as np; np.load(f, allow_pickle=True)",
    "import numpy; numpy.load(f, allow_pickle=flag)",
    "import yaml; yaml.load(f)",
    "import yaml; yaml.load(f, yaml.Loader)",
    "import yaml; yaml.load_all(f, Loader=yaml.FullLoader)",
    "import yaml; yaml.unsafe_load(f)",
    "from yaml import full_load",
    "import yaml\nclass Mine(yaml.UnsafeLoader): pass\nyaml.load(f, Mine)",
    "eval('1')",
    "list(map(eval, words))",
    "exec(text)",
    "compile(text, 'x', 'exec')",
    "__import__(name)",
    "import os; os.system('ls')",
    "from os import popen",
    "import subprocess; subprocess.run('ls', shell=True)",
    "import subprocess as s; s.Popen(words, shell=flag)",
    "import subprocess; subprocess.getoutput('ls')",
    "import tarfile; tarfile.open(f).extractall('.')",
    "tar.extract(member)",
    "import zipfile; zipfile.ZipFile(f).extractall()",
    "import shutil; shutil.unpack_archive(f)",
    "import http.server",
    "from http import server",
    "from socketserver import TCPServer",
    "import socket; s = socket.socket(); s.bind(('', 80))",
    "s.listen()",
    "import socket; socket.create_server(('', 80))",
    "import asyncio; asyncio.start_server(f)",
    "import tempfile; tempfile.mktemp()",
    "def f():\n    import pickle\n    return [pickle.load(x) for x in y]",
]
LEFT_ALONE = [
    "import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass",
    "import pickle; pickle.dumps(x)",
    "import torch; torch.load(f, map_location='cpu', weights_only=True)",
    "import numpy as np; np.load(f)",
    "import numpy as np; np.load(f, allow_pickle=False)",
    "import yaml; yaml.safe_load(f)",
    "import yaml; yaml.load(f, yaml.SafeLoader)",
    "import yaml\nclass Mine(yaml.SafeLoader): pass\nyaml.load(f, Mine)",
    "model.eval(); model.compile()",
    "import torch; torch.compile(f)",
    "import re; re.compile('x')",
    "class C:\n    compile: bool = False",
    "import subprocess; subprocess.run(['ls'], shell=False)",
    "tar.extractfile(member)",
    "import socket; socket.gethostname()",
    "import json; json.load(f)",
    "from http.client import HTTPConnection",
]


@pytest.mark.parametrize("source", CAUGHT)
def test_the_scan_catches(source: str) -> None:
    assert find_forbidden(source)


@pytest.mark.parametrize("source", LEFT_ALONE)
def test_the_scan_leaves_alone(source: str) -> None:
    assert find_forbidden(source) == []
