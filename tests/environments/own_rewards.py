"""A user's own environments, good and bad, for tests."""

import asyncio
import os
import signal
import subprocess
import sys
import time


class Length:
    """As docs would have it: options, and a number."""

    def __init__(self, least: int = 1):
        self.least = least

    def score(self, attempt):
        return float(len(attempt.text) >= self.least)


class Told:
    """Does what a completion says."""

    def score(self, attempt):
        what, _, value = attempt.text.partition(" ")
        match what:
            case "crash":
                os._exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    pass
            case "raise":
                raise KeyError("no such key")
            case "exit":
                sys.exit(1)
            case "pid":
                return os.getpid()
            case "child":
                return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid
            case "sleep":
                time.sleep(float(value))
                return float(value)
        return eval(attempt.text)


class Waits:
    """Told the same, but waits."""

    async def score(self, attempt):
        what, _, value = attempt.text.partition(" ")
        if what == "sleep":
            await asyncio.sleep(float(value))
            return float(value)
        return Told().score(attempt)


class Two:
    components = 2

    def score(self, attempt):
        return eval(attempt.text)


class Once:
    """Can be made once for each file that it is given."""

    def __init__(self, path: str):
        with open(path, "x"):
            pass

    def score(self, attempt):
        return Told().score(attempt)


class NoScore:
    pass


class WrongScore:
    def score(self, completion, answer):
        return 1.0


class WrongComponents(Told):
    components = "two"


class CannotBeMade(Told):
    def __init__(self):
        raise RuntimeError("no\nlicence")


def made(least: int):
    return Length(least)


def crashes():
    os._exit(4)


CONSTANT = 7
