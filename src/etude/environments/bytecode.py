"""Run as a script by the bare interpreter (`-I -S`): which files given modules load, and compiled code of Python files.

A process of its own, so that the compiled bytes do not depend on what the caller has imported before. Reads a JSON request
on stdin `{modules, sources: [[path, shown name]]}`, writes a JSON answer: modules with their kind and file, code in hex.
"""

import importlib
import importlib.util
import json
import marshal
import sys


def compiled(path: str, shown: str) -> str:
    """Hex of a .pyc that needs no source: unchecked, no time stamp."""
    with open(path, "rb") as file:
        code = compile(file.read(), shown, "exec", dont_inherit=True)
    # flags 1: hash-based and unchecked, the hash is zero
    return (importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)).hex()


def main() -> None:
    request = json.load(sys.stdin)
    missing = []
    for name in request["modules"]:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    loaded = {}
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is not None and name != "__main__":
            loaded[name] = {
                "origin": spec.origin or "",
                "package": spec.submodule_search_locations is not None,
                "file": getattr(module, "__file__", None) or "",
            }
    code = {path: compiled(path, shown) for path, shown in request["sources"]}
    import _imp

    frozen = list(getattr(_imp, "_frozen_module_names", list)())
    json.dump(
        {
            "loaded": loaded,
            "missing": missing,
            "code": code,
            "builtin": list(sys.builtin_module_names),
            "frozen": frozen,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
