"""A script run in a fork of the agent does what it does in an interpreter of its own: both are run and compared."""

from __future__ import annotations

import re

import pytest

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.pod import PodSpec

pytestmark = pytest.mark.pods

SCRIPTS = {
    "plain": "print('hello')",
    "exit_code": "raise SystemExit(3)",
    "exit_none": "raise SystemExit",
    "exit_text": "raise SystemExit('why')",
    "quit": "quit(4)",
    "error": "def f(x):\n    return 1 / x\nprint('before')\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')",
    "syntax": "def f(:\n    pass",
    "state": "import sys, os\nprint(__name__, __file__, sys.argv, sys.path, sys.executable, os.getcwd(), __builtins__, sorted(globals()))",
    "environment": "import os\nprint(sorted(os.environ.items()), os.getenv('EXTRA'))\nos.system('echo $EXTRA $HOME')",
    "modules": "import helper, re\nprint(helper.name, re.__name__, 'podagent' in __import__('sys').modules)",
    "shadow": "import string\nprint(string.mine)",
    "hash": "print({'a', 'b', 'c', 'd', 'e'}, hash('x'))",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hi')",
    "left_open": "f = open('/tmp/left', 'w')\nf.write('kept')",
    "read_left": "print(open('/tmp/left').read())",
    "stdin": "import sys\nprint(repr(sys.stdin.read()))",
    "recursion": "import sys\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(950))\nf(2000)",
    "os_exit": "import os\nprint('lost')\nos._exit(5)",
    "abort": "import os\nos.abort()",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "descriptors": ("import os\nfor fd in range(0, 50):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"),
    "future": "from __future__ import annotations\ndef f(x: Unknown): pass\nprint(f.__annotations__)",
    "main_guard": "import __main__\nif __name__ == '__main__':\n    print(__main__.__file__, __main__.__spec__)",
    "dataclass_like": "import enum\nclass A(enum.Enum):\n    X = 1\nprint(A.X, A.__module__)",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "closed_stdout": "import sys\nprint('x')\nsys.stdout.close()",
    "no_bytecode": "import helper, os\nprint(os.listdir('.').count('__pycache__'))",
    "child": "import os\npid = os.fork()\nif pid == 0:\n    print('child')\nelse:\n    os.waitpid(pid, 0)\n    print('parent')",
}


@pytest.mark.parametrize("options", [[], ["-B"], ["-I", "-B"]], ids=["plain", "B", "I"])
async def test_warm_and_cold_runs_give_the_same(backend: NamespaceBackend, options: list[str]) -> None:
    files = {f"{name}.py": text.encode() for name, text in SCRIPTS.items()}
    files |= {
        "helper.py": b"name = 'helper'",
        "string.py": b"mine = 'own'",
        "uses.py": b"import re, json, functools, string",
    }
    warm_pod = await backend.create(PodSpec(files=files))
    # a variable of its own is all it takes to be started as a program
    cold_pod = await backend.create(PodSpec(files=files, env={"PYTHONSTARTUP": ""}))
    for name in SCRIPTS:
        if name == "hash" and "-I" in options:
            continue  # an isolated interpreter draws its hash seed; a warm one keeps the pod's
        results = []
        for pod in (warm_pod, cold_pod):
            done = await pod.exec(
                ["python", *options, f"{name}.py", "one", "two"],
                stdin=b"fed\n",
                env={"EXTRA": "more"},
                merge_output=name != "environment",
            )
            text = re.sub(r"\('(PYTHONSTARTUP|ETUDE_EXEC)', '[^']*'\), ", "", done.text())
            results.append((done.exit_code, done.signal, text))
        assert results[0] == results[1], name
    assert not (await warm_pod.processes()).pids


async def test_script_that_is_not_there_is_told_as_python_does(backend: NamespaceBackend) -> None:
    pod = await backend.create(PodSpec())
    done = await pod.exec(["python", "none.py"])
    assert done.exit_code == 2 and b"can't open file '/repo/none.py': [Errno 2]" in done.stderr


async def test_one_run_leaves_no_trace_in_the_next(backend: NamespaceBackend) -> None:
    spoil = b"import re, sys, builtins\nre.compile = None\nbuiltins.print = None\nsys.path.append('x')\nsys.modules['json'] = None"
    pod = await backend.create(
        PodSpec(files={"spoil.py": spoil, "check.py": b"import re, json, sys\nprint(re.compile('a'), 'x' in sys.path)"})
    )
    assert (await pod.exec(["python", "spoil.py"])).ok
    assert (await pod.exec(["python", "check.py"])).stdout == b"re.compile('a') False\n"
