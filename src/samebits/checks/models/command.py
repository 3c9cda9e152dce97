"""`samebits check models`: its arguments, and what it prints and returns."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from samebits.checks.models import report
from samebits.checks.models.experts import judge_found
from samebits.checks.models.finding import Finding
from samebits.checks.models.language import judge_language
from samebits.checks.models.outcome import THE_CLASS
from samebits.checks.models.protocol import Found, LanguageBuilder, ModelProvider
from samebits.checks.result import FAILED, NOTHING_RUN, PASSED, USAGE, tracked
from samebits.errors import UnsupportedError, must, unknown

_DTYPES = (torch.bfloat16, torch.float32)
_DESCRIPTION = """\
Which experts implementations compute what the model says? Find every experts class of the
installed transformers, build each tiny, and judge every registered experts implementation of it,
and ours, against the class's own code in fp64.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check models`` to ``parser``."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help="an experts class, its model or its full "
        "name (gpt_oss.GptOssExperts); may be repeated; default: all",
    )
    add("--implementation", action="append", metavar="NAME", help="may be repeated; default: all")
    add("--list", action="store_true", help="list models and implementations, and stop")
    add("--full", action="store_true", help="every whole language model that can be built")
    add(
        "--fail-on",
        action="append",
        metavar="NAME",
        help="exit 1 only where one of these implementations fails; default: all that were run",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one object a line, as they are found")
    output.add_argument("--issue-text", action="store_true", help="a report to paste into an issue")


class Plan(NamedTuple):
    """What one run of the command looks at."""

    found: list[Found]
    languages: list[LanguageBuilder]
    implementations: list[str]
    fail_on: list[str] | None


def main(arguments: argparse.Namespace, provider: ModelProvider | None = None) -> int:
    """Run the check and print its result.

    Args:
        arguments: Parsed by a parser that ``add_arguments`` prepared.
        provider: Where models come from; None takes the installed transformers.

    Returns:
        The exit code.

    Determinism: the findings are repeatable; inputs have fixed seeds.
    """
    try:
        provider = _transformers() if provider is None else provider
        plan = make_plan(arguments, provider)
    except (ImportError, UnsupportedError) as error:
        print(f"not_run: {error}", file=sys.stderr)
        return NOTHING_RUN
    except ValueError as error:
        print(f"samebits check models: {error}", file=sys.stderr)
        return USAGE
    if arguments.list:
        print(listing(plan))
        return PASSED
    emit: Callable[[Finding], None] = _print_json if arguments.json else _ignore
    findings = []
    for finding in _on_one_thread(judge(plan, provider)):
        findings.append(finding)
        emit(finding)
    if arguments.issue_text:
        print(report.issue_text(findings) or "nothing failed")
    elif not arguments.json:
        print(report.summary(findings))
    return exit_code(findings, plan.fail_on)


def make_plan(arguments: argparse.Namespace, provider: ModelProvider) -> Plan:
    """Return what the arguments ask for.

    Raises:
        ValueError: A name is unknown or means more than one thing.
        UnsupportedError: The framework's interface is not one that is known here.
    """
    everything = list(provider.experts())
    known = list(provider.implementations())
    for name in [*(arguments.implementation or ()), *(arguments.fail_on or ())]:
        if name not in known:
            raise ValueError(unknown("implementation", name, known))
    chosen = arguments.implementation or known
    if arguments.model is None:
        all_languages = list(provider.languages(full=arguments.full))
        return Plan(everything, all_languages, chosen, arguments.fail_on)
    by_name = {found.name: found for found in everything}
    languages = {language.name: language for language in provider.languages(full=True)}
    names, chosen_languages = [], []
    for name in arguments.model:
        if name in languages:
            chosen_languages.append(name)
            continue
        names.append(match(name, list(by_name)))
        model = names[-1].partition(".")[0]
        chosen_languages += [n for n in languages if n.partition(".")[0] == model]
    return Plan(
        [by_name[name] for name in dict.fromkeys(names)],
        [languages[name] for name in dict.fromkeys(chosen_languages)],
        chosen,
        arguments.fail_on,
    )


def match(name: str, names: Sequence[str]) -> str:
    """Return the one of ``names`` that ``name`` means: itself, its model or its class.

    Raises:
        ValueError: None, or more than one, fits; the message lists what is near.
    """
    if name in names:
        return name
    fits = [n for n in names if name in (n.rpartition(".")[0], n.rpartition(".")[2])]
    if len(fits) == 1:
        return fits[0]
    near = fits or [n for n in names if name.lower() in n.lower()] or names[:3]
    rule = f"name one experts class, such as {', '.join(near[:5])}"
    hint = "hint: --list names them all; classes that the interface misses are in docs/refused.md"
    raise ValueError(must("--model", rule, f"{name!r}\n{hint}"))


def listing(plan: Plan) -> str:
    """Return the names that ``--list`` prints."""
    models = "\n".join(f"  {found.name}" for found in plan.found)
    languages = "\n".join(f"  {language.name}" for language in plan.languages)
    implementations = "\n".join(f"  {name}" for name in plan.implementations)
    return (
        f"{len(plan.found)} experts classes\n{models}\n"
        f"{len(plan.languages)} whole language models\n{languages}\n"
        f"{len(plan.implementations)} implementations\n{implementations}"
    )


def judge(plan: Plan, provider: ModelProvider) -> Iterator[Finding]:
    """Yield every finding of the plan, with the provider's versions."""
    versions = dict(provider.versions)
    for found in tracked(plan.found, "experts classes"):
        for finding in judge_found(found, provider, plan.implementations, _DTYPES):
            yield replace(finding, versions=versions)
    for builder in tracked(plan.languages, "language models"):
        for finding in judge_language(builder, provider, plan.implementations, _DTYPES):
            yield replace(finding, versions=versions)


def exit_code(findings: Sequence[Finding], fail_on: Sequence[str] | None) -> int:
    """Return 1 where something that counts failed, 3 where nothing that counts ran, else 0."""
    counted = [f for f in findings if fail_on is None or f.implementation in fail_on]
    if any(f.verdict == "fail" for f in counted):
        return FAILED
    ran = any(f.verdict == "pass" and f.implementation != THE_CLASS for f in counted)
    return PASSED if ran else NOTHING_RUN


def _transformers() -> ModelProvider:
    # The one place where the check names a framework.
    from samebits.integrations.transformers.provider import Transformers

    return Transformers()


def _on_one_thread(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield ``findings``, computed on one thread: tiny products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from findings
    finally:
        torch.set_num_threads(threads)


def _print_json(finding: Finding) -> None:
    print(finding.to_json(), flush=True)


def _ignore(finding: Finding) -> None:
    del finding
