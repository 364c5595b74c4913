"""What methods give on digits is what was recorded: see record_runs.py, which also runs workers and kills."""

from __future__ import annotations

import json

import pytest
from record_runs import CASES, FILE, difference, machine, record

# The others are more of the same.
QUICK = {"fedavg", "fedsim-norms", "fedspa", "dispfl", "pfedgate"}
STORED = json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_run_is_what_was_recorded(case):
    found, stored = record(case, ("serial",)), STORED["cases"][case]
    # Bits, and with them accuracies, belong to a processor and a version of torch; what is counted does not.
    if STORED["machine"] != machine():
        found, stored = ({key: values[key] for key in ("bytes", "flops")} for values in (found, stored))
        if stored["bytes"].get("upload_share") is not None:  # pFedGate sends what training chose
            found, stored = found["flops"], stored["flops"]
    assert not difference(stored, found)


def test_a_difference_is_found():
    one = STORED["cases"]["fedspa"]
    assert difference(one, one) == ""
    changed = {**one, "flops": {**one["flops"], "train": one["flops"]["train"] + 1}}
    assert difference(one, changed).startswith("flops.train: ")
