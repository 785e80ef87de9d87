"""Two hosts whose names stand for 127.0.1.1, as Debian and Ubuntu have it, form a group: no Ray is needed for that."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import machines
from tests.support.machines import Machines, wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(600),
              pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-")]

HOSTS = ("printf '127.0.0.1 localhost\\n127.0.1.1 {name}\\n' > /tmp/hosts\n"
         "mount --bind /tmp/hosts /etc/hosts\nsleep infinity")
WORKER = """
import socket, sys, time
from pathlib import Path
import torch
from ray_yolo.engine.collectives import form_process_group, leave_process_group, serve_rendezvous_store

worker, note = int(sys.argv[1]), Path(sys.argv[2])
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
store = serve_rendezvous_store(f"10.77.0.{worker + 1}")
if worker == 0:
    note.with_suffix(".new").write_text(str(store.port))
    note.with_suffix(".new").rename(note)
while not note.exists():
    time.sleep(0.1)
collectives = form_process_group(store, ("10.77.0.1", int(note.read_text())), worker, 2, 60.0, torch.device("cpu"))
print("rows", collectives.gather(torch.tensor([[float(worker)]])).flatten().tolist())
leave_process_group()
"""


def test_hosts_whose_names_stand_for_a_loopback_address_train_together() -> None:
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:  # each machine has a /tmp of its own
        folder = Path(name)
        (folder / "worker.py").write_text(WORKER)
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]),
               "OMP_NUM_THREADS": "1"}
        with Machines(folder, {name: HOSTS.format(name=name) for name in ("n1", "n2")}, env) as nodes:
            for name in ("n1", "n2"):
                wait_for(lambda name=name: "127.0.1.1" in nodes.run(name, "cat", "/etc/hosts").stdout, 60.0)
            workers = [nodes.start(f"n{number + 1}", sys.executable, folder / "worker.py", str(number), folder / "port",
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for number in range(2)]
            messages = [worker.communicate(timeout=300)[0] for worker in workers]
    for text in messages:
        assert "rows [0.0, 1.0]" in text, text
