"""The committed record of the battery; and, with ``-m slow``, the battery itself, minutes each."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import stale_battery
import stale_megatron
import stale_table

pytestmark = pytest.mark.reference

RESULTS = Path(stale_battery.__file__).parent / "results"
RECORDS = sorted(RESULTS.glob("stale-*.json"))
BAD = ("missed", "false alarm", "fail")
PROGRAMS = [
    pytest.param(group, program, id=program.name)
    for group, programs in stale_table.GROUPS.items()
    for program in programs
]
NO_MEGATRON = "not_run: no package megatron; put the folder of an unpacked wheel on PYTHONPATH"


def rows(path, group):
    found = json.loads(path.read_text())["rows"]
    return [row for row in found if row["group"].partition(" ")[0] == group]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_nothing_was_missed_and_nothing_reported_falsely(path):
    record = json.loads(path.read_text())

    assert record["versions"]["torch"].partition("+")[0] in path.stem
    assert [row for row in record["rows"] if row["verdict"] in BAD] == []


@pytest.mark.parametrize("group", ["battery", "families", "clean"])
def test_the_record_of_the_pinned_torch_is_whole(group):
    found = rows(RESULTS / "stale-cpu-torch-2.13.0.json", group)

    assert {(row["program"], row["gradient"]) for row in found} == expected(group, "2.13.0").keys()


# Device and torch -> how many of the 32 rows it gets wrong. 2.11 does not compile one other.
WHOLE_BATTERIES = {
    ("cpu", "2.11.0"): 18,
    ("cpu", "2.13.0"): 19,
    ("cpu", "2.15.0"): 6,
    ("cuda", "2.11.0"): 18,
}


def expected(group, version):
    """Return what the table says of each row of a group."""
    number = tuple(int(part) for part in version.split(".")[:2])
    found = {}
    for program in stale_table.GROUPS[group]:
        for gradient in program.gradients:
            silent = "refused" if gradient and number in program.refused else "silent"
            stale = program.stale(number, gradient)
            found[program.name, gradient] = "found" if stale else silent
    return found


def judged(path, group):
    return {(row["program"], row["gradient"]): row["verdict"] for row in rows(path, group)}


@pytest.mark.parametrize(("device", "version"), WHOLE_BATTERIES)
def test_every_fault_of_the_table_was_found(device, version):
    table = expected("battery", version)

    assert judged(RESULTS / f"stale-{device}-torch-{version}.json", "battery") == table
    assert list(table.values()).count("found") == WHOLE_BATTERIES[device, version]


def test_launches_of_triton_kernels_are_judged_as_the_table_says():
    path = RESULTS / "stale-cuda-torch-2.11.0.json"

    assert judged(path, "triton") == expected("triton", "2.11.0")
    # Stale in the second process only, as a plain loop over two processes shows it.
    (row,) = [r for r in rows(path, "triton") if r["stale"]]
    assert (row["program"], row["stale_automatic"]) == ("triton:launch_expression", False)
    assert row["stale_second_process"]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "program"), PROGRAMS)
def test_the_battery_is_judged_as_its_table_says(group, program):
    where = f"{program.inputs.__module__}:{program.inputs.__name__}"

    found = stale_battery.measure(group, program, where, first=False)

    assert not {row["verdict"] for row in found} & set(BAD)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason=NO_MEGATRON)
@pytest.mark.parametrize("program", stale_megatron.PROGRAMS, ids=lambda program: program.name)
def test_the_functions_of_megatron_are_judged(program):
    where = f"stale_megatron:{program.inputs.__name__}"

    found = stale_battery.measure("megatron", program, where, first=True)

    assert not {row["verdict"] for row in found} & set(BAD)
