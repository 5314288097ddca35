

def main():
    try:
        function = getattr(__import__(MODULE), FUNCTION)
    except BaseException as error:
        print(type(error).__name__ + ": " + " ".join(str(error).split()))
        raise SystemExit(1)
    for arguments, want in CASES:
        got = outcome(function, arguments, 1.0)
        if got != want:
            print(FUNCTION + "(" + shown(arguments) + ") -> " + shown(got) + ", want " + shown(want))
            raise SystemExit(1)
    print("ok")


def shown(text):
    line = " ".join(text.split("\n"))
    return line if len(line) <= 60 else line[:57] + "..."


main()
