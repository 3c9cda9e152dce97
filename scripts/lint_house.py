"""House rules that no ready-made linter knows. Prints one line for each finding; exits 1 if any.

Rules are functions of a ``File`` or of the whole list of files that yield findings; ``RULES`` and
``TREE_RULES`` name them. The files are those git knows, and those it would add.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

LONGEST = 300
# Kernels hold forward and backward together; tests are lists.
LONGEST_KERNEL = LONGEST_TEST = 500

# Names of places where anything is put: they say nothing.
DRAWERS = frozenset(
    {"util", "utils", "helper", "helpers", "common", "misc", "core"}
    | {"base", "impl", "details", "v2", "new", "fast"}
)

# Word of others -> ours. A parameter, function, class or file has one spelling here.
SYNONYMS = {
    "topk_weights": "topk_probs",
    "routing_weights": "topk_probs",
    "expert_ids": "topk_ids",
    "impl": "backend",
    "provider": "backend",
    "quant": "format",
    "recipe": "format",
    "naive": "reference",
    "ref": "reference",
    "opt_flags": "heuristic",
    "cu_seqlens": "offsets",
    "group_sizes": "offsets",
    "w1": "gate_up",
    "w13": "gate_up",
    "w2": "down",
}
# There a foreign interface dictates names, or is what is spoken about.
FOREIGN = (
    "src/samebits/integrations/",
    "src/samebits/functional",
    "src/samebits/checks/models/",
)

# Where public functions of tensors compute bits, so that each says which.
COMPUTING = ("src/samebits/ops/", "src/samebits/backends/")
DETERMINISM = re.compile(r"Determinism:|See `samebits\.")

ENVIRONMENT_READER = "src/samebits/env.py"
MACHINE_PATH = re.compile(
    r"(?<![\w.:/<-])(?:/(?:home|root|Users|work|mnt|scratch|tmp)/\w|(?:\.\./)?shared/(?=\w))"
)
BANNER = re.compile(r"#\s*([-=#*~_])\1{3,}")
UNCONDITIONAL = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
TOLERANCES = frozenset({"rtol", "atol", "allclose", "assert_close", "isclose", "approx"})

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Line, what is wrong there.
Finding = tuple[int, str]


@dataclass(frozen=True)
class File:
    """A text file of the project: its path from the root, and its text."""

    path: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The path's components."""
        return PurePosixPath(self.path).parts

    @property
    def is_source(self) -> bool:
        """Whether it is Python code of the package."""
        return self.path.startswith("src/") and self.path.endswith(".py")

    @property
    def is_test(self) -> bool:
        """Whether it belongs to the tests."""
        return self.path.startswith("tests/")

    @property
    def is_foreign(self) -> bool:
        """Whether others choose its names."""
        return self.path.startswith(FOREIGN)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; empty where the file is not Python."""
        return ast.parse(self.text if self.path.endswith(".py") else "")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @property
    def definitions(self) -> list[Definition]:
        """Functions and classes, nested ones too."""
        return [node for node in self.nodes if isinstance(node, Definition)]


def length(file: File) -> Iterator[Finding]:
    """A file fits in a head."""
    longest = LONGEST
    if file.is_test:
        longest = LONGEST_TEST
    elif file.parts[-1] == "kernel.py":
        longest = LONGEST_KERNEL
    lines = len(file.text.splitlines())
    if file.path.endswith(".py") and lines > longest:
        yield lines, f"a file has at most {longest} lines, this has {lines}: split it by subject"


def drawers(file: File) -> Iterator[Finding]:
    """A name says what is inside."""
    names = [(1, PurePosixPath(part).stem) for part in file.parts]
    if not file.is_test and not file.is_foreign:  # tests are sentences
        names += [(node.lineno, node.name) for node in file.definitions]
    for line, name in names:
        for word in sorted(DRAWERS & set(_words(name))):
            yield line, f"{name!r} is a drawer ({word}): name what is inside"


def synonyms(file: File) -> Iterator[Finding]:
    """An idea has one spelling."""
    if not file.is_source or file.is_foreign:
        return
    for node in file.definitions:
        if node.name.startswith("_"):
            continue
        for name in [node.name, *_parameters(node)]:
            word = next((word for word in SYNONYMS if f"_{word}_" in f"_{_snake(name)}_"), None)
            if word is not None:
                yield node.lineno, f"{name!r} is spelled with {SYNONYMS[word]!r} here, not {word!r}"


def determinism(file: File) -> Iterator[Finding]:
    """A function that computes says which bits."""
    if not file.path.startswith(COMPUTING) or not file.is_source or "_triton" in file.parts:
        return
    for node in file.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if "Tensor" not in ast.unparse(node.args) + ast.unparse(node.returns or ast.Tuple([])):
            continue
        if not DETERMINISM.search(ast.get_docstring(node) or ""):
            yield node.lineno, f"the docstring of {node.name} needs a 'Determinism:' line"


def environment(file: File) -> Iterator[Finding]:
    """One module reads the environment."""
    if not file.is_source or file.path == ENVIRONMENT_READER:
        return
    for node in file.nodes:
        attribute = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        names = {alias.name for alias in node.names} if imported else set()
        if attribute or names & {"environ", "getenv"}:
            yield node.lineno, f"only {ENVIRONMENT_READER} reads the environment"


def tolerances(file: File) -> Iterator[Finding]:
    """Tests have one error budget."""
    if not file.is_test:
        return
    for node in file.nodes:
        name = node.arg if isinstance(node, ast.keyword) else getattr(node, "attr", None)
        if name in TOLERANCES:
            rule = "samebits.testing has the one error budget and assert_bitwise_equal"
            yield node.lineno, f"{name}: {rule}"


def comments(file: File) -> Iterator[Finding]:
    """A comment says why."""
    if not file.path.endswith(".py"):
        return
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if BANNER.match(token.string):
            yield token.start[0], "a banner: split the file, or leave it out"
        if UNCONDITIONAL.search(token.string):
            yield (
                token.start[0],
                "a TODO is an issue, or a sentence with the condition that ends it",
            )


def machine_paths(file: File) -> Iterator[Finding]:
    """The repository knows no machine."""
    for number, line in enumerate(file.text.splitlines(), 1):
        found = MACHINE_PATH.search(line)
        if found:
            yield number, f"{found.group()}… is a path of one machine"
            return  # data would repeat it on every line


def operations(files: Sequence[File]) -> Iterator[tuple[str, Finding]]:
    """An operation is its specification and its test."""
    paths = {file.path for file in files}
    inside = [file.parts for file in files if file.path.startswith("src/samebits/ops/")]
    for name in sorted({parts[3] for parts in inside if len(parts) > 4} - {"_triton"}):
        folder = f"src/samebits/ops/{name}"
        for wanted in (f"{folder}/reference.py", f"tests/ops/test_{name}.py"):
            if wanted not in paths:
                yield folder, (1, f"an operation has {wanted}")


RULES = (
    length,
    drawers,
    synonyms,
    determinism,
    environment,
    tolerances,
    comments,
    machine_paths,
)
TREE_RULES = (operations,)


def lint(files: Sequence[File]) -> list[str]:
    """Return the findings in ``files`` as ``path:line: rule: message``."""
    found = [
        (file.path, rule.__name__, finding)
        for file in files
        for rule in RULES
        for finding in rule(file)
    ]
    found += [
        (path, rule.__name__, finding) for rule in TREE_RULES for path, finding in rule(files)
    ]
    return [f"{path}:{line}: {name}: {message}" for path, name, (line, message) in sorted(found)]


def project_files(root: Path) -> list[File]:
    """Return the text files that git knows or would add below ``root``."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    files = []
    for path in sorted(filter(None, listed.stdout.split("\0"))):
        if not (root / path).is_file():  # deleted, not yet committed
            continue
        content = (root / path).read_bytes()
        if b"\0" not in content:
            files.append(File(path, content.decode()))
    return files


def main() -> int:
    """Lint the project that this file belongs to."""
    findings = lint(project_files(Path(__file__).parent.parent))
    print("\n".join(findings) if findings else "house rules: kept")
    return 1 if findings else 0


def _words(name: str) -> list[str]:
    return _snake(name).split("_")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _parameters(node: Definition) -> list[str]:
    if isinstance(node, ast.ClassDef):
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        return [field.target.id for field in fields if isinstance(field.target, ast.Name)]
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in listed]


if __name__ == "__main__":
    sys.exit(main())
