# Grades /repo for any Harbor harness: the driver runs the candidate in its own process, with inputs only; the expected
# values of cases.json stay here. Writes 1.0 or 0.0 to /logs/verifier/reward.txt. Standard library only.
import json
import os
import secrets
import subprocess
import sys

TESTS = os.path.dirname(os.path.abspath(__file__))
REPO = os.environ.get("REPO", "/repo")
LOGS = os.environ.get("LOGS", "/logs/verifier")
TIMEOUT_S = 20


def outcomes(module: str, function: str, inputs: list[str]) -> list[str]:
    nonce = secrets.token_hex(16)
    request = {"module": module, "function": function, "inputs": inputs, "nonce": nonce}
    with open(os.path.join(TESTS, "driver.py")) as file:
        driver = file.read()
    reader, writer = os.pipe()
    # The shell only moves the pipe to descriptor 3.
    command = ["sh", "-c", 'exec 3>&"$0" && exec "$@"', str(writer), sys.executable, "-I", "-B", "-c", driver]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=[writer])
    os.close(writer)
    try:
        child.communicate(json.dumps(request).encode(), timeout=TIMEOUT_S)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        child.kill()
        child.wait()
        return []
    os.set_blocking(reader, False)
    try:
        # At most one pipe buffer: the driver's single write is far smaller.
        text = os.read(reader, 1 << 20).decode()
        return list(json.loads(text.split("\n", 1)[1])) if text.startswith(nonce + "\n") else []
    except (BlockingIOError, ValueError, IndexError):
        return []
    finally:
        os.close(reader)


def main() -> None:
    with open(os.path.join(TESTS, "cases.json")) as file:
        spec = json.load(file)
    cases = spec["visible"] + spec["hidden"]
    found = outcomes(spec["module"], spec["function"], [args for args, _ in cases])
    passed = sum(got == want for got, (_, want) in zip(found, cases)) if len(found) == len(cases) else 0
    os.makedirs(LOGS, exist_ok=True)
    with open(os.path.join(LOGS, "reward.txt"), "w") as file:
        file.write("1.0" if cases and passed == len(cases) else "0.0")
    print(f"{passed} of {len(cases)} cases")


if __name__ == "__main__":
    main()
