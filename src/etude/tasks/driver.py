# Calls the candidate with inputs only; expected values never enter this process. Reads {module, function, inputs, nonce?} as
# JSON on stdin before it imports anything of the repository (the current directory), and writes once, to descriptor 3 (or to
# stdout when that is closed): the nonce and a newline if there was one, then a JSON list of canonical outcomes. A timeout
# or a failing import stands for every case after it. In a task folder the text of canonical.py comes before this line.
import json
import os
import sys


def main():
    request = json.loads(sys.stdin.read())
    try:
        descriptor = os.dup(3)
        os.close(3)
    except OSError:
        descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    results = []
    stopped = ""
    try:
        function = getattr(__import__(request["module"]), request["function"])
    except BaseException as error:
        stopped = "raises " + type(error).__name__
    for expression in request["inputs"]:
        if not stopped:
            result = outcome(function, expression, 1.0)
            stopped = result if result == "timeout" else ""
        results.append(stopped or result)
    data = json.dumps(results)
    if "nonce" in request:
        data = request["nonce"] + "\n" + data
    data = data.encode()
    while data:
        data = data[os.write(descriptor, data) :]
    os._exit(0)


main()
