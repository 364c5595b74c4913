"""Kills (-9) the server and the clients of real runs, or peers, at random moments, and compares with undisturbed runs.

    PYTHONPATH=src:tests python tests/network/kills.py --kills 100 [--seed 0] [--rounds 8] [--pause 1.0]
    PYTHONPATH=src:tests python tests/network/kills.py --peers 30

Each run has several kills; a run whose clients and server, or peers, are started again must end with the same records
and the same model. Prints one line a run, with its seed, and the number of kills and of runs that were the same.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from federations import free_addresses, make
from processes import ForkServer
from real import SERVER, Parties, finish, kill_at_random, undisturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="stop after so many")
    parser.add_argument("--peers", type=int, metavar="KILLS", help="of peers, and stop after so many")
    parser.add_argument("--seconds", type=float, default=3600.0, help="or begin no further run after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between kills, in the mean")
    parser.add_argument("--method", help="[fedspa, or dispfl for peers]")
    given = parser.parse_args()
    most = given.kills if given.peers is None else given.peers
    method = given.method or ("fedspa" if given.peers is None else "dispfl")
    own = {"novel": 0} if given.peers is None else {"graph": "full", "addresses": tuple(free_addresses(2))}
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    events = processes = runs = same = equal_kills = 0
    forks = ForkServer()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = make(folder / "federation", method, given.clients, rounds=given.rounds, drop_rate=0.2, **own)
            expected = undisturbed(made, folder / "simulated")
            seed = given.seed
            while events < most and time.monotonic() - began < given.seconds:
                draws, at = random.Random(seed), time.monotonic()
                with Parties(forks, made, folder / f"seed-{seed}") as parties:
                    kills = list(kill_at_random(parties, draws, min(20, most - events), given.pause))
                    finish(parties, 300.0)
                    is_same = parties.traces() == expected
                    if not is_same:
                        print(parties.logs(), file=sys.stderr)
                runs, same, events = runs + 1, same + is_same, events + len(kills)
                equal_kills += len(kills) * is_same
                processes += sum(len(one.names) for one in kills)
                for one in kills:
                    others = "clients" if given.peers is None else "peers"
                    all_of = len(one.names) == len(parties.all)
                    kinds["all" if all_of else "server" if SERVER in one.names else others] += 1
                where = " ".join(f"{'+'.join(one.names)}@{one.round}" for one in kills)
                took = time.monotonic() - at
                print(f"seed {seed}: {'same' if is_same else 'DIFFERENT'}, {len(kills)} kills in {took:.0f} s: {where}")
                sys.stdout.flush()
                shutil.rmtree(folder / f"seed-{seed}")
                seed += 1
    finally:
        forks.close()
    print(f"{events} kills of {processes} processes ({dict(kinds)}), {equal_kills} in runs that ended the same;")
    print(f"{same} of {runs} runs the same; {time.monotonic() - began:.0f} s")
    sys.exit(0 if same == runs else 1)


if __name__ == "__main__":
    main()
