# One text for any outcome of a call, the same in the pod and on the host. Standard library only: this file's text is
# also the first part of every task's `driver.py` and lies in its `check.py`. Floats keep ten significant digits, because
# the last ones differ between machines; sets are sorted; iterators are drained; a None result shows changed arguments.
import math
import signal


class CallTimeout(BaseException):
    pass


def canonical(value: object, depth: int = 0) -> str:
    if value is None or type(value) in (bool, int, str, bytes, bytearray):
        return repr(value)
    if depth > 20:
        return "..."
    if type(value) is float:
        return repr(float(format(value, ".10g"))) if math.isfinite(value) else repr(value)
    if type(value) is complex:
        return "complex(" + canonical(value.real) + ", " + canonical(value.imag) + ")"
    if type(value) is list:
        return "[" + ", ".join([canonical(x, depth + 1) for x in value]) + "]"
    if type(value) is tuple:
        return "(" + ", ".join([canonical(x, depth + 1) for x in value]) + (",)" if len(value) == 1 else ")")
    if type(value) is dict:
        return (
            "{" + ", ".join([canonical(k, depth + 1) + ": " + canonical(v, depth + 1) for k, v in value.items()]) + "}"
        )
    if type(value) is set:
        return "{" + ", ".join(sorted([canonical(x, depth + 1) for x in value])) + "}" if value else "set()"
    if type(value) is frozenset:
        return "frozenset(" + canonical(set(value), depth + 1) + ")"
    if hasattr(value, "__next__"):
        items: list[str] = []
        for item in value:  # type: ignore[attr-defined]
            items.append(canonical(item, depth + 1))
            if len(items) > 200:
                raise OverflowError("more than 200 items")
        return "iter([" + ", ".join(items) + "])"
    return repr(value)


def _alarm(signum: int, frame: object) -> None:
    raise CallTimeout


def outcome(function: object, expression: str, seconds: float) -> str:
    # CPU seconds, so that a busy machine does not turn a right answer into a timeout.
    previous = signal.signal(signal.SIGVTALRM, _alarm)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
            if not callable(function):
                raise TypeError
            arguments = eval("(" + expression + ",)", {"__builtins__": {"set": set, "frozenset": frozenset}})
            before = canonical(arguments)
            result = canonical(function(*arguments))
            if result == "None":
                after = canonical(arguments)
                result = result if after == before else "None with " + after
            return result[:2000]
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except CallTimeout:
        return "timeout"
    except BaseException as error:
        return "raises " + type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
