"""Three peers of DisPFL without a server, each with its own data, state and journal; then their journals as one run.

Keys, journals and the run are in a new folder each time.

Here they are three threads and pass messages in memory. On machines of their own each runs `sparsona peer fed.toml`
(docs/deployment.md), with the same bits.
"""

import tempfile
from pathlib import Path

import sparsona as sp
from sparsona.deploy import identity
from sparsona.deploy.exchange import in_threads
from sparsona.deploy.federation_file import FederationFile
from sparsona.deploy.identity import KeyFile, Roster
from sparsona.experiment.agreement import agree
from sparsona.experiment.client_data import own_data
from sparsona.experiment.peers import make_peer, play_together
from sparsona.experiment.terms import Terms

place = Path(tempfile.mkdtemp(prefix="three-peers-", dir="."))
OPTIONS = {"rounds": 4, "epochs": 1, "seed": 0, "graph": "ring"}

# What all agree on, and who they are: `sparsona federation new`, `keys new` and `federation admit` do the same.
run = agree("dispfl", OPTIONS, model="digits-cnn", classes=10, input_shape=(1, 8, 8))
authority = identity.new_authority("labs", place / "labs.authority.key")
file = FederationFile("labs", run, authority.certificate)
keys = [KeyFile.read(identity.new_key(name, place)[0]) for name in ("lab-1", "lab-2", "lab-3")]
for number, key in enumerate(keys, start=1):
    file = file.admit(identity.Request(f"lab-{number}", key.public), authority)
file.write(place / "labs.toml")
terms = Terms.read(place / "labs.toml")

# Each peer plays its own turns, and asks its neighbours for what they said last.
handles = {}
peers = []
for index, key in enumerate(keys):
    mine = own_data(terms, index, "digits")  # or "arrays:mine.npz"
    folder = place / "peers" / f"lab-{index + 1}"
    peers.append(make_peer(terms, index, mine, folder, in_threads(handles), key, Roster(terms.file.keys())))
    handles[index] = peers[index].handle
play_together(peers)

gathered = sp.gather(place / "run", [peer.vault.folder for peer in peers])
simulated = sp.train("dispfl", clients=3, executor="serial", **OPTIONS)
assert gathered.summary["accuracy"] == simulated.summary["accuracy"]
assert gathered.summary["bytes"] == simulated.summary["bytes"]
print(gathered)
print("the same accuracy and bytes as in the simulation")
