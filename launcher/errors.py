"""What can be wrong with a config, as records: every problem says where, got, expected and remedy."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.streams import visible

EXIT_OK = 0
EXIT_RANK_FAILED = 1
EXIT_USAGE = 2
EXIT_DOES_NOT_FIT = 3  # the plan says that the run would be out of memory
EXIT_SWEEP_FAILED = 4  # a sweep ended with failed jobs
EXIT_HANG = 5
EXIT_OUT_OF_MEMORY = 6
EXIT_SAVED = 75  # saved on a signal: start me again
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    what: one sentence that names the key or argument.
    key: dotted config key, empty where the problem is about an argument.
    got: the offending value as the user would write it; None where there is none.
    source: where it came from: the override as typed, or a preset's file.
    expected: what would be right.
    remedy: what to type instead.
    """

    what: str
    key: str = ""
    got: str | None = None
    source: str = ""
    expected: str = ""
    remedy: str = ""


class ConfigErrors(Exception):
    """All problems of one command line. The program says them and ends with exit code 2; nothing has been started.

    about: what the problems are with, in the heading. closing: the last line of what is said.
    """

    about = "in the config"
    closing = "Nothing was started. fsdp-launch --help lists groups and keys."

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(describe(self.problems, self.about))


def describe(problems: list[Problem], about: str = ConfigErrors.about) -> str:
    """The text for people: a heading with the count, then one block per problem."""
    heading = f"1 problem {about}:" if len(problems) == 1 else f"{len(problems)} problems {about}:"
    return "\n\n".join([heading, *(_block(number, problem) for number, problem in enumerate(problems, start=1))])


def _block(number: int, problem: Problem) -> str:
    lead = f"{number}. "
    indent = " " * len(lead)
    title = f"{problem.key}: {problem.what}" if problem.key else problem.what
    lines = [lead + title.replace("\n", "\n" + indent)]
    facts = (
        ("got", problem.got),
        ("from", problem.source),
        ("expected", problem.expected),
        ("remedy", problem.remedy),
    )
    for name, value in facts:
        if value:
            lines.append(f"{indent}{name + ':':<10}{value}".replace("\n", "\n" + indent + " " * 10))
    return visible("\n".join(lines))
