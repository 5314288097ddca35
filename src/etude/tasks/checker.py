# The end of every task's `check.py`, after MODULE, FUNCTION, CASES and the text of canonical.py: prints the first failing
# visible case and exits 1, or `ok`. The wording of a failure is that of `chat.repair_texts`, which a test compares.
from etude.tasks.canonical import outcome

MODULE, FUNCTION, CASES = "", "", [("", "")]


def shown(text: str) -> str:
    line = " ".join(text.split("\n"))
    return line if len(line) <= 60 else line[:57] + "..."


def main() -> None:
    try:
        function = getattr(__import__(MODULE), FUNCTION)
    except BaseException as error:
        print(type(error).__name__ + ": " + " ".join(str(error).split()))
        raise SystemExit(1) from None
    for arguments, want in CASES:
        got = outcome(function, arguments, 1.0)
        if got != want:
            print(FUNCTION + "(" + shown(arguments) + ") -> " + shown(got) + ", want " + shown(want))
            raise SystemExit(1)
    print("ok")


if __name__ == "__main__":
    main()
