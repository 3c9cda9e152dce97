"""What README and docs show runs, prints what they say, and links to what exists."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from samebits import env

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parent.parent
EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*EXECUTED, *sorted(ROOT.glob("[!R]*.md"))]
FENCED = re.compile(
    r"^(?P<reason><!-- no-run: \S.* -->\n)?```(?P<info>python.*)\n(?P<code>(?:.*\n)*?)```\n"
    r"(?:\n*```text\n(?P<output>(?:.*\n)*?)```$)?",
    re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
SECONDS = 120


@dataclass(frozen=True)
class Block:
    """A Python block of a document; ``output`` is the text block that follows, if one does."""

    document: str
    line: int
    info: str
    reason: str | None
    code: str
    output: str | None

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(name: str, text: str) -> list[Block]:
    return [
        Block(name, text.count("\n", 0, match.start("info")) + 1, *match.group(*GROUPS))
        for match in FENCED.finditer(text)
    ]


GROUPS = ("info", "reason", "code", "output")
BLOCKS = [
    block
    for path in EXECUTED
    if path.exists()
    for block in blocks_of(str(path.relative_to(ROOT)), path.read_text())
]


DOCUMENTS_OF_BLOCKS = sorted({block.document for block in BLOCKS})
# Runs blocks in order, each seeing the names of those before it, and prints what each printed.
PROGRAM = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for where, code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, where, "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("document", DOCUMENTS_OF_BLOCKS)
def test_blocks_run_and_print_what_follows_them(document: str, tmp_path: Path) -> None:
    blocks = [b for b in BLOCKS if b.document == document and b.info == "python"]
    environment = env.for_child(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=f"{ROOT / 'src'}:{env.for_child().get('PYTHONPATH', '')}",
        TRITON_INTERPRET=None,
    )

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([(block.where, block.code) for block in blocks]),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    printed = dict(zip(blocks, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert {block.where: text.strip() for block, text in printed.items() if block.output} == {
        block.where: block.output.strip() for block in blocks if block.output
    }


def test_a_block_that_does_not_run_says_why() -> None:
    silent = [block.where for block in BLOCKS if block.info != "python" and block.reason is None]

    assert silent == []
    assert {block.info for block in BLOCKS} <= {"python", "python no-run"}


def test_blocks_are_found_with_their_output_and_their_reason() -> None:
    text = (
        "a\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
        "<!-- no-run: needs eight GPUs -->\n```python no-run\nx\n```\n"
    )

    first, second = blocks_of("a.md", text)

    assert first == Block("a.md", 2, "python", None, "print(1)\n", "1\n")
    assert second.info == "python no-run"
    assert second.reason == "<!-- no-run: needs eight GPUs -->\n"


def test_the_first_thing_a_reader_sees_runs() -> None:
    first = BLOCKS[0]

    assert first.where.startswith("README.md")
    assert first.output


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]

    assert missing == []


def test_every_page_is_in_the_index() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert sorted(pages - set(LINK.findall((ROOT / "docs" / "README.md").read_text()))) == []
